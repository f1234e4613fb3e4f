"""``optimizer_idle``: an exactly zero gradient beside a signal, and nothing else."""

from __future__ import annotations

import pytest

from monitor.detectors.no_learning_signal import NoLearningSignal
from monitor.detectors.optimizer_idle import OptimizerIdle
from monitor.engine import Engine
from monitor.model import Incident, Severity
from tests.helpers import LAB, feed, rows, shared


def found(data: object) -> list[Incident]:
    engine = Engine(make_detectors=lambda *_: [NoLearningSignal(), OptimizerIdle()])
    feed(engine, data)  # type: ignore[arg-type]  # steps and rows
    return list(engine.snapshot().runs[0].incidents)


def row(gradient: float | None = 0.0, advantage: float = 1.8, **more: float) -> dict[str, float]:
    values = {"critic/score/min": 0.0, "critic/score/max": 1.0, "critic/score/mean": 0.6,
              "critic/advantages/max": advantage, "critic/advantages/min": -advantage, "actor/pg_loss": 0.0}
    if gradient is not None:
        values["actor/grad_norm"] = gradient
    return values | {key.replace("__", "/"): value for key, value in more.items()}


def test_the_dead_update_is_told_and_not_taken_for_a_dead_reward() -> None:
    (incident,) = found(rows(shared("cases", "fixtures", "08_dead_update.jsonl")))
    assert (incident.detector, incident.severity, incident.critical_step) == ("optimizer_idle", Severity.CRITICAL, 5)


@pytest.mark.parametrize("case", ["07_all_zero", "07_zero_group_std"])
def test_a_dead_reward_is_not_taken_for_a_dead_update(case: str) -> None:
    assert {i.detector for i in found(rows(shared("cases", "fixtures", f"{case}.jsonl")))} == {"no_learning_signal"}


@pytest.mark.parametrize("name", ["grpo-moe-saturated-healthy", "grpo-ceiling-zero-grad-healthy"])
def test_zero_gradients_of_tied_batches_are_silent(name: str) -> None:
    assert found(rows(shared("corpus", "runs", f"{name}.jsonl"))) == []


@pytest.mark.parametrize("name", ["grpo-healthy", "ppo-healthy", "ppo-skipped-updates", "gpu-ppo-hang"])
def test_bundled_runs_are_silent(name: str) -> None:
    assert found(rows(LAB / f"{name}.jsonl")) == []


def test_it_starts_later_and_ends() -> None:
    data = [(s, row(0.3 if s < 50 or s > 70 else 0.0)) for s in range(1, 90)]
    (incident,) = found(data)
    assert (incident.first_step, incident.raised_step) == (50, 54)
    assert incident.ended


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_advantages_on_the_scale_of_the_scores(scale: float) -> None:
    values = {"critic/score/min": 0.0, "critic/score/max": scale, "critic/advantages/max": 0.5 * scale}
    assert found([(s, row() | values) for s in range(1, 9)])


def test_ties_between_do_not_hide_it() -> None:
    data = [(s, row(advantage=0.0 if s % 3 == 0 else 1.8)) for s in range(1, 12)]
    (incident,) = found(data)
    assert incident.raised_step == 7


@pytest.mark.parametrize("values", [
    row(1e-12), row(None), row(0.0, 0.0), row(0.0, 1e-5), row(0.3),
    row(critic__score__min=1.0, critic__values__mean=0.9),  # a critic's whitened advantages at the ceiling
    {"actor/grad_norm": 0.0, "critic/score/mean": 0.5}], ids=repr)
def test_what_is_no_proof_is_silent(values: dict[str, float]) -> None:
    assert "optimizer_idle" not in {i.detector for i in found([(s, values) for s in range(1, 40)])}


def test_group_statistics_are_a_signal() -> None:
    assert found([(s, {"actor/grad_norm": 0.0, "reward_std": 0.13}) for s in range(1, 9)])
    assert found([(s, {"actor/grad_norm": 0.0, "frac_reward_zero_std": 0.52}) for s in range(1, 9)])
