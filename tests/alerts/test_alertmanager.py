"""Routing and inhibition, asked of the real Alertmanager."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from alerts.render import render_alertmanager
from tests.helpers import REPOSITORY, wait_for
from tests.servers import alertmanager, get_json, need, webhook

CONFIG = REPOSITORY / "alerts" / "alertmanager.yml"


def test_amtool_accepts_the_configuration() -> None:
    need("amtool", "prometheus-alertmanager")
    done = subprocess.run(["amtool", "check-config", str(CONFIG)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("labels", "receiver"), [
    (["alertname=VerlKlRunaway", "severity=critical", "run=a", "detector=kl_runaway"], "page"),
    (["alertname=VerlKlRunaway", "severity=warning", "run=a", "detector=kl_runaway"], "notice"),
    (["alertname=VerlMonitorDown", "severity=critical"], "page"),
    (["alertname=VerlMonitorSourceStale", "severity=warning"], "notice"),
    (["alertname=VerlWatchdog", "severity=none"], "watchdog"),
])
def test_routes(labels: list[str], receiver: str) -> None:
    need("amtool", "prometheus-alertmanager")
    done = subprocess.run(["amtool", "config", "routes", "test", f"--config.file={CONFIG}", *labels],
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() == receiver


def _alert(name: str, **labels: str) -> dict[str, Any]:
    return {"labels": {"alertname": name, **labels}, "annotations": {"summary": name}}


def _post(url: str, alerts: list[dict[str, Any]]) -> None:
    request = urllib.request.Request(f"{url}/api/v2/alerts", json.dumps(alerts).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.status == 200


def test_one_cause_one_page(tmp_path: Path) -> None:
    """Case 59: NaN and everything that follows from it in one run, a warning in another."""
    def finding(run: str, detector: str, severity: str, name: str) -> dict[str, Any]:
        return _alert(name, run=run, detector=detector, severity=severity)

    alerts = [
        finding("a", "non_finite", "critical", "VerlNonFinite"),
        finding("a", "kl_runaway", "critical", "VerlKlRunaway"),
        finding("a", "kl_runaway", "warning", "VerlKlRunaway"),
        finding("a", "advantage_explosion", "warning", "VerlAdvantageExplosion"),
        finding("a", "rollout_stall", "critical", "VerlRolloutStall"),
        finding("b", "kl_runaway", "warning", "VerlKlRunaway"),
        finding("c", "rollout_stall", "critical", "VerlRolloutStall"),
        finding("c", "critic_loss_oscillation", "critical", "VerlCriticLossOscillation"),
        finding("d", "critic_loss_oscillation", "critical", "VerlCriticLossOscillation"),
        finding("d", "critic_loss_oscillation", "warning", "VerlCriticLossOscillation"),
        _alert("VerlMonitorDown", severity="critical"),
        _alert("VerlMonitorSourceStale", severity="warning", source="file:logs"),
        _alert("VerlWatchdog", severity="none"),
    ]
    with webhook() as hook, alertmanager(render_alertmanager(webhook=hook.url), tmp_path) as url:
        _post(url, alerts)
        wait_for(lambda: len(hook.at("/page", "firing")) >= 4, 20, "four pages")
        told = get_json(f"{url}/api/v2/alerts")
        quiet = {(a["labels"].get("run"), a["labels"]["alertname"], a["labels"]["severity"]) for a in told
                 if a["status"]["state"] == "suppressed"}
        assert quiet == {
            ("a", "VerlKlRunaway", "critical"), ("a", "VerlKlRunaway", "warning"),
            ("a", "VerlAdvantageExplosion", "warning"), ("a", "VerlRolloutStall", "critical"),
            ("c", "VerlCriticLossOscillation", "critical"), ("d", "VerlCriticLossOscillation", "warning"),
            (None, "VerlMonitorSourceStale", "warning"),
        }
        pages = sorted((p["groupLabels"].get("run", "-"), [a["labels"]["alertname"] for a in p["alerts"]])
                       for p in hook.at("/page", "firing"))
        assert pages == [("-", ["VerlMonitorDown"]), ("a", ["VerlNonFinite"]), ("c", ["VerlRolloutStall"]),
                         ("d", ["VerlCriticLossOscillation"])]
        notices = [(p["groupLabels"].get("run"), [a["labels"]["alertname"] for a in p["alerts"]])
                   for p in hook.at("/notice", "firing")]
        assert notices == [("b", ["VerlKlRunaway"])]
