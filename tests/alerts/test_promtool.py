"""promtool's unit tests: they pass, every alert has one that fires and one that is quiet, and they would notice."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.alerts import RULES, TEST_FILES, ask, rules

ALERTS = sorted({(rule["alert"], rule["labels"]["severity"]) for rule in rules()})
ALWAYS = "VerlWatchdog"


@pytest.mark.parametrize("file", TEST_FILES, ids=lambda file: file.name.removesuffix(".test.yml"))
def test_promtool_passes(file: Path) -> None:
    done = ask("promtool", "test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def _cases() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every question about an alert, with the test that it stands in."""
    for file in TEST_FILES:
        for test in yaml.safe_load(file.read_text())["tests"]:
            for asked in test.get("alert_rule_test", []):
                yield test, asked


CASES = list(_cases())


def _inputs(test: dict[str, Any]) -> set[str]:
    return {re.split(r"[{ ]", series["series"])[0] for series in test["input_series"]}


@pytest.mark.parametrize(("alert", "severity"), ALERTS)
def test_every_alert_has_a_case_that_fires_and_one_that_is_quiet(alert: str, severity: str) -> None:
    [rule] = [r for r in rules() if (r["alert"], r["labels"]["severity"]) == (alert, severity)]
    fires = [test["name"] for test, asked in CASES if asked["alertname"] == alert
             for found in asked["exp_alerts"] if found["exp_labels"]["severity"] == severity]
    # Quiet says something only where the metrics that the rule asks for are there.
    quiet = [test["name"] for test, asked in CASES
             if asked["alertname"] == alert and not asked["exp_alerts"]
             and any(re.search(rf"\b{name}\b", rule["expr"]) for name in _inputs(test))]
    assert fires, "no case in which it fires"
    assert bool(quiet) is (alert != ALWAYS), "no case in which it is quiet"


@pytest.mark.parametrize("alert", sorted({name for name, _ in ALERTS if name.startswith("Verl")}))
def test_firing_cases_hold_every_annotation(alert: str) -> None:
    found = [entry for _, asked in CASES if asked["alertname"] == alert for entry in asked["exp_alerts"]]
    assert found
    for entry in found:
        assert {"summary", "description", "action", "runbook_url"} <= set(entry["exp_annotations"])
        assert "{{" not in str(entry) and "no value" not in str(entry)  # noqa: PT018 - one thing: it is filled in


@pytest.mark.parametrize("alert", sorted({r["alert"] for r in rules() if "verl_health_state" in r["expr"]}))
def test_every_detector_is_tried_with_nan_gaps_and_alternation(alert: str) -> None:
    [text] = [file.read_text() for file in TEST_FILES if file.name == f"{alert}.test.yml"]
    for part in ("NaN NaN", "Inf", "stale _x8", "2x8 0x6", "1x8 0x6", "ALERTS_FOR_STATE", "instance=\"two\""):
        assert part in text, part


def test_down_is_tried_as_the_public_cases_ask() -> None:
    names = " ".join(test["name"] for test, asked in CASES if asked["alertname"] == "VerlMonitorDown")
    assert all(f"(case 57 {letter})" in names for letter in "abcd")


@pytest.mark.parametrize(("alert", "old", "new"), [
    ("VerlKlRunaway", "keep_firing_for: 2m", "keep_firing_for: 0s"),
    ("VerlKlRunaway", "max by (run, detector) ", "max by (run, detector, instance) "),
    ("VerlKlRunaway", "for: 5s", "for: 0s"),
    ("VerlKlRunaway", "== 1", ">= 1"),
    ("VerlKlRunaway", " nats", " nat"),
    ("VerlMonitorDown", "absent(up", "(0 * up"),
    ("VerlMonitorDown", "[1d]", "[5m]"),
    ("VerlMonitorDown", "[7d]", "[1h]"),
    ("VerlMonitorDown", "[7d])) == 0", "[7d])) >= 0"),
    ("VerlMonitorDown", 'source="attach"', 'source="push"'),
    ("VerlMonitorNotIngesting", "changes(", "resets("),
    ("VerlMonitorRejecting", "for: 15m", "for: 9m"),
])
def test_a_fault_in_the_rules_is_noticed(tmp_path: Path, alert: str, old: str, new: str) -> None:
    text = RULES.read_text()
    assert old in text
    (tmp_path / "tests").mkdir()
    (tmp_path / RULES.name).write_text(text.replace(old, new))
    shutil.copy(RULES.parent / "tests" / f"{alert}.test.yml", tmp_path / "tests")
    assert ask("promtool", "check", "rules", tmp_path / RULES.name).returncode == 0, "a fault, not nonsense"
    done = ask("promtool", "test", "rules", tmp_path / "tests" / f"{alert}.test.yml")
    assert done.returncode != 0
    assert "exp:" in done.stdout + done.stderr
