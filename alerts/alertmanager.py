"""Alertmanager configuration: one page per run and cause, consequences inhibited."""

from __future__ import annotations

from typing import Any

from monitor.detectors import DETECTORS

DEFAULT_WEBHOOK = "http://127.0.0.1:9561"


def configuration(webhook: str = DEFAULT_WEBHOOK) -> dict[str, Any]:
    """The configuration. ``webhook``: base address; pages go to ``/page`` below it, warnings to ``/notice``."""
    return {
        "route": {
            "receiver": "notice",
            # One notification per run. Not by instance or replica, which would page once for each.
            "group_by": ["run"],
            "group_wait": "5s", "group_interval": "30s", "repeat_interval": "4h",
            "routes": [
                {"matchers": ['alertname="VerlWatchdog"'], "receiver": "watchdog", "group_by": ["alertname"],
                 "group_wait": "0s", "group_interval": "1m", "repeat_interval": "5m"},
                {"matchers": ['alertname=~"VerlMonitor.*"', 'severity="critical"'], "receiver": "page",
                 "group_by": ["alertname"]},
                {"matchers": ['alertname=~"VerlMonitor.*"'], "receiver": "notice", "group_by": ["alertname"]},
                {"matchers": ['severity="critical"'], "receiver": "page"},
                {"matchers": ['severity="warning"'], "receiver": "notice"},
            ],
        },
        "inhibit_rules": inhibitions(),
        "receivers": [
            {"name": "page", "webhook_configs": [{"url": f"{webhook}/page", "send_resolved": True}]},
            {"name": "notice", "webhook_configs": [{"url": f"{webhook}/notice", "send_resolved": True}]},
            # No receiver: give it the address of a dead man's switch, which raises the alarm when this stops coming.
            {"name": "watchdog"},
        ],
    }


def inhibitions() -> list[dict[str, Any]]:
    """What silences what. A label that both alerts lack counts as equal, so each side names alerts that have it."""
    by_id = {kind.spec.id: kind.spec for kind in DETECTORS}
    rules: list[dict[str, Any]] = [
        {"source_matchers": ['severity="critical"', 'detector!=""', 'run!=""'],
         "target_matchers": ['severity="warning"', 'detector!=""', 'run!=""'],
         "equal": ["run", "detector"]},
        {"source_matchers": ['detector="non_finite"', 'severity="critical"'],
         "target_matchers": ['detector!="non_finite"', 'detector!=""'], "equal": ["run"]},
        {"source_matchers": ['detector="rollout_stall"', 'severity="critical"'],
         "target_matchers": ['detector!~"non_finite|rollout_stall"', 'detector!=""'], "equal": ["run"]},
    ]
    for spec in by_id.values():
        causes = [cause for cause in spec.under if cause not in ("non_finite", "rollout_stall")]
        rules += [{"source_matchers": [f'detector="{cause}"', 'severity="critical"'],
                   "target_matchers": [f'detector="{spec.id}"'], "equal": ["run"]} for cause in causes]
    rules.append({
        "source_matchers": ['alertname="VerlMonitorDown"'],
        "target_matchers": ['alertname=~"VerlMonitor(SourceStale|NoData|NotIngesting|Rejecting)"']})
    return rules
