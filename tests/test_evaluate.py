"""Measuring the detectors: what counts as detected, missed, late and false."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from monitor import evaluate
from monitor.cli import main
from monitor.evaluate import Fault, Label, judge
from monitor.model import Incident, Severity
from tests.helpers import LAB, REPOSITORY, shared

HEALTHY, FAILING = "ppo-healthy", "ppo-skipped-updates"


def corpus(folder: Path, **runs: dict[str, Any]) -> Path:
    """A corpus of lab runs, each under its own name."""
    (folder / "deep").mkdir()
    for name in runs:
        source = LAB / f"{name.split('__')[0].replace('_', '-')}.jsonl"
        shutil.copy(source, folder / "deep" / f"{name}.jsonl")
    (folder / "labels.json").write_text(json.dumps({"runs": runs}))
    return folder


def figures(folder: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert main(["evaluate", str(folder), "--format", "json", "--jobs", "1", *options]) == code
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def fault(onset: int, by: int, *detectors: str) -> dict[str, Any]:
    return {"detectors": list(detectors or ["non_finite"]), "onset": onset, "by": by}


def test_detected_missed_and_delay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = figures(corpus(
        tmp_path, ppo_skipped_updates={"verdict": "failing", "faults": [
            fault(2, 2), fault(1, 1), fault(1, 4), fault(40, 50), fault(2, 9, "kl_runaway", "non_finite"),
            fault(2, 60, "kl_runaway")]}), capsys)
    assert [(f["detected_by"], f["delay"]) for f in out["faults"]] == [
        ("non_finite", 0), (None, None), ("non_finite", 1), ("non_finite", 0), ("non_finite", 0), (None, None)]
    assert (out["total"]["detected"], out["total"]["missed"]) == (4, 2)
    assert out["detectors"]["non_finite"]["detected"] == 4
    assert out["detectors"]["kl_runaway"] | {"missed": 1, "detected": 0} == out["detectors"]["kl_runaway"]
    assert out["false_alarms"] == []


def test_a_finding_on_a_healthy_run_is_false(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = figures(corpus(tmp_path, ppo_healthy={"verdict": "healthy"}, ppo_skipped_updates={"verdict": "healthy"}),
                  capsys)
    (alarm,) = out["false_alarms"]
    assert (alarm["run"], alarm["detector"], alarm["severity"], alarm["step"]) == (
        "ppo_skipped_updates", "non_finite", "critical", 2)
    assert (out["healthy_runs"], out["healthy_steps"]) == (2, 120 + 60)
    assert out["total"]["false_critical_per_healthy_run"] == 0.5
    assert out["total"]["false_critical_per_1000_healthy_steps"] == pytest.approx(1000 / 180)
    assert out["total"]["false_warnings"] == 0


def incident(detector: str, severity: Severity, raised: int, last: int) -> Incident:
    return Incident(detector, severity, raised, last, raised, 0.0, "", {}, 1.0)


@pytest.mark.parametrize(("verdict", "found", "expected"), [
    ("healthy", incident("kl_runaway", Severity.WARNING, 5, 9), True),
    ("ambiguous", incident("kl_runaway", Severity.CRITICAL, 5, 9), False),
    ("ambiguous", incident("non_finite", Severity.CRITICAL, 5, 9), True),
    ("ambiguous", incident("non_finite", Severity.WARNING, 5, 9), False),
    ("failing", incident("non_finite", Severity.CRITICAL, 90, 99), True),
    ("failing", incident("kl_runaway", Severity.WARNING, 5, 9), True),
    ("failing", incident("kl_runaway", Severity.WARNING, 5, 60), False),
    ("failing", incident("kl_runaway", Severity.CRITICAL, 50, 60), False),
    ("failing", incident("rollout_stall", Severity.WARNING, 5, 9), False),
])
def test_what_is_a_false_alarm(verdict: str, found: Incident, expected: bool) -> None:
    label = Label("run", "", verdict, (Fault(("rollout_stall",), 40, 50),), ("non_finite",))
    assert evaluate._is_false(label, found) is expected


def test_a_budget_decides_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = corpus(tmp_path, ppo_skipped_updates={"verdict": "failing", "faults": [fault(1, 4), fault(1, 1)]})
    budget = tmp_path / "budget.json"
    budget.write_text('{"missed": 1, "median_delay_steps": 1}')
    assert figures(folder, capsys, "--budget", str(budget))["over_budget"] == []
    budget.write_text('{"missed": 0, "median_delay_steps": 0.5, "false_warnings": 0}')
    assert figures(folder, capsys, "--budget", str(budget), code=1)["over_budget"] == [
        "missed is 1, and at most 0 is allowed", "median_delay_steps is 1, and at most 0.5 is allowed"]
    for text, words in (('{"mised": 0}', "'mised'"), ('{"missed": "x"}', "a number"), ("{", "Expecting"), ("3", "")):
        budget.write_text(text)
        assert main(["evaluate", str(folder), "--budget", str(budget)]) == 3
        assert words in capsys.readouterr().err


def test_bad_labels_cost_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = corpus(tmp_path, ppo_healthy={"verdict": "healthy"}, ppo_healthy__2={"verdict": "sick"},
                    ppo_healthy__3={"verdict": "failing", "faults": [{"onset": 1}]})
    labels = json.loads((folder / "labels.json").read_text())
    labels["runs"]["nowhere"] = {"verdict": "healthy"}
    (folder / "labels.json").write_text(json.dumps(labels))
    assert main(["evaluate", str(folder), "--jobs", "2"]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("1 runs, 1 of them healthy with 120 steps")
    assert err.count("verl-monitor: ") == 3
    assert "expected nowhere.jsonl below the corpus" in err
    assert "expected a verdict of healthy, failing, ambiguous, got 'sick'" in err
    assert main(["evaluate", str(tmp_path / "none")]) == 3


def test_processes_give_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = corpus(tmp_path, ppo_healthy={"verdict": "healthy"}, ppo_skipped_updates={
        "verdict": "failing", "faults": [fault(2, 2)]})
    assert figures(folder, capsys) == figures(folder, capsys, "--jobs", "2")


def test_a_cluster_gives_the_same_outcomes(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed here")
    labels, _ = evaluate.read_labels(corpus(tmp_path, ppo_healthy={"verdict": "healthy"}))
    assert evaluate.on_ray("local", judge, labels) == [judge(label) for label in labels]


def test_text_names_what_was_missed_and_what_was_false(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = corpus(tmp_path, ppo_skipped_updates={"verdict": "healthy"}, ppo_skipped_updates__2={
        "verdict": "failing", "faults": [fault(1, 1)]})
    assert main(["evaluate", str(folder), "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "MISSED ppo_skipped_updates__2: non_finite, onset 1, by 1" in out
    assert "FALSE critical ppo_skipped_updates: non_finite at step 2: actor/grad_norm is not" in out


@pytest.mark.parametrize("folder", ["lab", "corpus"])
def test_every_labelled_fault_is_told_in_time_and_nothing_else(folder: str) -> None:
    labels, errors = evaluate.read_labels(REPOSITORY / "tests" / "lab" if folder == "lab" else shared("corpus"))
    assert errors == []
    out = evaluate.evaluate(labels, evaluate.runner(2, None))
    assert out["errors"] == []
    assert [fault for fault in out["faults"] if fault["detected_by"] is None] == []
    assert out["false_alarms"] == []
