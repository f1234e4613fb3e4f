"""What the engine finds in recorded runs: real ones beside the project, bundled ones, and the cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monitor.engine import Engine
from monitor.model import Incident, Severity
from tests.helpers import CASES, LAB, feed, rows, shared

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING


def incidents(path: Path) -> list[Incident]:
    """Everything the engine raises on a recorded run."""
    engine = Engine()
    feed(engine, rows(path))
    return list(engine.snapshot().runs[0].incidents)


def raised(path: Path) -> dict[str, tuple[Severity, int]]:
    """Detector -> worst severity, and the step at which it was first raised."""
    out: dict[str, tuple[Severity, int]] = {}
    for incident in incidents(path):
        severity, step = out.get(incident.detector, (WARNING, incident.raised_step))
        worst = CRITICAL if CRITICAL in (severity, incident.severity) else WARNING
        out[incident.detector] = (worst, min(step, incident.raised_step))
    return out


@pytest.mark.parametrize("name", ["ppo-healthy", "grpo-healthy", "gpu-ppo-hang"])
def test_healthy_recordings_are_silent(name: str) -> None:
    assert raised(LAB / f"{name}.jsonl") == {}


@pytest.mark.parametrize(
    ("name", "detector", "severity", "by"),
    [
        ("ppo-kl-runaway", "kl_runaway", CRITICAL, 40),
        ("ppo-critic-swing", "critic_loss_oscillation", CRITICAL, 56),
        ("rloo-advantage-explosion", "advantage_explosion", CRITICAL, 100),
        ("ppo-skipped-updates", "non_finite", CRITICAL, 2),
    ],
)
def test_failing_recordings_are_told_in_time(name: str, detector: str, severity: Severity, by: int) -> None:
    found = raised(LAB / f"{name}.jsonl")
    assert found[detector][0] is severity
    assert found[detector][1] <= by


def test_an_advantage_explosion_is_critical_within_ten_steps() -> None:
    engine = Engine()
    feed(engine, [row for row in rows(LAB / "rloo-advantage-explosion.jsonl") if row[0] <= 50])
    [incident] = engine.snapshot().runs[0].incidents
    assert (incident.detector, incident.severity) == ("advantage_explosion", CRITICAL)
    assert incident.first_step >= 41


@pytest.mark.parametrize("name", ["01_nan_onset_as_null", "01_nan_onset_bare_tokens"])
def test_case_1_nan_is_one_critical_finding_at_its_very_step(name: str) -> None:
    [incident] = incidents(CASES / f"{name}.jsonl")
    assert (incident.detector, incident.severity, incident.first_step, incident.raised_step) == (
        "non_finite", CRITICAL, 21, 21)
    assert set(incident.evidence) == {"actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "actor/ppo_kl",
                                      "actor/entropy"}


@pytest.mark.parametrize("name", ["02_critic_nan_step1", "02_critic_nan_as_null"])
def test_case_2_nan_at_the_first_step_is_the_critics(name: str) -> None:
    [incident] = incidents(CASES / f"{name}.jsonl")
    assert (incident.detector, incident.severity, incident.raised_step) == ("non_finite", CRITICAL, 1)
    assert "critic has diverged" in incident.reason


def test_case_4_kl_runs_away_before_the_absolute_limit() -> None:
    path = CASES / "04_kl_runaway_flat_reward.jsonl"
    [incident] = incidents(path)
    kl = {step: data["actor/kl_loss"] for step, data in rows(path)}
    assert kl[incident.raised_step] < 2.0  # type: ignore[operator]
    assert incident.critical_step is not None
    assert kl[incident.critical_step] < 5.0  # type: ignore[operator]


def test_case_9_value_loss_oscillates() -> None:
    assert raised(CASES / "09_vf_oscillation.jsonl")["critic_loss_oscillation"][0] is CRITICAL


@pytest.mark.parametrize("name", [
    "00_healthy_grpo", "00_healthy_ppo", "05_benign_loss_follows_kl", "12_not_a_hack", "16_slow_but_alive",
    "21_resume_ok_replay", "27_truncate_part1", "27_truncate_part2",
])
def test_cases_that_must_stay_quiet(name: str) -> None:
    assert raised(CASES / f"{name}.jsonl") == {}


def test_case_60_the_first_rows_raise_no_relative_finding_and_nan_in_row_1_fires() -> None:
    first = [(s, d | {"actor/kl_loss": 50 * d["actor/kl_loss"], "actor/grad_norm": 30.0})  # type: ignore[operator]
             for s, d in rows(CASES / "00_healthy_ppo.jsonl")[:3]]
    engine = Engine()
    feed(engine, first)
    assert engine.snapshot().runs[0].incidents == ()
    feed(engine, [(1, first[0][1] | {"actor/pg_loss": None})], run="other")
    other = engine.snapshot().find("other")
    assert other is not None
    assert other.severity is CRITICAL


# --- the labelled corpus, measured where it lies

def _labels() -> dict[str, Any]:
    return dict(json.loads(shared("corpus", "labels.json").read_text())["runs"])


def _corpus(name: str) -> Path:
    runs = shared("corpus", "runs", f"{name}.jsonl") if (shared("corpus") / "runs" / f"{name}.jsonl").exists() else None
    return runs or shared("corpus", "lab", f"{name}.jsonl")


def test_corpus_healthy_runs_raise_nothing_at_all() -> None:
    healthy = [name for name, label in _labels().items() if label["verdict"] == "healthy"]
    assert len(healthy) >= 13
    assert {name: found for name in healthy if (found := raised(_corpus(name)))} == {}


def test_corpus_faults_are_reported_within_their_bounds() -> None:
    ours = {"non_finite", "kl_runaway", "critic_loss_oscillation", "advantage_explosion", "rollout_stall"}
    judged, late = 0, []
    for name, label in _labels().items():
        found = raised(_corpus(name))
        for fault in label["faults"]:
            if set(fault["detectors"]) & ours and not set(fault["detectors"]) & {"gradient_explosion"}:
                judged += 1
                steps = [found[d][1] for d in fault["detectors"] if d in found]
                if not steps or not fault["onset"] <= min(steps) <= fault["by"]:
                    late.append((name, fault, found))
    assert judged >= 5
    assert late == []


def test_corpus_quiet_detectors_are_not_critical() -> None:
    wrong = {(name, detector) for name, label in _labels().items() for detector, (severity, _) in
             raised(_corpus(name)).items() if severity is CRITICAL
             and (detector in label.get("quiet", []) or label["verdict"] == "ambiguous")}
    assert wrong == set()
