"""Entropy that falls is a collapse only when nothing was won by it."""

from __future__ import annotations

import math

import pytest

from monitor.detectors.entropy_collapse import EntropyCollapse
from monitor.model import Severity
from tests.detectors.lone import Row, found, made, noisy, renamed
from tests.helpers import CASES, LAB, rows, shared

HEALTHY_CASES = ("00_healthy_grpo", "00_healthy_ppo", "05_benign_loss_follows_kl", "12_not_a_hack",
                 "16_slow_but_alive", "21_resume_ok_replay", "27_truncate_part1", "10_entropy_up")


def _exponential(step: int) -> float:
    return 0.6 * math.exp(-math.log(100) * step / 400)


def _linear(step: int) -> float:
    return 0.6 - 0.594 * step / 400


def _first(data: list[Row]) -> int:
    return min((i.raised_step for i in found(EntropyCollapse, data)), default=0)


@pytest.mark.parametrize("key", ["actor/entropy", "actor/entropy_loss"])
def test_case_10_entropy_falls_and_so_do_the_advantages(key: str) -> None:
    [incident] = found(EntropyCollapse, renamed(rows(CASES / "10_entropy_down.jsonl"), "actor/entropy", key))
    assert incident.severity is Severity.CRITICAL
    assert incident.raised_step <= 30
    assert "advantage" in incident.reason


def test_case_10_with_a_steady_advantage_is_convergence() -> None:
    data = [(s, d | {"critic/advantages/max": 1.8}) for s, d in rows(CASES / "10_entropy_down.jsonl")]
    assert found(EntropyCollapse, data) == []


@pytest.mark.parametrize("name", HEALTHY_CASES)
def test_healthy_cases_are_silent(name: str) -> None:
    assert found(EntropyCollapse, rows(CASES / f"{name}.jsonl")) == []


def test_a_collapse_under_a_random_reward_is_told() -> None:
    [incident] = found(EntropyCollapse, rows(LAB / "ppo-kl-runaway.jsonl"))
    assert 35 <= incident.raised_step <= 66


@pytest.mark.parametrize("name", ["grpo-healthy", "ppo-healthy", "gpu-ppo-hang", "rloo-advantage-explosion",
                                  "ppo-critic-swing"])
def test_other_recorded_runs_are_silent_with_and_without_noise(name: str) -> None:
    path = LAB / f"{name}.jsonl"
    assert found(EntropyCollapse, rows(path)) == []
    assert [seed for seed in range(3) if found(EntropyCollapse, noisy(path, seed))] == []


@pytest.mark.parametrize("name", ["grpo-gsm8k-math-healthy", "grpo-gsm8k-healthy-a", "grpo-moe-saturated-healthy",
                                  "dapo-drift-healthy"])
def test_convergence_in_real_runs_is_silent(name: str) -> None:
    path = shared("corpus", "runs", f"{name}.jsonl")
    assert found(EntropyCollapse, rows(path)) == []
    assert found(EntropyCollapse, noisy(path, 1)) == []


def test_a_policy_at_its_ceiling_is_silent() -> None:
    assert found(EntropyCollapse, rows(shared("corpus", "lab", "ppo-ceiling.jsonl"))) == []


@pytest.mark.parametrize(("entropy", "by"), [(_exponential, 150), (_linear, 200)])
@pytest.mark.parametrize("scale", [1.0, 1000.0, 1e-3])
def test_a_slow_fall_is_told_before_half_of_its_course(entropy: object, by: int, scale: float) -> None:
    steps = [_first(made(400, seed=seed, entropy=entropy, scale=scale)) for seed in range(3)]  # type: ignore[arg-type]
    assert all(40 < step <= by for step in steps), steps


@pytest.mark.parametrize("entropy", [_exponential, _linear])
def test_the_same_fall_under_a_rising_reward_is_silent(entropy: object) -> None:
    for seed in range(3):
        data = made(400, seed=seed, entropy=entropy, score=lambda t: 0.4 + t / 1000)  # type: ignore[arg-type]
        assert found(EntropyCollapse, data) == []


def test_a_run_that_neither_learns_nor_collapses_is_silent() -> None:
    assert found(EntropyCollapse, made(3000, entropy=lambda t: 0.45 + 0.05 * math.sin(t / 40))) == []


def test_without_any_reward_nothing_is_said_and_without_the_spread_the_reward_decides() -> None:
    data = made(300, entropy=_exponential)
    assert found(EntropyCollapse, [(s, {"actor/pg_loss": 0.1, "actor/entropy": d["actor/entropy"]}) for s, d in data]
                 ) == []
    few = [(s, {k: v for k, v in d.items() if k in ("actor/entropy", "critic/score/mean")}) for s, d in data]
    assert found(EntropyCollapse, few)[0].detector == "entropy_collapse"
