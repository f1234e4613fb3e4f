"""throughput_regression: slow-downs at any pace and in any log, and what only looks like one."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from monitor.detectors.throughput_regression import ThroughputRegression
from monitor.model import Severity
from tests.detectors.lone import Row, found
from tests.detectors.simulate import faulty, slower
from tests.helpers import rows, shared


def made(steps: int, **series: Callable[[int], float]) -> list[Row]:
    return [(step, {key.replace("__", "/"): call(step) for key, call in series.items()})
            for step in range(1, steps + 1)]


def gentle(step: int) -> float:
    return 30.0 * (1 + 1.5 * max(0, step - 60) / 150)


@pytest.mark.parametrize("seed", range(4))
def test_a_gentle_slow_down_is_told_before_half_of_its_course(seed: int) -> None:
    random = Random(seed)
    validation = made(210, timing_s__step=lambda s: gentle(s) * random.gauss(1, 0.05) * (1 if s % 5 else 2.2))
    simulated: list[Row] = [(s, dict(row)) for s, row in faulty(seed, 210, 60, 150, slower)]
    for data in (validation, simulated):
        (incident,) = found(ThroughputRegression, data)
        assert 60 < incident.raised_step <= 60 + 75
        assert incident.severity is Severity.WARNING


@pytest.mark.parametrize(("after", "factor"), [(12, 3.0), (60, 1.6), (60, 2.0)])
def test_a_sudden_slow_down_is_told_within_fifteen_steps(after: int, factor: float) -> None:
    (incident,) = found(ThroughputRegression, made(90, timing_s__step=lambda s: 30.0 * (1 if s <= after else factor)))
    assert incident.raised_step <= after + 15


@pytest.mark.parametrize("key", ["testing", "save_checkpoint"])
def test_a_run_that_validates_or_saves_at_each_step_is_judged_too(key: str) -> None:
    data = [(s, {"timing_s/step": 30.0 if s < 60 else 90.0, f"timing_s/{key}": 10.0}) for s in range(1, 150)]
    (incident,) = found(ThroughputRegression, data)  # type: ignore[arg-type]  # floats are objects
    assert incident.raised_step <= 75


def test_slow_steps_that_have_a_reason_are_silent() -> None:
    def growth(step: int) -> float:
        return 1 + 7 * step / 400

    batches = made(200, timing_s__step=lambda s: 10.0 + 20 * (1 + s // 70), perf__total_num_tokens=lambda s: 1e6,
                   train__num_gen_batches=lambda s: 1.0 + s // 70)
    attention = made(400, timing_s__step=lambda s: 20 * growth(s) + 2 * growth(s) ** 2,
                     perf__total_num_tokens=lambda s: 1e6 * growth(s))
    lengths = made(400, timing_s__step=lambda s: 10 + 20 * growth(s), response_length__mean=lambda s: 400 * growth(s))
    warm = made(200, timing_s__step=lambda s: 30.0 + 400 * math.exp(-s / 2))
    for data in (batches, attention, lengths, warm):
        assert found(ThroughputRegression, data) == []


def test_longer_answers_do_not_hide_a_real_slow_down() -> None:
    data = made(200, timing_s__step=lambda s: 30.0 * (1 + s / 200) * (1 if s < 100 else 2.5),
                perf__total_num_tokens=lambda s: 1e6 * (1 + s / 200))
    (incident,) = found(ThroughputRegression, data)
    assert 100 < incident.raised_step <= 115
    assert "times per token" in incident.reason


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_any_kind_is_silent(seed: int) -> None:
    random = Random(seed)
    modes = made(3000, timing_s__step=lambda s: 30.0 * (1 if s % 2 else 2))
    burst = made(300, timing_s__step=lambda s: 120.0 if 100 < s <= 106 else 30.0)
    noise = made(10_000, timing_s__step=lambda s: 30 * math.exp(random.gauss(0, 0.15)) * (
        random.choice((3, 6)) if random.random() < 0.01 else 1))
    for data in (modes, burst, noise):
        assert found(ThroughputRegression, data) == []


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_unit_does_not_matter(scale: float) -> None:
    (incident,) = found(ThroughputRegression, made(210, timing_s__step=lambda s: scale * gentle(s)))
    assert incident.raised_step <= 135


@pytest.mark.parametrize("name", ["grpo-gsm8k-offpolicy-healthy", "grpo-3b-slow-validation-healthy",
                                  "grpo-step-reward-healthy"])
def test_slow_validation_without_its_key_is_silent(name: str) -> None:
    data = [(s, {k: v for k, v in row.items() if k not in ("timing_s/testing", "timing_s/save_checkpoint")})
            for s, row in rows(shared("corpus", "runs", f"{name}.jsonl"))]
    assert found(ThroughputRegression, data) == []
