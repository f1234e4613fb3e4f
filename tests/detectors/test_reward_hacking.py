"""``reward_hacking``: two trends that part, aligned by step; overfitting noise and one trend alone are none."""

from __future__ import annotations

from random import Random

import pytest

from monitor.detectors.reward_hacking import RewardHacking
from monitor.engine import Engine
from monitor.model import Incident, Severity
from tests.helpers import LAB, feed, rows, shared

ACCURACY = "val-core/math/acc/mean@8"


def found(data: object) -> list[Incident]:
    engine = Engine(make_detectors=lambda *_: [RewardHacking()])
    feed(engine, data)  # type: ignore[arg-type]  # steps and rows
    return list(engine.snapshot().runs[0].incidents)


def run(seed: int, *, steps: int = 400, rise: float = 0.3, fall: float = 0.0, noise: float = 0.015, every: int = 20,
        key: str = ACCURACY, scale: float = 1.0, own_rows: bool = False) -> list[tuple[int, dict[str, float]]]:
    """Reward and validation climb until step 100; then the reward rises on and the validation falls."""
    rng, out = Random(seed), []
    for step in range(1, steps + 1):
        early, late = min(1.0, step / 100), max(0.0, (step - 100) / 300)
        reward = 0.3 + 0.2 * early + rise * late + rng.gauss(0, 0.02)
        row = {"critic/score/mean": reward * scale, "actor/pg_loss": 0.0}
        tested = {key: (0.3 + 0.3 * early - fall * late + rng.gauss(0, noise)) * scale}
        if step % every:
            out.append((step, row))
        elif own_rows:
            out += [(step, row), (step, tested)]
        else:
            out.append((step, row | tested))
    return out


def test_the_case_and_its_look_alike() -> None:
    (incident,) = found(rows(shared("cases", "fixtures", "12_reward_hack.jsonl")))
    assert (incident.severity, incident.raised_step) == (Severity.CRITICAL, 25)
    assert found(rows(shared("cases", "fixtures", "12_not_a_hack.jsonl"))) == []


@pytest.mark.parametrize("options", [
    {}, {"own_rows": True}, {"scale": 1000.0}, {"scale": 1e-3}, {"key": "val/test_score/math"},
    {"key": "val-core/math/reward/mean@1"}, {"key": "val-aux/math/reward/mean@1"}], ids=str)
def test_a_hack_is_told_once_and_before_it_is_over(options: dict[str, float]) -> None:
    for seed in range(3):
        told = found(run(seed, fall=0.4, **options))  # type: ignore[arg-type]  # passed through
        assert len(told) == 1
        assert 100 < told[0].raised_step <= 340
        assert "rose from" in told[0].reason


@pytest.mark.parametrize("options", [
    {}, {"fall": 0.02}, {"noise": 0.02}, {"noise": 0.05}, {"noise": 0.05, "every": 5, "steps": 1500},
    {"fall": 0.4, "rise": 0.0}, {"fall": 0.4, "rise": -0.3}, {"fall": 0.4, "every": 100}], ids=str)
def test_one_trend_alone_noise_and_few_validations_are_silent(options: dict[str, float]) -> None:
    for seed in range(4):
        assert found(run(seed, **options)) == []  # type: ignore[arg-type]  # passed through


def test_spread_of_the_validation_and_the_number_of_turns_are_no_scores() -> None:
    for key in ("val-aux/math/acc/std@8", "val-aux/num_turns/mean"):
        assert found(run(0, fall=0.4, key=key)) == []


def test_components_without_a_validation() -> None:
    rng = Random(0)
    hack = [(s, {"critic/score/mean": 0.7 + 0.002 * s, "reward/accuracy": 0.5 - 0.004 * s + rng.gauss(0, 0.02),
                 "reward/format": 0.2 + 0.006 * s}) for s in range(1, 101)]
    (incident,) = found(hack)
    assert incident.raised_step <= 50
    assert "reward component format rose" in incident.reason
    collapse = [(s, row | {"critic/score/mean": 0.7 - 0.005 * s}) for s, row in hack]
    assert found(collapse) == []
    both = [(s, row | {"reward/accuracy": 0.1 + 0.004 * s}) for s, row in hack]
    assert found(both) == []


def test_a_resume_from_before_the_hack_starts_the_trend_anew() -> None:
    data = run(1, fall=0.4)
    back = [(s, row) for s, row in run(2) if s > 100]
    told = found(data + back)
    assert len(told) == 1
    assert told[0].ended


@pytest.mark.parametrize("name", ["grpo-healthy", "ppo-healthy", "ppo-kl-runaway", "rloo-advantage-explosion"])
def test_bundled_runs_are_silent(name: str) -> None:
    assert found(rows(LAB / f"{name}.jsonl")) == []


@pytest.mark.parametrize("name", ["grpo-7b-healthy", "grpo-gsm8k-math-healthy", "grpo-moe-saturated-healthy"])
def test_noisy_copies_of_recorded_healthy_runs_are_silent(name: str) -> None:
    data = rows(shared("corpus", "runs", f"{name}.jsonl"))
    for seed in range(5):
        rng = Random(seed)
        assert found([(s, {k: v * (1 + rng.gauss(0, 0.05)) if isinstance(v, float) else v for k, v in d.items()})
                      for s, d in data]) == []
