"""``no_learning_signal``: dead from the start, dead later, and what looks like it but is success or chance."""

from __future__ import annotations

from random import Random

import pytest

from monitor.detectors.no_learning_signal import NoLearningSignal
from monitor.engine import Engine
from monitor.model import Incident, Severity
from tests.helpers import LAB, feed, rows, shared

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING
Steps = list[tuple[int, dict[str, float]]]


def found(data: object) -> list[Incident]:
    engine = Engine(make_detectors=lambda *_: [NoLearningSignal()])
    feed(engine, data)  # type: ignore[arg-type]  # steps and rows
    return list(engine.snapshot().runs[0].incidents)


def row(low: float, high: float, mean: float, advantage: float, **more: float) -> dict[str, float]:
    return {"critic/score/min": low, "critic/score/max": high, "critic/score/mean": mean,
            "critic/advantages/max": advantage, "critic/advantages/min": -advantage} | more


def alive(steps: int, seed: int = 0) -> Steps:
    rng = Random(seed)
    return [(s, row(0.0, 1.0, 0.3 + 0.05 * rng.random(), 1.7)) for s in range(1, steps + 1)]


def then(before: Steps, after: dict[str, float], steps: int = 20) -> Steps:
    return before + [(before[-1][0] + i if before else i, after) for i in range(1, steps + 1)]


@pytest.mark.parametrize(("case", "words"), [
    ("07_all_zero", "reward is 0 for every answer"), ("07_zero_group_std", "all answers to a prompt tie")])
def test_dead_from_the_first_step_is_told_by_the_fifth(case: str, words: str) -> None:
    (incident,) = found(rows(shared("cases", "fixtures", f"{case}.jsonl")))
    assert (incident.first_step, incident.raised_step, incident.critical_step) == (1, 5, 8)
    assert words in incident.reason


@pytest.mark.parametrize("name", ["grpo-dead-clipped", "grpo-dead-constant-reward"])
def test_recorded_dead_runs(name: str) -> None:
    (incident,) = found(rows(shared("corpus", "runs", f"{name}.jsonl")))
    assert incident.severity is CRITICAL
    assert incident.critical_step is not None
    assert incident.critical_step <= 8


@pytest.mark.parametrize("name", [
    "grpo-moe-saturated-healthy", "grpo-ceiling-zero-grad-healthy", "grpo-dead-clipped-short", "dapo-drift-healthy"])
def test_recorded_runs_with_a_signal_are_silent(name: str) -> None:
    assert found(rows(shared("corpus", "runs", f"{name}.jsonl"))) == []


@pytest.mark.parametrize("name", ["grpo-healthy", "ppo-healthy", "ppo-kl-runaway", "rloo-advantage-explosion"])
def test_bundled_runs_are_silent(name: str) -> None:
    assert found(rows(LAB / f"{name}.jsonl")) == []


def test_the_ceiling_of_a_run_with_a_critic_is_success() -> None:
    assert found(rows(shared("corpus", "lab", "ppo-ceiling.jsonl"))) == []


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_reward_service_that_dies_is_critical_in_five_steps(scale: float) -> None:
    dead = row(-scale, -scale, -scale, 0.0)
    (incident,) = found(then([(s, {k: v * scale for k, v in r.items()}) for s, r in alive(40)], dead))
    assert (incident.first_step, incident.critical_step) == (41, 45)
    assert "constant at -" in incident.reason


def test_scores_equal_but_for_their_rounding_tie() -> None:
    tie = row(0.1, 0.1 * (1 + 5e-8), 0.1, 7e-3)  # what verl's normalisation makes of the rounding
    assert found([(s, tie) for s in range(1, 7)])[0].severity is WARNING


def test_a_critic_does_not_hide_a_constant_reward() -> None:
    dead = row(0.0, 0.0, 0.0, 2.5) | {"critic/values/mean": 0.1}
    assert found([(s, dead) for s in range(1, 12)])[0].severity is CRITICAL


def test_all_solved_from_the_start_is_a_warning_at_most() -> None:
    (incident,) = found([(s, row(1.0, 1.0, 1.0, 0.0)) for s in range(1, 60)])
    assert incident.severity is WARNING


def test_learned_to_the_ceiling_is_success_and_a_fall_to_the_floor_is_not() -> None:
    climb = [(s, row(0.0, 1.0, s / 40, 1.7)) for s in range(1, 40)]
    assert found(then(climb, row(1.0, 1.0, 1.0, 0.0), 100)) == []
    assert found(then(climb, row(0.0, 1.0, 0.95, 0.0), 100)) == []  # all groups tie, nearly all solved
    assert found(then(climb, row(0.0, 0.0, 0.0, 0.0)))[0].severity is CRITICAL


@pytest.mark.parametrize("seed", range(5))
def test_small_batches_that_tie_by_chance_are_silent(seed: int) -> None:
    rng = Random(seed)
    steps = []
    for s in range(1, 1500):
        tie = s % 2 == 0 if s < 9 else rng.random() < 0.5
        steps.append((s, row(0.0, 0.0, 0.0, 0.0) if tie else row(0.0, 1.0, 0.1, 1.7)))
    assert found(steps) == []


def test_a_signal_that_is_not_the_score_counts() -> None:
    distilled = row(0.0, 0.0, 0.0, 1.4)
    assert found([(s, distilled) for s in range(1, 30)]) == []


def test_group_statistics_alone_are_enough() -> None:
    assert found([(s, {"frac_reward_zero_std": 1.0, "actor/pg_loss": 0.0}) for s in range(1, 12)])
    assert found([(s, {"reward_std": 0.0, "actor/pg_loss": 0.0}) for s in range(1, 12)])
    assert not found([(s, {"frac_reward_zero_std": 0.9, "actor/pg_loss": 0.0}) for s in range(1, 12)])


def test_rows_without_scores_neither_confirm_nor_clear() -> None:
    dead: dict[str, float] = row(0.0, 0.0, 0.0, 0.0)
    data = [(s, dead if s % 2 else {"timing_s/step": 1.0}) for s in range(1, 20)]
    (incident,) = found(data)
    assert incident.raised_step == 9
