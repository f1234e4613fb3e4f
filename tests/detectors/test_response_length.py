"""Lengths that run away are told, lengths that learn are not."""

from __future__ import annotations

import math

import pytest

from monitor.detectors.response_length import ResponseLength
from monitor.model import Severity
from tests.detectors.lone import Row, found, made, noisy
from tests.helpers import CASES, LAB, rows, shared


def _first(data: list[Row]) -> int:
    return min((i.raised_step for i in found(ResponseLength, data)), default=0)


def _dead(steps: int, limit: float = 256.0, cut: float = 0.98, score: float = 0.01) -> list[Row]:
    return [(s, d | {"response_length/mean": limit, "response_length/max": limit, "response_length/clip_ratio": cut})
            for s, d in made(steps, score=lambda t: score, noise=0.005)]


def test_case_11_responses_run_into_the_limit() -> None:
    [incident] = found(ResponseLength, rows(CASES / "11_length_cap.jsonl"))
    assert incident.severity is Severity.CRITICAL
    assert incident.raised_step <= 18


@pytest.mark.parametrize("name", ["00_healthy_grpo", "00_healthy_ppo", "05_benign_loss_follows_kl", "12_not_a_hack",
                                  "16_slow_but_alive", "21_resume_ok_replay", "27_truncate_part1", "10_entropy_down"])
def test_healthy_cases_are_silent(name: str) -> None:
    assert found(ResponseLength, rows(CASES / f"{name}.jsonl")) == []


@pytest.mark.parametrize("path", sorted(LAB.glob("*.jsonl")), ids=lambda p: p.stem)
def test_toy_limits_are_silent_with_and_without_noise(path: object) -> None:
    assert found(ResponseLength, rows(path)) == []  # type: ignore[arg-type]
    assert [seed for seed in range(2) if found(ResponseLength, noisy(path, seed))] == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "by"), [("grpo-dead-clipped-short", 5), ("grpo-dead-clipped", 12),
                                          ("grpo-dead-constant-reward", 12), ("dapo-collapse", 90)])
def test_failing_real_runs_are_told_in_time(name: str, by: int) -> None:
    assert 1 <= _first(list(rows(shared("corpus", "runs", f"{name}.jsonl")))) <= by


def test_all_cut_from_the_first_step_is_dead_at_the_floor_only() -> None:
    [incident] = found(ResponseLength, _dead(5))
    assert (incident.severity, incident.first_step, incident.raised_step) == (Severity.CRITICAL, 1, 4)
    assert found(ResponseLength, _dead(30, limit=16.0)) == []
    assert found(ResponseLength, _dead(30, score=0.6)) == []
    assert found(ResponseLength, _dead(30, cut=0.8)) == []


def test_the_share_of_responses_that_were_not_aborted_is_preferred() -> None:
    data = [(s, d | {"response_length_non_aborted/clip_ratio": 0.01}) for s, d in _dead(30)]
    assert found(ResponseLength, data) == []


def test_a_share_among_short_responses_is_no_truncation() -> None:
    """The V1 trainer calls a response cut that is as long as the longest of its batch."""
    short = {"response_length/mean": 60.0, "response_length/max": 60.0, "response_length/clip_ratio": 1.0}
    data = [(s, d | (short if s > 100 else {})) for s, d in made(200, length=lambda t: 100.0)]
    assert found(ResponseLength, data) == []


@pytest.mark.parametrize("rising", [0.0, 0.3])
def test_truncation_is_told_before_half_of_its_course(rising: float) -> None:
    for seed in range(4):
        data = made(75, seed=seed, cut=lambda t: 0.02 + 0.63 * t / 75, score=lambda t: 0.4 + rising * t / 75)
        assert 20 <= _first(data) <= 38


@pytest.mark.parametrize("steps", [150, 200])
@pytest.mark.parametrize("shape", [lambda x: 1 + 2.5 * x, lambda x: 3.5 ** x])
def test_length_that_buys_reward_is_told(steps: int, shape: object) -> None:
    data = made(steps, length=lambda t: 300 * shape(t / steps), score=lambda t: 0.4 + 0.3 * t / steps)  # type: ignore[operator]
    assert _first(data) > 0


@pytest.mark.parametrize(("steps", "growth", "gain"), [(300, 3, 0.3), (300, 2, 0.1), (400, 3, 0.08)])
def test_reasoning_that_grows_while_it_learns_is_silent(steps: int, growth: float, gain: float) -> None:
    for seed in range(3):
        data = made(steps, seed=seed, length=lambda t: 300 * (1 + (growth - 1) * t / steps),
                    score=lambda t: 0.3 + gain * t / steps)
        assert found(ResponseLength, data) == []


@pytest.mark.parametrize("scale", [1.0, 1000.0, 1e-3])
def test_a_stub_under_a_falling_reward_is_critical(scale: float) -> None:
    data = made(160, length=lambda t: 300 * math.exp(-2.5 * min(1, max(0, t - 80) / 60)), scale=scale,
                score=lambda t: 0.5 - 0.3 * min(1, max(0, t - 80) / 60))
    assert found(ResponseLength, data)[0].severity is Severity.CRITICAL


def test_long_steady_runs_and_shorter_better_answers_are_silent() -> None:
    assert found(ResponseLength, made(3000, length=lambda t: 400 + 80 * math.sin(t / 30))) == []
    assert found(ResponseLength, made(300, length=lambda t: 900 * 0.99 ** t, score=lambda t: 0.2 + t / 500)) == []


def test_either_series_is_enough() -> None:
    only_cut = [(s, {k: v for k, v in d.items() if k in ("actor/pg_loss", "response_length/clip_ratio")})
                for s, d in made(75, cut=lambda t: t / 75)]
    assert found(ResponseLength, only_cut)
    only_length = [(s, {k: v for k, v in d.items() if k in ("actor/pg_loss", "response_length/mean")})
                   for s, d in made(200, length=lambda t: 300 * 1.01 ** t)]
    assert found(ResponseLength, only_length)
