"""A runbook for each alert, with everything that a person needs at night."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from alerts.monitor_alerts import MONITOR_ALERTS
from alerts.runbooks import promql
from monitor.detectors import ALL_DETECTORS as DETECTORS
from monitor.detectors import Detector
from tests.alerts import RUNBOOKS, rules

NAMES = sorted({rule["alert"] for rule in rules()})


def _sections(page: Path) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    assert sorted(page.stem for page in RUNBOOKS.glob("Verl*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_usual_headings(name: str) -> None:
    sections = _sections(RUNBOOKS / f"{name}.md")
    for heading in ("Meaning", "Impact", "Diagnosis", "Mitigation"):
        assert len(sections[heading]) > 40, heading
    assert list(sections)[:4] == ["Meaning", "Impact", "Diagnosis", "Mitigation"]


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.spec.id)
def test_a_detectors_page_says_all_that_its_spec_says(detector: type[Detector]) -> None:
    spec, page = detector.spec, RUNBOOKS / f"{detector.spec.alert}.md"
    text, sections = page.read_text(), _sections(page)
    for said in (spec.meaning, spec.impact, spec.misses, spec.source, spec.wake, *map(promql, spec.panel)):
        assert said in text
    for item in (*spec.diagnosis, *spec.actions):
        assert item[1:] in text
    for field in fields(detector.settings_type):
        assert f"| `{field.name}` | {field.default:g} | {field.metadata['unit']} |" in sections["Thresholds"]
    assert re.search(r"\b(actor_rollout_ref|algorithm|critic|trainer|reward|data)\.[a-z_.]+", sections["Mitigation"])


@pytest.mark.parametrize("alert", MONITOR_ALERTS, ids=lambda alert: alert.name)
def test_a_page_about_the_monitor_has_commands(alert: object) -> None:
    diagnosis = _sections(RUNBOOKS / f"{getattr(alert, 'name')}.md")["Diagnosis"]  # noqa: B009
    assert "```sh" in diagnosis
    assert re.search(r"\b(curl|verl-monitor check|amtool|promtool|py-spy)\b", diagnosis)


def test_commands_of_the_pages_exist() -> None:
    from monitor.cli import _parser
    from monitor.engine import Engine
    from monitor.service import Service, create_app

    text = "".join(page.read_text() for page in RUNBOOKS.glob("VerlMonitor*.md"))
    paths = {getattr(route, "path", "") for route in
             create_app(Service(engine=Engine(), sources=[], clock=lambda: 0.0)).routes}
    assert set(re.findall(r"127\.0\.0\.1:9560(/[\w/-]*)", text)) <= paths
    help_text = _parser().format_help()
    assert all(command in help_text for command in re.findall(r"verl-monitor (check|serve)\b", text))


def test_links_lead_to_pages() -> None:
    for page in RUNBOOKS.glob("*.md"):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (RUNBOOKS / target).is_file(), f"{page.name}: {target}"
    index = (RUNBOOKS / "README.md").read_text()
    assert all(f"({name}.md)" in index for name in NAMES)
