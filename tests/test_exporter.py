"""Exposition: names and labels of DESIGN.md, held by a golden file and by promtool."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from monitor.engine import Engine, EngineSettings
from monitor.exporter import MonitorView, Renderer, SourceView
from monitor.model import RawStep, RunEnded, RunState
from tests.helpers import CASES, LAB, REPOSITORY, feed, rows

GOLDEN = Path(__file__).parent / "data" / "metrics.golden.txt"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def _monitor() -> MonitorView:
    return MonitorView(heartbeat_seconds=1000.5, sources=[SourceView(
        name="file:logs", up=True, last_read_seconds=1000.0, records=45, files=2, files_cut=0, lag_bytes=0,
        rejected={"bad_json": 1})])


def _engine() -> Engine:
    engine = Engine()
    for name, path in (("ppo", LAB / "ppo-kl-runaway.jsonl"), ("nan", CASES / "01_nan_onset_as_null.jsonl")):
        for number, (step, data) in enumerate(rows(path)[:30]):
            data = {k: v for k, v in data.items() if not k.startswith(("val-", "timing_per", "global_seq"))}
            engine.handle(RawStep(name, step, 100.0 + number, data | {"my/own metric": 1.5}, "demo"), "file:logs")
    engine.handle(RunEnded("nan", 200.0, RunState.FINISHED, "its writer closed the log"))
    return engine


def _page(engine: Engine, accept: str = "") -> str:
    return Renderer().page(engine.snapshot(), _monitor(), accept)[0].decode()


def _stable(text: str) -> str:
    text = re.sub(r'python="[^"]+"', 'python="3"', text)
    return re.sub(r"(verl_monitor_detector_seconds_total\{[^}]*\}) .*", r"\1 0", text)


def test_golden_exposition() -> None:
    """Run with UPDATE_GOLDEN=1 to write the file anew; then read its diff."""
    text = _stable(_page(_engine()))
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is missing (Debian package prometheus)")
def test_promtool_finds_nothing_to_say() -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=GOLDEN.read_text(), text=True, capture_output=True,
                          check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_both_formats_parse_and_hold_the_same(accept: str) -> None:
    text = _page(_engine(), accept)
    families = list(parse_openmetrics(text) if accept else parse_text(text))  # type: ignore[no-untyped-call]
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}
    assert samples[("verl_rollout_steps_total", (("run", "ppo"),))] == 29  # the first row is validation alone
    assert math.isnan(samples[("verl_policy_loss", (("run", "nan"),))])
    assert samples[("verl_health_state", (("detector", "non_finite"), ("run", "nan")))] == 2
    assert samples[("verl_health_state", (("detector", "kl_runaway"), ("run", "ppo")))] == 2
    assert samples[("verl_unrecognized", (("key", "my/own metric"), ("run", "ppo")))] == 1.5
    assert samples[("verl_run_state", (("run", "nan"), ("state", "finished")))] == 1
    states = [v for (name, labels), v in samples.items() if name == "verl_run_state" and ("run", "nan") in labels]
    assert sum(states) == 1
    assert not [name for name, _ in samples if name.endswith("_created")]


def test_the_guides_names_stand_there_even_without_a_gpu() -> None:
    text = _page(_engine())
    for name in ("verl_rollout_steps_total", "verl_policy_loss", "verl_kl_divergence", "verl_gpu_memory_used_bytes"):
        assert f"# TYPE {name} " in text
    assert "No samples: no GPU" in text


def test_every_name_is_in_the_design_or_in_the_catalogue() -> None:
    from monitor.catalog import METRICS

    design = (REPOSITORY / "DESIGN.md").read_text()
    known = {f"verl_{m.name}" for m in METRICS}
    for family in parse_text(_page(_engine())):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name in known or f"`{name}`" in design, name


def test_the_page_is_rendered_once_per_change() -> None:
    engine, renderer = _engine(), Renderer()
    first = renderer.page(engine.snapshot(), _monitor(), "")[0]
    [kept] = renderer._kept.values()
    assert renderer.page(engine.snapshot(), _monitor(), "")[0] == first
    assert next(iter(renderer._kept.values())) is kept
    feed(engine, [(99, {"actor/pg_loss": 0.125})], run="ppo", start=500.0)
    assert b'verl_policy_loss{run="ppo"} 0.125' in renderer.page(engine.snapshot(), _monitor(), "")[0]


def test_hostile_names_are_escaped() -> None:
    engine = Engine()
    feed(engine, [(1, {"actor/pg_loss": 1.0, 'a"\n\\b': 2.0})], run='x"}\n# HELP evil \\')
    names = {s.labels["run"] for f in parse_text(_page(engine)) for s in f.samples if "run" in s.labels}
    assert names == {'x"}\n# HELP evil \\'}


def test_case_36_two_thousand_runs_stay_within_a_fixed_size() -> None:
    import orjson

    engine = Engine(EngineSettings(max_runs=50))
    for line in (CASES / "36_label_churn.jsonl").read_bytes().splitlines():
        row = orjson.loads(line)
        engine.handle(RawStep(row["run"], row["step"], 0.0, row["data"]), "file:logs")
    text = _page(engine)
    assert len(text) < 50 * 12_000
    assert "verl_monitor_runs_dropped_total 1950.0" in text


def test_case_34_a_multiprocess_directory_of_others_changes_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _stable(_page(_engine()))
    for pid in range(50):
        (tmp_path / f"gauge_all_{pid}.db").write_bytes(b"\0" * 64)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert _stable(_page(_engine())) == before
