"""The generated dashboard: up to date, whole, and made of names that exist."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.build import OUTPUT, UID, main, render
from monitor.catalog import METRICS
from monitor.detectors import DETECTORS
from monitor.machine_metrics import MACHINE
from tests.helpers import REPOSITORY

DASHBOARD: dict[str, Any] = json.loads(OUTPUT.read_text())
PANELS: list[dict[str, Any]] = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda p: p["title"])


def test_the_committed_file_is_what_the_code_builds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert OUTPUT.read_text() == render(), "run `make generate`"
    assert main(["--check"]) == 0
    other = tmp_path / "other.json"
    assert main(["--check", "--output", str(other)]) == 1
    assert "not up to date" in capsys.readouterr().err
    assert not other.exists()
    assert main(["--output", str(other)]) == 0
    assert other.read_text() == OUTPUT.read_text()


def test_identity_and_variables() -> None:
    assert DASHBOARD["uid"] == UID
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "run"], "the run is asked of the chosen data source"
    assert variables["datasource"]["type"] == "datasource"
    assert variables["run"]["refresh"] == 2, "runs that ended inside the range are found when the range changes"


def test_panels_tile_the_grid() -> None:
    ids = [p["id"] for p in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, panel["title"]
    for one, other in combinations(DASHBOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
                 or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"])
        assert apart, (one["title"], other["title"])


@every_panel
def test_a_panel_is_whole(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 40
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] != "state-timeline":  # which has no such setting
        assert panel["fieldConfig"]["defaults"]["noValue"]
    refs = [target["refId"] for target in panel["targets"]]
    assert refs
    assert len(set(refs)) == len(refs)
    if panel["type"] == "stat":
        assert panel["options"]["reduceOptions"]["calcs"] == ["lastNotNull"]


@every_panel
def test_a_panel_asks_for_what_is_exported(panel: dict[str, Any]) -> None:
    design = (REPOSITORY / "DESIGN.md").read_text()
    for target in panel["targets"]:
        names = re.findall(r"\bverl_[a-z0-9_]+", target["expr"])
        assert names
        for name in names:
            assert name.removeprefix("verl_") in {m.name for m in (*METRICS, *MACHINE)} or f"`{name}`" in design, name
        if re.search(r"\b(sum|max|avg|min)( by \(.*?\))? \(", target["expr"]):
            assert "> -Inf < Inf" in target["expr"], "one NaN would poison the aggregation (case 39)"


def test_every_detector_has_a_row_with_its_metric_its_limit_and_its_runbook() -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    title = ""
    for panel in DASHBOARD["panels"]:
        title = panel["title"] if panel["type"] == "row" else title
        rows.setdefault(title, []).append(panel)
    for kind in DETECTORS:
        texts = json.dumps(rows[kind.spec.title])
        assert f"/runbooks/{kind.spec.alert}" in texts
        assert f'verl_health_score{{run=\\"$run\\",detector=\\"{kind.spec.id}\\"}}' in json.dumps(
            [t["expr"] for p in rows[kind.spec.title] for t in p.get("targets", [])]).replace('\\\\"', '\\"')
        assert kind.spec.meaning in texts.encode().decode("unicode_escape") or kind.spec.meaning in texts


def test_provisioning_leads_to_the_dashboard() -> None:
    folder = REPOSITORY / "dashboards" / "provisioning"
    [provider] = yaml.safe_load((folder / "dashboards" / "verl-monitor.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert "uid" not in source
