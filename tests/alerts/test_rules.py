"""Every rule is whole, valid in both Prometheus versions, and asks for metrics that there are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from alerts.findings import capital, plain
from alerts.options import SPECS
from alerts.wording import EXAMPLES, sentence, units_of
from monitor.catalog import METRICS
from monitor.machine_metrics import MACHINE
from monitor.units import Unit
from tests.alerts import RULES, ask, rules
from tests.helpers import REPOSITORY

KNOWN = {metric.name for metric in (*METRICS, *MACHINE)}
ALL = rules()
IDS = [f"{rule['alert']}-{rule['labels']['severity']}" for rule in ALL]
FINDINGS = [rule for rule in ALL if "verl_health_state" in rule["expr"]]


def test_promtool_takes_the_rules() -> None:
    done = ask("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALL)} rules found" in done.stdout


@pytest.mark.parametrize("rule", ALL, ids=IDS)
def test_a_rule_is_whole(rule: dict[str, Any]) -> None:
    name, severity = rule["alert"], rule["labels"]["severity"]
    assert re.fullmatch(r"Verl([A-Z][a-z]+)+", name)
    assert rule["labels"] == {"severity": severity}
    assert severity in ("critical", "warning") or (name, severity) == ("VerlWatchdog", "none")
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert (rule.get("keep_firing_for") == "2m") is (name != "VerlWatchdog")
    annotations = rule["annotations"]
    assert all(annotations[key].strip() for key in ("summary", "description", "action", "runbook_url"))
    assert "\n" not in annotations["summary"]
    assert annotations["runbook_url"] == f"http://127.0.0.1:9560/runbooks/{name}"


def test_every_detector_has_both_severities_and_no_two_rules_are_one() -> None:
    expected = [(spec.alert, severity) for spec in SPECS for severity in ("critical", "warning")]
    assert [(rule["alert"], rule["labels"]["severity"]) for rule in FINDINGS] == expected
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("rule", FINDINGS, ids=[f"{r['alert']}-{r['labels']['severity']}" for r in FINDINGS])
def test_a_rule_about_a_run_asks_for_the_verdict_alone(rule: dict[str, Any]) -> None:
    """A metric may be NaN, for which no comparison is true (case 39)."""
    assert set(re.findall(r"verl_\w+", rule["expr"])) == {"verl_health_state"}
    assert rule["expr"].startswith("max by (run, detector) (")
    assert set(rule["annotations"]) == {"summary", "description", "action", "runbook_url", "page_url"}


def test_nothing_is_newer_or_older_than_one_of_the_versions() -> None:
    for word in ("holt_winters", "mad_over_time", "query_offset", "info(", "limit_ratio", "sort_by_label", "limit:"):
        assert word not in RULES.read_text()
    for rule in ALL:
        # In 3.x a dot also matches a line feed, and a range no longer holds the sample at its left end.
        assert not re.search(r'[=!]~"[^"]*[.*+]', rule["expr"])
        assert all(int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit] >= 120
                   for number, unit in re.findall(r"\[(\d+)([smhd])\]", rule["expr"]))


def test_every_metric_that_is_asked_for_is_one_of_ours() -> None:
    design = (REPOSITORY / "DESIGN.md").read_text()
    for rule in ALL:
        for name in re.findall(r"\bverl_[a-z0-9_]+", rule["expr"] + rule["annotations"]["description"]):
            assert f"`{name}`" in design or name.removeprefix("verl_") in KNOWN, name


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_a_number_has_the_unit_of_its_signal(spec: Any) -> None:
    template = sentence(spec)
    for name, unit in units_of(spec).items():
        if f'"^({name}' in template or f"|{name}" in template:
            assert unit.word in template


def test_an_example_stands_for_each_unit() -> None:
    assert set(EXAMPLES) == set(Unit)


def test_texts_of_specs_are_no_templates() -> None:
    assert plain("a {{ b }}") == 'a {{ "{{" }} b }}'
    assert capital("stop it") == "Stop it"
    assert capital("critic/grad_norm says") == "critic/grad_norm says"
