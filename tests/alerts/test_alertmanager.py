"""Alertmanager's configuration, asked of amtool, and its inhibitions, of each pair of alerts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from alerts.alertmanager import causes, inhibitions, render_alertmanager
from alerts.options import SPECS
from monitor.model import DetectorSpec
from tests.alerts import CONFIG, ask, rules

Labels = dict[str, str]


def test_amtool_takes_the_configuration() -> None:
    done = ask("amtool", "check-config", CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("labels", "receiver"), [
    ("alertname=VerlKlRunaway severity=critical run=a detector=kl_runaway", "page"),
    ("alertname=VerlKlRunaway severity=warning run=a detector=kl_runaway", "notice"),
    ("alertname=VerlMonitorDown severity=critical job=verl-monitor", "page"),
    ("alertname=VerlMonitorSourceStale severity=warning job=verl-monitor instance=m source=logs", "notice"),
    ("alertname=VerlMonitorDetectorErrors severity=warning detector=kl_runaway", "notice"),
    ("alertname=VerlWatchdog severity=none", "null"),
    ("alertname=SomebodyElses", "notice"),
])
def test_routes(labels: str, receiver: str) -> None:
    done = ask("amtool", "config", "routes", "test", f"--config.file={CONFIG}", f"--verify.receivers={receiver}",
               *labels.split())
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_has_a_route() -> None:
    severities = {rule["labels"]["severity"] for rule in rules()}
    assert severities == {"critical", "warning", "none"}


def _matches(matchers: list[str], labels: Labels) -> bool:
    for matcher in matchers:
        name, sign, value = re.fullmatch(r'(\w+)(=~|!~|!=|=)"(.*)"', matcher).groups()  # type: ignore[union-attr]  # is one
        actual = labels.get(name, "")
        same = bool(re.fullmatch(value, actual)) if "~" in sign else actual == value
        if same is sign.startswith("!"):
            return False
    return True


def inhibits(rule: dict[str, Any], source: Labels, target: Labels) -> bool:
    """Whether Alertmanager lets ``source`` silence ``target`` by a rule: a label that both lack is equal."""
    return (_matches(rule["source_matchers"], source) and _matches(rule["target_matchers"], target)
            and all(source.get(name, "") == target.get(name, "") for name in rule["equal"]))


def _everything(specs: tuple[DetectorSpec, ...]) -> list[Labels]:
    """Each alert that can be there for one run and one monitor."""
    found = [{"alertname": spec.alert, "detector": spec.id, "severity": severity, "run": "a"}
             for spec, severity in product(specs, ("critical", "warning"))]
    own = [{"alertname": rule["alert"], "severity": rule["labels"]["severity"], "job": "verl-monitor", "instance": "m"}
           for rule in rules() if rule["alert"].startswith("VerlMonitor")]
    own[0] = {"alertname": "VerlMonitorDown", "severity": "critical", "job": "verl-monitor"}
    other = [{"alertname": "OwnRule", "severity": "critical", "run": "a", "gpu": "3"},
             {"alertname": "VerlMonitorDetectorErrors", "severity": "warning", "detector": "kl_runaway"},
             {"alertname": "VerlWatchdog", "severity": "none"}, {"alertname": "Unrelated"}]
    return found + own + other


def _silenced_by(specs: tuple[DetectorSpec, ...]) -> dict[int, set[int]]:
    every, made = _everything(specs), inhibitions(specs)
    return {t: {s for s, source in enumerate(every) if any(inhibits(rule, source, target) for rule in made)}
            for t, target in enumerate(every)}


def _chain(extra: tuple[str, ...] = ()) -> tuple[DetectorSpec, ...]:
    """Detectors as they may come: a cause of a stall, its consequence, and the consequence of that."""
    base = SPECS[0]
    return (*(replace(spec, under=(*spec.under, "actor_dead")) if spec.id == "rollout_stall" else spec
              for spec in SPECS),
            replace(base, id="actor_dead", under=extra), replace(base, id="slow", under=("rollout_stall",)),
            replace(base, id="slower", under=("slow",)))


@pytest.mark.parametrize("specs", [SPECS, _chain()], ids=["ours", "with a cause of a stall"])
def test_nothing_silences_itself_and_something_is_always_told(specs: tuple[DetectorSpec, ...]) -> None:
    """An alert that is itself silenced still silences others, so a circle would be silent altogether."""
    silenced_by = _silenced_by(specs)
    left = set(silenced_by)
    while left:
        told = {alert for alert in left if not silenced_by[alert] & left}
        assert told, f"these silence each other: {[_everything(specs)[alert] for alert in left]}"
        left -= told


@pytest.mark.parametrize("specs", [SPECS, _chain()], ids=["ours", "with a cause of a stall"])
def test_nothing_reaches_into_another_run_or_monitor(specs: tuple[DetectorSpec, ...]) -> None:
    every, made = _everything(specs), inhibitions(specs)
    for source, target in product(every, every):
        for key in ("run", "instance"):
            if key in target:
                assert not any(inhibits(rule, source, {**target, key: "another"}) for rule in made
                               if key in source or key == "run"), (source, target)


def test_a_page_is_never_silenced_by_a_notice() -> None:
    every = _everything(SPECS)
    for target, sources in _silenced_by(SPECS).items():
        if every[target].get("severity") == "critical":
            assert all(every[source]["severity"] == "critical" for source in sources)


def test_causes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="under itself"):
        causes(_chain(extra=("slower",)))
    with pytest.raises(ValueError, match="no such detector: typo"):
        causes((replace(SPECS[0], under=("typo",)),))


def test_times_and_address_are_those_asked_for() -> None:
    text = render_alertmanager("http://hook.example/", group_wait="1s", group_interval="2s")
    for part in ("url: http://hook.example/page", "group_wait: 1s", "group_interval: 2s", "repeat_interval: 4h"):
        assert f"{part}\n" in text
