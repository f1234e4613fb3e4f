"""From a line in a file to one page: the real Prometheus and Alertmanager, with the files that we ship."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from alerts.render import render_alertmanager
from tests.helpers import LAB, REPOSITORY, wait_for
from tests.servers import Webhook, alertmanager, get_json, monitor, prometheus, webhook

RULES = REPOSITORY / "alerts" / "verl-monitor.rules.yml"


def _prometheus(monitor_url: str, alertmanager_url: str) -> str:
    return f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{RULES}"]
alerting:
  alertmanagers: [{{static_configs: [{{targets: ["{alertmanager_url.removeprefix('http://')}"]}}]}}]
scrape_configs:
  - job_name: verl-monitor
    static_configs: [{{targets: ["{monitor_url.removeprefix('http://')}"]}}]
"""


def _pages(hook: Webhook) -> list[dict[str, Any]]:
    return hook.at("/page", "firing")


@pytest.mark.timeout(420)
def test_a_failing_run_pages_once_and_resolves_when_it_ends(tmp_path: Path) -> None:
    lines = (LAB / "ppo-skipped-updates.jsonl").read_bytes().splitlines(keepends=True)
    logs = tmp_path / "logs" / "project"
    logs.mkdir(parents=True)
    # Group interval and retention are shortened: they only decide how long the end of the story takes.
    rendered = render_alertmanager(webhook="{hook}").replace("group_interval: 30s", "group_interval: 10s")
    with (
        webhook() as hook,
        alertmanager(rendered.replace("{hook}", hook.url), tmp_path) as alerts_url,
        monitor(tmp_path / "logs", log=tmp_path / "monitor.log", options=["--retain-ended", "5"]) as url,
        prometheus(_prometheus(url, alerts_url), tmp_path),
    ):
        log = logs / "failing.jsonl"
        with log.open("wb", buffering=0) as file:
            for line in lines[:2]:
                file.write(line)
                time.sleep(0.3)
            time.sleep(3)
            assert _pages(hook) == [], "two good rows page nobody"
            for line in lines[2:20]:
                file.write(line)
                time.sleep(0.2)
                if line is lines[2]:
                    wait_for(lambda: get_json(f"{url}/api/v1/runs/failing")["verdict"] == "critical", 5, "verdict")
                    verdict = time.time()
            wait_for(lambda: _pages(hook), 20, "the page")
            arrived = hook.calls[0][0] if hook.calls else 0.0
            assert arrived - verdict <= 15.0
            for line in lines[20:]:
                file.write(line)
                time.sleep(0.2)
            time.sleep(15)
            [page] = _pages(hook)
        log.unlink()

        assert page["groupLabels"] == {"run": "failing"}
        [alert] = page["alerts"]
        assert alert["labels"]["alertname"] == "VerlNonFinite"
        assert alert["labels"]["severity"] == "critical"
        annotations = alert["annotations"]
        assert annotations["runbook_url"].endswith("/runbooks/VerlNonFinite")
        assert "gradient_norm/actor" in annotations["description"]
        assert "since step 2" in annotations["description"]
        assert "actor_rollout_ref.actor.optim.lr" in json.dumps(annotations)

        # The run has ended; its series go, and after keep_firing_for the page resolves.
        wait_for(lambda: get_json(f"{url}/api/v1/runs") == {"runs": []}, 30, "the run's series to leave")
        wait_for(lambda: hook.at("/page", "resolved"), 200, "the page to resolve")
        assert len(_pages(hook)) == 1
        assert {call[1] for call in hook.calls} == {"/page"}, "and no notice beside the page"


def test_a_healthy_run_that_ends_pages_nobody(tmp_path: Path) -> None:
    lines = (LAB / "ppo-healthy.jsonl").read_bytes().splitlines(keepends=True)
    logs = tmp_path / "logs"
    logs.mkdir()
    with (
        webhook() as hook,
        alertmanager(render_alertmanager(webhook=hook.url), tmp_path) as alerts_url,
        monitor(logs, log=tmp_path / "monitor.log") as url,
        prometheus(_prometheus(url, alerts_url), tmp_path) as prometheus_url,
    ):
        with (logs / "well.jsonl").open("wb", buffering=0) as file:
            for line in lines:
                file.write(line)
                time.sleep(0.1)
        time.sleep(12)
        assert get_json(f"{url}/api/v1/runs/well")["last_step"] == 120
        firing = {a["labels"]["alertname"] for a in get_json(f"{prometheus_url}/api/v1/alerts")["data"]["alerts"]}
        assert firing == {"VerlWatchdog"}
        assert [call for call in hook.calls if "Verl" in str(call)] == []
