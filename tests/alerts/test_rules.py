"""Generated rules, their promtool tests and their runbooks are complete and up to date."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts.render import generated, main, render_rules
from monitor.catalog import BY_NAME
from monitor.detectors import DETECTORS
from tests.helpers import REPOSITORY
from tests.servers import need

ALERTS = REPOSITORY / "alerts"
RULES = ALERTS / "verl-monitor.rules.yml"
TEST_FILES = sorted((ALERTS / "tests").glob("*.test.yml"))


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


NAMES = sorted({(rule["alert"], rule["labels"]["severity"]) for rule in _rules()})


def test_generated_files_are_those_of_the_specs() -> None:
    stale = [str(path) for path, text in generated().items() if (REPOSITORY / path).read_text() != text]
    assert stale == [], "run `make generate`"
    assert {path.name for path in (REPOSITORY / "docs" / "runbooks").glob("*.md")} == {
        path.name for path in generated() if path.parent.name == "runbooks"}, "a runbook without an alert"


def test_check_tells_a_difference_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    assert main(["--out", str(tmp_path), "--check"]) == 0
    file = tmp_path / "alerts" / "alertmanager.yml"
    file.write_text("changed")
    assert main(["--out", str(tmp_path), "--check"]) == 1
    assert file.read_text() == "changed"
    assert "differs: alerts/alertmanager.yml" in capsys.readouterr().out


def test_links_can_point_elsewhere() -> None:
    text = render_rules("https://monitor.example")
    assert "https://monitor.example/runbooks/VerlKlRunaway" in text
    assert "127.0.0.1" not in text


def test_promtool_accepts_the_rules() -> None:
    need("promtool", "prometheus")
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(_rules())} rules found" in done.stdout


@pytest.mark.parametrize("file", TEST_FILES, ids=lambda f: f.name)
def test_promtool_runs_the_tests(file: Path) -> None:
    need("promtool", "prometheus")
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _cases() -> list[dict[str, Any]]:
    return [case for file in TEST_FILES for case in yaml.safe_load(file.read_text())["tests"]]


@pytest.mark.parametrize(("alert", "severity"), NAMES)
def test_every_alert_has_a_firing_and_a_quiet_case(alert: str, severity: str) -> None:
    fires = quiet = 0
    for case in _cases():
        for asked in case.get("promql_expr_test", []):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', asked["expr"]))
            if labels["alertname"] != alert or labels.get("severity", severity) != severity:
                continue
            told = [sample for sample in asked["exp_samples"] if f'severity="{severity}"' in sample["labels"]]
            fires += bool(told)
            # A case without input is quiet whatever the rule says.
            quiet += not asked["exp_samples"] and bool(case["input_series"])
    assert fires, "no case in which it fires"
    assert quiet or alert == "VerlWatchdog", "no case in which it is quiet"


@pytest.mark.parametrize(("alert", "severity"), NAMES)
def test_every_alert_is_whole(alert: str, severity: str) -> None:
    [rule] = [r for r in _rules() if (r["alert"], r["labels"]["severity"]) == (alert, severity)]
    assert re.fullmatch(r"Verl([A-Z][a-z]+)+", alert)
    assert severity in ("critical", "warning") or alert == "VerlWatchdog"
    assert rule["for"]
    assert rule.get("keep_firing_for") or alert == "VerlWatchdog"
    assert {"summary", "description", "runbook_url"} <= set(rule["annotations"])
    assert rule["annotations"]["runbook_url"].endswith(f"/runbooks/{alert}")
    page = (REPOSITORY / "docs" / "runbooks" / f"{alert}.md").read_text()
    for heading in ("Meaning", "Impact", "Diagnosis", "Mitigation"):
        section = page.split(f"\n## {heading}\n")
        assert len(section) == 2, f"{heading} is missing"
        assert len(section[1].split("\n## ")[0].strip()) > 20 or alert == "VerlWatchdog"


def test_rules_use_nothing_that_one_of_the_versions_lacks() -> None:
    text = RULES.read_text()
    for word in ("holt_winters", "mad_over_time", "query_offset", "limit:", "info("):
        assert word not in text
    assert "labels:" not in [line.strip() for line in text.splitlines() if line.startswith("  labels")]


def test_every_metric_in_the_rules_is_one_of_ours() -> None:
    design = (REPOSITORY / "DESIGN.md").read_text()
    for rule in _rules():
        texts = [rule["expr"], *rule["annotations"].values()]
        for name in re.findall(r"\bverl_[a-z0-9_]+", " ".join(texts)):
            assert f"`{name}`" in design or name.removeprefix("verl_") in BY_NAME, name


def test_runbooks_name_verls_own_keys() -> None:
    for kind in DETECTORS:
        page = (REPOSITORY / "docs" / "runbooks" / f"{kind.spec.alert}.md").read_text()
        mitigation = page.split("## Mitigation")[1].split("\n## ")[0]
        assert re.search(r"\b(actor_rollout_ref|algorithm|critic|trainer|reward|data)\.[a-z_.]+", mitigation)
