"""One cause, one page: alerts posted to the real Alertmanager (case 59)."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alerts.render import render_alertmanager
from tests.helpers import wait_for
from tests.servers import Webhook, alertmanager, get_json, webhook


@dataclass
class Stack:
    """An Alertmanager with our configuration, and what it sent."""

    url: str
    hook: Webhook

    def post(self, *alerts: dict[str, str]) -> None:
        """Hand alerts over as Prometheus does."""
        body = json.dumps([{"labels": labels, "annotations": {"summary": labels["alertname"]}} for labels in alerts])
        request = urllib.request.Request(f"{self.url}/api/v2/alerts", body.encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert answer.status == 200

    def alerts(self, inhibited: bool) -> set[tuple[str, str, str]]:
        """Name, severity and run of the alerts that are, or are not, inhibited."""
        told = get_json(f"{self.url}/api/v2/alerts?active={str(not inhibited).lower()}"
                        f"&inhibited={str(inhibited).lower()}")
        return {(a["labels"]["alertname"], a["labels"]["severity"], a["labels"].get("run", "")) for a in told}

    def sent(self, path: str) -> list[tuple[dict[str, str], set[str]]]:
        """Group and alerts of every notification."""
        return [(body["groupLabels"], {alert["labels"]["alertname"] for alert in body["alerts"]})
                for body in self.hook.at(path, "firing")]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Group waits are shortened: they decide how long the test takes, and nothing about who is told."""
    with (
        webhook() as hook,
        alertmanager(render_alertmanager(hook.url, group_wait="1s", group_interval="2s"), tmp_path) as url,
    ):
        yield Stack(url, hook)


def _finding(detector: str, severity: str, run: str, **more: str) -> dict[str, str]:
    name = "Verl" + "".join(word.capitalize() for word in detector.split("_"))
    return {"alertname": name, "detector": detector, "severity": severity, "run": run, **more}


def _own(name: str, severity: str = "critical", instance: str = "m:1", **more: str) -> dict[str, Any]:
    return {"alertname": f"VerlMonitor{name}", "severity": severity, "job": "verl-monitor", "instance": instance,
            **more}


def test_one_page_for_a_run_that_is_broken_in_many_ways(stack: Stack) -> None:
    rules_of_others = [{"alertname": f"Gpu{rule}", "severity": "critical", "run": "a", "gpu": str(gpu)}
                       for gpu in range(8) for rule in ("Idle", "Hot", "Slow", "Full")]
    stack.post(
        _finding("non_finite", "critical", "a"), *rules_of_others,
        _finding("kl_runaway", "critical", "a"), _finding("kl_runaway", "warning", "a"),
        _finding("rollout_stall", "critical", "a"), _finding("advantage_explosion", "warning", "a"),
        _finding("kl_runaway", "warning", "b"),
        {"alertname": "VerlWatchdog", "severity": "none"},
    )
    wait_for(lambda: stack.sent("/page") and stack.sent("/notice"), 15, "both notifications")
    assert len(stack.alerts(inhibited=True)) == 8
    time.sleep(2.5)  # a round of group_interval more, which must bring no other
    assert stack.alerts(inhibited=False) == {("VerlNonFinite", "critical", "a"), ("VerlKlRunaway", "warning", "b"),
                                             ("VerlWatchdog", "none", "")}
    assert stack.sent("/page") == [({"run": "a"}, {"VerlNonFinite"})]
    assert stack.sent("/notice") == [({"run": "b"}, {"VerlKlRunaway"})]


def test_what_silences_what(stack: Stack) -> None:
    stack.post(
        # The same finding in another run is told.
        _finding("non_finite", "critical", "a"), _finding("kl_runaway", "critical", "a"),
        _finding("kl_runaway", "critical", "other"),
        # A run that hangs.
        _finding("rollout_stall", "critical", "c"), _finding("critic_loss_oscillation", "critical", "c"),
        # Both severities of one finding; the warning of another stays.
        _finding("critic_loss_oscillation", "critical", "d"), _finding("critic_loss_oscillation", "warning", "d"),
        _finding("kl_runaway", "warning", "d"),
        # NaN in a batch is a warning: it hides warnings that follow from it, and no page.
        _finding("non_finite", "warning", "e"), _finding("kl_runaway", "warning", "e"),
        _finding("advantage_explosion", "critical", "e"),
        # Neither of these has a run, and neither silences the other for that.
        _own("DetectorErrors", "warning", detector="kl_runaway"), _own("Rejecting", "warning", source="logs"),
    )
    expected = {("VerlKlRunaway", "critical", "a"), ("VerlCriticLossOscillation", "critical", "c"),
                ("VerlCriticLossOscillation", "warning", "d"), ("VerlKlRunaway", "warning", "e")}
    wait_for(lambda: stack.alerts(inhibited=True) == expected, 10, "inhibition")
    assert ("VerlKlRunaway", "critical", "other") in stack.alerts(inhibited=False)
    assert len(stack.alerts(inhibited=False)) == 9


def test_a_monitor_that_is_down_silences_its_other_alerts_and_no_other_monitors(stack: Stack) -> None:
    stack.post(_own("Down"), _own("NotIngesting"), _own("SourceStale", source="logs"), _own("NoData"),
               _own("NotIngesting", instance="m:2"), _own("SourceStale", "warning", "m:2", source="logs"),
               _own("SourceStale", "warning", "m:3", source="logs"))
    expected = {("VerlMonitorNotIngesting", "critical", ""), ("VerlMonitorSourceStale", "critical", ""),
                ("VerlMonitorNoData", "critical", ""), ("VerlMonitorSourceStale", "warning", "")}
    wait_for(lambda: stack.alerts(inhibited=True) == expected, 10, "inhibition")
    assert stack.alerts(inhibited=False) == {
        ("VerlMonitorDown", "critical", ""), ("VerlMonitorNotIngesting", "critical", ""),
        ("VerlMonitorSourceStale", "warning", "")}


def test_a_monitor_that_vanished_silences_what_is_left_of_its_job(stack: Stack) -> None:
    vanished = {key: value for key, value in _own("Down").items() if key != "instance"}
    stack.post(vanished, _own("NotIngesting"), _own("NoData"))
    wait_for(lambda: len(stack.alerts(inhibited=True)) == 2, 10, "inhibition")
    assert stack.alerts(inhibited=False) == {("VerlMonitorDown", "critical", "")}
