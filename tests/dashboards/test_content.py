"""What the panels say: made of the specs and the catalogue, in their units, their queries safe against NaN."""

from __future__ import annotations

import doctest
import json
import re
from typing import Any

import pytest

from dashboards import build, queries
from dashboards.overview import _STATE_COLORS
from monitor.catalog import METRICS
from monitor.detectors import DETECTORS
from monitor.model import DetectorSpec, RunState
from monitor.units import Unit

Json = dict[str, Any]
DASHBOARD: Json = json.loads(build.OUTPUT.read_text(encoding="utf-8"))
PANELS: list[Json] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SPECS = [detector.spec for detector in DETECTORS]

every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']}-{panel['title']}")
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)


def expressions() -> list[str]:
    """Every query of the dashboard: panels, variables, annotations."""
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    found += [note["target"]["expr"] for note in DASHBOARD["annotations"]["list"]]
    return found + [v["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]


def row_of(title: str) -> list[Json]:
    """Panels between a row's heading and the next one."""
    heading, found = "", []
    for panel in DASHBOARD["panels"]:
        heading = panel["title"] if panel["type"] == "row" else heading
        if heading == title and panel["type"] != "row":
            found.append(panel)
    return found


def test_the_grid_has_no_holes_and_its_rows_are_open() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    height = max(place["y"] + place["h"] for place in places)
    # Grafana closes a hole by moving the panels below it up, some of them away from their row.
    assert sum(place["w"] * place["h"] for place in places) == 24 * height
    for row in (panel for panel in DASHBOARD["panels"] if panel["type"] == "row"):
        assert (row["collapsed"], row["panels"]) == (False, [])


@every_panel
def test_a_unit_is_one_of_the_catalogue_and_a_target_is_explicit(panel: Json) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    # "none" is for words and for numbers of steps, which stand in stats and tables.
    assert unit in {u.grafana for u in Unit} | ({"none"} if panel["type"] != "timeseries" else set())
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert target["instant"] is not target["range"]
        assert (target["format"] == "table") is (panel["type"] == "table")


def test_units_and_scales_come_from_the_catalogue() -> None:
    seen = set()
    for panel in (panel for panel in PANELS if panel["type"] == "timeseries"):
        for metric in METRICS:
            if not any(re.match(rf"verl_{metric.name}\{{", target["expr"]) for target in panel["targets"]):
                continue
            seen.add(metric.name)
            defaults = panel["fieldConfig"]["defaults"]
            assert defaults["unit"] == metric.unit.grafana, panel["title"]
            scale = defaults["custom"]["scaleDistribution"]["type"]
            assert scale == ("symlog" if metric.log else "linear"), panel["title"]
    assert {"policy_loss", "kl_divergence", "stage_duration_seconds"} <= seen


def test_every_aggregation_leaves_out_what_is_not_finite() -> None:
    operator = re.compile(r"\b(sum|avg|min|max|count|stddev|quantile|topk|bottomk)( by \([a-z, ]*\))? ?\(")
    for expr in expressions():
        for match in operator.finditer(expr):
            depth, end = 1, match.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(expr[end], 0)
                end += 1
            assert expr[match.end():end].endswith("> -Inf < Inf)"), expr


def test_no_name_is_declared_that_nothing_asks_for() -> None:
    asked = {name for expr in expressions() for name in re.findall(r"verl_[a-z0-9_]+", expr)}
    assert {name.value for name in queries.Name} <= asked


def test_the_run_that_made_a_step_last_is_the_default() -> None:
    run = DASHBOARD["templating"]["list"][1]
    assert (run["name"], run["multi"], run["includeAll"]) == ("run", False, False)
    assert "current" not in run, "Grafana takes the first one"
    assert run["sort"] == 0, "the first one is the query's, not the alphabet's"
    assert re.search(run["regex"].strip("/"), '{run="a/b"} 1 2').group(1) == "a/b"  # type: ignore[union-attr]


@every_spec
def test_a_detector_has_a_row_made_of_its_spec(spec: DetectorSpec) -> None:
    panels = row_of(spec.title)
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert {queries.series_selector(series) for series in spec.panel} <= set(asked)
    assert queries.select(queries.Name.SCORE, detector=spec.id) in asked
    for panel in panels:
        assert spec.meaning in panel["description"]
        assert spec.misses in panel["description"]
        assert [link["url"] for link in panel["links"]] == [f"{build.MONITOR_URL}/runbooks/{spec.alert}"]
    score = panels[-1]["fieldConfig"]["defaults"]
    assert [step["value"] for step in score["thresholds"]["steps"]] == [None, 1.0]
    assert score["custom"]["thresholdsStyle"]["mode"] == "dashed"


def test_every_state_of_a_run_has_a_colour() -> None:
    assert set(_STATE_COLORS) == set(RunState)


def test_the_monitor_can_be_elsewhere() -> None:
    text = build.render("https://monitor.example")
    assert build.MONITOR_URL not in text
    assert f"https://monitor.example/runbooks/{SPECS[0].alert}" in text


def test_a_series_becomes_its_selector() -> None:
    assert doctest.testmod(queries).failed == 0
    with pytest.raises(KeyError):
        queries.series_selector("no_such_metric")
