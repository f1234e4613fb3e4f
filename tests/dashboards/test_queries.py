"""Every query of the dashboard, asked of the real Prometheus that scraped the real service, returns data."""

from __future__ import annotations

import json
import math
import os
import re
import time
import urllib.parse
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from dashboards.build import DASHBOARDS, OUTPUT
from dashboards.queries import aggregate
from monitor.engine import Engine
from monitor.model import RawStep, RunState
from tests.helpers import CASES, LAB, rows, wait_for
from tests.probes.fakenvml import build, environment
from tests.probes.test_checkpoints import save
from tests.probes.test_ray_state import cluster, dashboard, listed
from tests.servers import get, get_json, monitor, prometheus

DASHBOARD: dict[str, Any] = json.loads(OUTPUT.read_text())

# One run each that makes a panel speak. A panel may ask for what a well run does not have (findings), and for what only
# an active run has (silence).
RUNS = {"failing": "ppo-critic-swing", "nan": "01_nan_onset_as_null", "ended": "ppo-kl-runaway"}


def _ray(path: str, query: dict[str, list[str]]) -> object:
    """A small cluster."""
    if path == "/api/v0/nodes":
        return listed({"node_id": "n", "state": "ALIVE", "resources_total": {"GPU": 8.0, "CPU": 64.0}})
    return cluster(path, query)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prometheus that has watched the runs for some seconds, one of them after its end."""
    folder = tmp_path_factory.mktemp("dashboard")
    logs = folder / "logs"
    logs.mkdir()
    (folder / "state").write_text(f"total 80000000000\nused 30000000000\nproc {os.getpid()} 29000000000\n")
    save(folder / "checkpoints" / "logs" / "failing", 2)
    library = build(folder / "library")  # GPU panels speak, too
    with dashboard(_ray) as ray, monitor(
            logs, log=folder / "monitor.log", options=["--retain-ended", "4", "--ray-address", ray],
            environment=environment(library, folder)) as url:
        config = f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
scrape_configs:
  - job_name: verl-monitor
    static_configs: [{{targets: ["{url.removeprefix('http://')}"]}}]
"""
        with prometheus(config, folder) as prometheus_url:
            files = {name: (logs / f"{name}.jsonl").open("wb", buffering=0) for name in RUNS}
            sources = {name: (path if (path := LAB / f"{run}.jsonl").exists() else CASES / f"{run}.jsonl")
                       for name, run in RUNS.items()}
            lines = {name: path.read_bytes().splitlines(keepends=True) for name, path in sources.items()}
            for part in range(10):
                for name, file in files.items():
                    size = len(lines[name]) // 10 + 1
                    file.write(b"".join(lines[name][part * size:(part + 1) * size]))
                time.sleep(1)
            files.pop("ended").close()
            (logs / "ended.jsonl").unlink()
            wait_for(lambda: len(get_json(f"{url}/api/v1/runs")["runs"]) == 2, 20, "the ended run to leave")
            time.sleep(2)
            yield prometheus_url
            for file in files.values():
                file.close()


def _substituted(expr: str, run: str) -> str:
    for name, value in (("$__range", "5m"), ("$__rate_interval", "10s"), ("$__interval", "1s"), ("$run", run),
                        ("$node", ".*")):
        expr = expr.replace(name, value)
    assert "$" not in expr.replace('"$1"', ""), expr
    return expr


def _ask(url: str, expr: str, *, instant: bool) -> list[dict[str, Any]]:
    now = time.time()
    query = {"query": expr, "time": str(now)} if instant else {
        "query": expr, "start": str(now - 60), "end": str(now), "step": "1"}
    status, body = get(f"{url}/api/v1/{'query' if instant else 'query_range'}?{urllib.parse.urlencode(query)}")
    assert status == 200, body
    return list(json.loads(body)["data"]["result"])


@lru_cache
def _numbers() -> set[tuple[str, str]]:
    """Which detectors have a level, and a limit, in any tenth of any of the runs."""
    out: set[tuple[str, str]] = set()
    for run in RUNS.values():
        path = LAB / f"{run}.jsonl"
        data = rows(path if path.exists() else CASES / f"{run}.jsonl")
        engine, size = Engine(), len(data) // 10 + 1
        for number, (step, values) in enumerate(data):
            engine.handle(RawStep("run", step, float(number), values))
            if (number + 1) % size == 0:
                for item in engine.snapshot().runs[0].detectors:
                    out |= {(name, item.spec.id) for name in ("value", "threshold")
                            if math.isfinite(getattr(item.verdict, name))}
    return out


BOARDS: list[dict[str, Any]] = [json.loads(path.read_text()) for path in DASHBOARDS]
TARGETS = [(p["title"], t) for board in BOARDS for p in board["panels"] for t in p.get("targets", [])]


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{t} {q['refId']}" for t, q in TARGETS])
def test_every_panel_query_returns_data(scraped: str, title: str, target: dict[str, Any]) -> None:
    found = {run: _ask(scraped, _substituted(target["expr"], run), instant=bool(target.get("instant")))
             for run in RUNS}
    number = re.fullmatch(r'verl_health_(value|threshold)\{run="\$run",detector="(\w+)"\}', target["expr"])
    if number and number.groups() not in _numbers():
        return  # this detector judges no level, or has no limit for it while these runs last
    assert any(found.values()), f"no run has data for {title}: {target['expr']}"
    if "health_score" in target["expr"]:
        assert all(found.values()), "a score is there for every run"


def test_the_run_variable_lists_ended_runs(scraped: str) -> None:
    [variable] = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "run"]
    text = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
    query = text.removeprefix("query_result(").removesuffix(")")
    runs = {entry["metric"]["run"] for entry in _ask(scraped, _substituted(query, ""), instant=True)}
    assert runs == set(RUNS), "the run that has left /metrics is still to be chosen"


def test_the_annotations_mark_findings(scraped: str) -> None:
    marked = {}
    for annotation in DASHBOARD["annotations"]["list"]:
        expr = annotation["target"]["expr"]
        marked[annotation["name"]] = {r["metric"]["detector"] for run in RUNS
                                      for r in _ask(scraped, _substituted(expr, run), instant=False)}
    assert marked["Findings: critical"] >= {"critic_loss_oscillation", "non_finite", "kl_runaway"}
    assert "advantage_explosion" in marked["Findings: warning"]


def test_an_ended_run_still_shows_how_it_ended(scraped: str) -> None:
    def now(title: str) -> list[str]:
        [panel] = [p for p in DASHBOARD["panels"] if p["title"] == title]
        return [entry["value"][1] for entry in _ask(scraped, _substituted(panel["targets"][0]["expr"], "ended"),
                                                    instant=True)]

    assert now("Run") == [str(list(RunState).index(RunState.GONE))]
    assert now("Worst health now") == ["2"]
    assert now("Time since the last step") == [], "nothing is expected of it, so it is not silent"


def test_a_run_that_is_nan_poisons_no_aggregate(scraped: str) -> None:
    losses = "last_over_time(verl_policy_loss[5m])"
    [plain] = _ask(scraped, f"sum({losses})", instant=True)
    assert plain["value"][1] == "NaN", "the fixture has a loss that is not a number"
    [filtered] = _ask(scraped, aggregate("sum", losses), instant=True)
    assert math.isfinite(float(filtered["value"][1]))
