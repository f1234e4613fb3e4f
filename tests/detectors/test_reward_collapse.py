"""``reward_collapse``: falls for good, fast and slow; noise, harder data and seasons are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from monitor.detectors.reward_collapse import RewardCollapse
from monitor.engine import Engine
from monitor.model import Incident, Severity
from tests.helpers import LAB, feed, rows, shared

Curve = Callable[[int], float]


def found(data: object) -> list[Incident]:
    engine = Engine(make_detectors=lambda *_: [RewardCollapse()])
    feed(engine, data)  # type: ignore[arg-type]  # steps and rows
    return list(engine.snapshot().runs[0].incidents)


def run(curve: Curve, steps: int, sigma: float, seed: int, scale: float = 1.0, memory: float = 0.0,
        heavy: bool = False) -> list[tuple[int, dict[str, float]]]:
    rng, state, out = Random(seed), 0.0, []
    for step in range(1, steps + 1):
        shock = rng.gauss(0, 1) / (math.sqrt(max(0.05, rng.gammavariate(1.5, 1 / 1.5))) if heavy else 1.0)
        state = memory * state + math.sqrt(1 - memory**2) * sigma * shock
        mean = min(1.0, max(0.0, curve(step) + state))
        out.append((step, {"critic/score/mean": mean * scale, "critic/score/min": 0.0, "critic/score/max": scale}))
    return out


def climb(step: int) -> float:
    return 0.2 + 0.5 * (1 - math.exp(-step / 60))


def falls(start: Curve, onset: int, course: int, end: float) -> Curve:
    return lambda s: start(s) if s < onset else start(onset) + (end - start(onset)) * min(1.0, (s - onset) / course)


FAULTS: dict[str, tuple[Curve, int, int]] = {  # curve, onset, step by which it must be told
    "at once": (falls(climb, 100, 1, 0.1), 100, 112),
    "within 60 steps": (falls(climb, 150, 60, 0.1), 150, 200),
    "within 150 steps": (falls(climb, 150, 150, 0.05), 150, 240),
    "within 300 steps": (falls(climb, 150, 300, 0.05), 150, 330),
    "without a gain before": (falls(lambda _: 0.6, 60, 1, 0.1), 60, 72),
    "from the ceiling": (falls(lambda s: min(0.97, 0.85 + s / 500), 80, 1, 0.3), 80, 92),
    "in a short run": (falls(lambda s: 0.2 + 0.01 * s, 40, 1, 0.05), 40, 52),
}


@pytest.mark.parametrize("scale", [1.0, 1000.0, 1e-3])
@pytest.mark.parametrize("name", FAULTS)
def test_a_collapse_is_told(name: str, scale: float) -> None:
    curve, onset, by = FAULTS[name]
    for seed in range(2):
        first = found(run(curve, by + 30, 0.02, seed, scale))[0]
        assert onset < first.raised_step <= by
        assert "has fallen from" in first.reason


HEALTHY: dict[str, Curve] = {
    "learning": climb,
    "flat": lambda _: 0.5,
    "harder data by 15 %": lambda s: climb(s) * (1 if s < 100 else 0.85),
    "harder data by 20 % in turns": lambda s: climb(s) * (1 - 0.2 * (s // 100 % 2)),
    "harder data near the ceiling": lambda s: (0.92 + 0.06 * min(1.0, s / 50)) * (1 if s < 60 else 0.8),
    "seasons of the data": lambda s: climb(s) * (1 + 0.1 * math.sin(s / 40 * 2 * math.pi)),
    "a dip of four steps": lambda s: climb(s) - (0.25 if 150 <= s < 154 else 0.0),
    "slow overfitting": lambda s: 0.2 + 0.6 * min(1.0, s / 100) - 0.1 * min(1.0, max(0.0, (s - 200) / 200)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_no_collapse_is_silent(name: str) -> None:
    for seed in range(3):
        assert found(run(HEALTHY[name], 400, 0.02, seed)) == []


@pytest.mark.parametrize("memory", [0.0, 0.8])
@pytest.mark.parametrize("heavy", [False, True])
def test_long_stationary_noise_is_silent(memory: float, heavy: bool) -> None:
    assert found(run(lambda _: 0.5, 3000, 0.05, 0, memory=memory, heavy=heavy)) == []
    assert found(run(climb, 3000, 0.05, 9, memory=memory, heavy=heavy)) == []


def test_recorded_collapses() -> None:
    first = found(rows(shared("corpus", "runs", "dapo-collapse.jsonl")))[0]
    assert 62 <= first.raised_step <= 90
    first = found(rows(shared("corpus", "lab", "grpo-dead-reward.jsonl")))[0]
    assert first.severity is Severity.CRITICAL
    assert 41 <= first.raised_step <= 48
    assert "below the worst single answer" in first.reason or "has fallen" in first.reason


@pytest.mark.parametrize("name", ["grpo-healthy", "ppo-healthy", "ppo-kl-runaway", "gpu-ppo-hang", "ppo-critic-swing"])
def test_bundled_runs_are_silent(name: str) -> None:
    assert found(rows(LAB / f"{name}.jsonl")) == []


@pytest.mark.parametrize("case", ["21_resume_from_zero", "21_resume_ok_replay", "05_benign_loss_follows_kl"])
def test_cases_without_a_collapse_are_silent(case: str) -> None:
    assert found(rows(shared("cases", "fixtures", f"{case}.jsonl"))) == []


def test_the_worst_answers_are_not_needed_nor_the_name_of_the_score() -> None:
    data = [(s, {"critic/rewards/mean": r["critic/score/mean"]}) for s, r in run(FAULTS["at once"][0], 140, 0.02, 0)]
    assert found(data)[0].raised_step <= 112
