"""The generated dashboard: up to date, whole, and made of names that exist."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.build import DASHBOARDS, UID, main, render
from monitor.catalog import METRICS
from monitor.detectors import DETECTORS
from monitor.machine_metrics import MACHINE
from tests.helpers import REPOSITORY

ALL: list[dict[str, Any]] = [json.loads(path.read_text()) for path in DASHBOARDS]
DASHBOARD = ALL[0]
PANELS: list[dict[str, Any]] = [p for d in ALL for p in d["panels"] if p["type"] != "row"]
every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda p: p["title"])
every_dashboard = pytest.mark.parametrize("board", ALL, ids=lambda d: d["uid"])


def test_the_committed_file_is_what_the_code_builds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in DASHBOARDS:
        assert path.read_text() == render(output=path), "run `make generate`"
    assert main(["--check"]) == 0
    assert main(["--check", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("not up to date") == len(DASHBOARDS)
    assert not list(tmp_path.iterdir())
    assert main(["--output", str(tmp_path)]) == 0
    assert all((tmp_path / path.name).read_text() == path.read_text() for path in DASHBOARDS)


def test_identity_and_variables() -> None:
    assert DASHBOARD["uid"] == UID
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "run"], "the run is asked of the chosen data source"
    assert variables["datasource"]["type"] == "datasource"
    assert variables["run"]["refresh"] == 2, "runs that ended inside the range are found when the range changes"


def test_the_machines_are_chosen_by_node() -> None:
    board = ALL[1]
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert list(variables) == ["datasource", "node"]
    assert variables["node"]["query"] == "label_values(verl_node_probe_up, node)"
    assert len({d["uid"] for d in ALL}) == len(ALL)
    linked = {link["url"] for d in ALL for link in d["links"]}
    assert {f"/d/{d['uid']}" for d in ALL} <= linked


@every_dashboard
def test_panels_tile_the_grid(board: dict[str, Any]) -> None:
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, panel["title"]
    for one, other in combinations(board["panels"], 2):
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
