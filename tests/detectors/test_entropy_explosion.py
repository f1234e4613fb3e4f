"""Entropy that grows is an explosion only when the reward does not pay for it."""

from __future__ import annotations

import math

import pytest

from monitor.detectors.entropy_explosion import EntropyExplosion
from monitor.model import Severity
from tests.detectors.lone import found, made, noisy, renamed
from tests.detectors.test_entropy_collapse import HEALTHY_CASES
from tests.helpers import CASES, LAB, observation, rows, shared


@pytest.mark.parametrize("key", ["actor/entropy", "actor/entropy_loss"])
def test_case_10_entropy_grows(key: str) -> None:
    [incident] = found(EntropyExplosion, renamed(rows(CASES / "10_entropy_up.jsonl"), "actor/entropy", key))
    assert incident.raised_step <= 20
    assert incident.critical_step is not None


@pytest.mark.parametrize("name", [*(n for n in HEALTHY_CASES if n != "10_entropy_up"), "10_entropy_down"])
def test_healthy_cases_are_silent(name: str) -> None:
    assert found(EntropyExplosion, rows(CASES / f"{name}.jsonl")) == []


@pytest.mark.parametrize("path", sorted(LAB.glob("*.jsonl")), ids=lambda p: p.stem)
def test_recorded_runs_are_silent_with_and_without_noise(path: object) -> None:
    assert found(EntropyExplosion, rows(path)) == []  # type: ignore[arg-type]
    assert found(EntropyExplosion, noisy(path, 1)) == []  # type: ignore[arg-type]


def test_entropy_that_grows_by_half_under_a_rising_reward_is_silent() -> None:
    assert found(EntropyExplosion, rows(shared("corpus", "runs", "dapo-drift-healthy.jsonl"))) == []
    assert found(EntropyExplosion, made(300, entropy=lambda t: 0.4 + t / 400, score=lambda t: 0.3 + t / 1000)) == []


@pytest.mark.parametrize("begin", [0, 100])
def test_an_explosion_within_four_steps_is_critical_at_once(begin: int) -> None:
    data = made(begin + 6, entropy=lambda t: min(3.0, 0.3 * 10 ** (max(0, t - begin) / 4)),
                score=lambda t: max(0.0, 0.5 - 0.12 * max(0, t - begin)))
    [incident] = found(EntropyExplosion, data)
    assert incident.severity is Severity.CRITICAL
    assert incident.raised_step <= begin + 5


def test_one_odd_step_is_no_explosion() -> None:
    data = [(s, d | ({"actor/entropy": 6.0} if s % 40 == 2 else {})) for s, d in made(200)]
    assert found(EntropyExplosion, data) == []


@pytest.mark.parametrize("scale", [1.0, 1000.0, 1e-3])
def test_a_slow_growth_under_a_flat_reward_is_told_before_half_of_its_course(scale: float) -> None:
    for seed in range(3):
        incident = found(EntropyExplosion, made(400, seed=seed, entropy=lambda t: 0.3 + 1.7 * t / 400, scale=scale))[0]
        assert 60 < incident.raised_step < 200


def test_long_steady_runs_are_silent_and_so_are_runs_that_start_random() -> None:
    assert found(EntropyExplosion, made(3000, entropy=lambda t: 0.45 + 0.08 * math.sin(t / 40))) == []
    assert found(EntropyExplosion, made(300, entropy=lambda t: 4.16 * 0.999 ** t)) == []


def test_without_a_reward_the_growth_alone_decides() -> None:
    data = [(s, {"actor/pg_loss": 0.1, "actor/entropy": d["actor/entropy"]})
            for s, d in made(100, entropy=lambda t: 0.3 + t / 50)]
    assert "not logged" in found(EntropyExplosion, data)[0].reason


@pytest.mark.parametrize("entropy", [-0.5, -3.0, 0.0])
def test_an_estimate_of_nothing_or_less_is_judged_without_an_error(entropy: float) -> None:
    detector = EntropyExplosion()
    for step in range(30):
        assert detector.update(observation(step, {"entropy_nats": entropy})) is not None
