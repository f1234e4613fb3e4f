"""Alertmanager's configuration: one page per run and cause.

Findings are grouped by run, alerts about the monitor by name; never by instance or replica, which would page once for
each. What follows from another finding is inhibited: the engine holds it back already when it comes after its cause,
and here it is held back when it came before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alerts.options import DEFAULTS, SPECS
from alerts.yaml_text import GENERATED, dump
from monitor.model import DetectorSpec

_CRITICAL, _WARNING = 'severity="critical"', 'severity="warning"'
_HAS_RUN, _HAS_DETECTOR = 'run!=""', 'detector!=""'

_TO_RECEIVERS = """
# Put your own receivers in: the names page, notice and null are what matters.
#
# VerlWatchdog always fires and goes nowhere. To hear of it when alerts no longer get out, give its route the receiver
# of a dead man's switch, a service outside that calls you when this stops coming:
#   routes: [{matchers: [alertname="VerlWatchdog"], receiver: deadman, group_wait: 0s, repeat_interval: 5m}]
#   receivers: [{name: deadman, webhook_configs: [{url: <its address>, send_resolved: false}]}]
"""

_TO_INHIBITIONS = """
# A label that both alerts lack counts as equal, so every rule asks for the labels that it compares.
"""


def render_alertmanager(webhook: str = DEFAULTS.webhook, *, group_wait: str = "5s", group_interval: str = "30s") -> str:
    """``alertmanager.yml``. ``webhook``: base address; pages go to ``/page`` below it, warnings to ``/notice``."""
    return (GENERATED + dump({"route": _route(group_wait, group_interval)}) + _TO_RECEIVERS
            + dump({"receivers": _receivers(webhook.rstrip("/"))}) + _TO_INHIBITIONS
            + dump({"inhibit_rules": inhibitions(SPECS)}))


def _route(group_wait: str, group_interval: str) -> dict[str, Any]:
    by_severity = [{"matchers": [_CRITICAL], "receiver": "page"}, {"matchers": [_WARNING], "receiver": "notice"}]
    return {
        # An alert of somebody else's that nobody routed is not lost, and wakes nobody.
        "receiver": "notice",
        "group_by": ["alertname"],
        "group_wait": group_wait, "group_interval": group_interval, "repeat_interval": "4h",
        "routes": [
            {"matchers": ['alertname="VerlWatchdog"'], "receiver": "null"},
            {"matchers": [_HAS_RUN], "group_by": ["run"], "routes": by_severity},
            *by_severity,
        ],
    }


def _receivers(webhook: str) -> list[dict[str, Any]]:
    hooks = [{"name": name, "webhook_configs": [{"url": f"{webhook}/{name}", "send_resolved": True}]}
             for name in ("page", "notice")]
    return [*hooks, {"name": "null"}]


def _rule(source: Sequence[str], target: Sequence[str], equal: Sequence[str]) -> dict[str, Any]:
    return {"source_matchers": list(source), "target_matchers": list(target), "equal": list(equal)}


def causes(specs: Sequence[DetectorSpec]) -> dict[str, set[str]]:
    """Everything that each detector is a consequence of, in any number of steps.

    Raises:
        ValueError: a cause is no detector, or a detector follows from itself. Two alerts that inhibit each other
            would both be silent.
    """
    direct = {spec.id: set(spec.under) for spec in specs}
    unknown = {cause for under in direct.values() for cause in under} - set(direct)
    if unknown:
        raise ValueError(f"no such detector: {', '.join(sorted(unknown))}; it stands in a spec's under")
    found = {identity: _reach(identity, direct) for identity in direct}
    for identity, above in found.items():
        if identity in above:
            raise ValueError(f"detector {identity} is, over others, under itself")
    return found


def _reach(start: str, direct: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(direct[start])
    while waiting:
        cause = waiting.pop()
        if cause not in reached:
            reached.add(cause)
            waiting.extend(direct[cause])
    return reached


def inhibitions(specs: Sequence[DetectorSpec]) -> list[dict[str, Any]]:
    """What silences what. No rule lets a cause be silenced by what follows from it."""
    above = causes(specs)
    rules = [_rule([_CRITICAL, _HAS_RUN, _HAS_DETECTOR], [_WARNING, _HAS_RUN, _HAS_DETECTOR], ["run", "detector"])]
    # A run that is broken or hangs: everything else that is said of it follows, rules of other people's included.
    total: list[str] = [identity for identity in ("non_finite", "rollout_stall") if identity in above]
    for place, identity in enumerate(total):
        spared = "|".join([identity, *sorted(above[identity].union(total[:place]))])
        rules.append(_rule([f'detector="{identity}"', _CRITICAL, _HAS_RUN], [_HAS_RUN, f'detector!~"{spared}"'],
                           ["run"]))
    # A cause hides what is no worse than itself: a page is never hidden under a mere notice.
    for identity in above:
        under = "|".join(spec.id for spec in specs if identity in spec.under)
        if not under:
            continue
        consequences = [_HAS_RUN, f'detector=~"{under}"']
        if identity not in total:
            rules.append(_rule([f'detector="{identity}"', _CRITICAL, _HAS_RUN], consequences, ["run"]))
        rules.append(_rule([f'detector="{identity}"', _WARNING, _HAS_RUN], [*consequences, _WARNING], ["run"]))
    return rules + _of_the_monitor()


def _of_the_monitor() -> list[dict[str, Any]]:
    others = 'alertname=~"VerlMonitor.+"'
    down, standing = 'alertname="VerlMonitorDown"', 'alertname="VerlMonitorNotIngesting"'
    return [
        _rule([down, 'instance!=""'], [others, 'alertname!="VerlMonitorDown"', 'instance!=""'], ["job", "instance"]),
        # A target that has vanished has no instance any more; then all of the job has vanished.
        _rule([down, 'instance=""', 'job!=""'], [others, 'alertname!="VerlMonitorDown"', 'job!=""'], ["job"]),
        _rule([standing, 'instance!=""'], [others, 'alertname!~"VerlMonitorDown|VerlMonitorNotIngesting"',
                                           'instance!=""'], ["job", "instance"]),
    ]
