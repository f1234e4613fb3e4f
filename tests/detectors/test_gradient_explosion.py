"""gradient_explosion: sudden, slow and repeated growth are told; warm-up, ties and lone spikes are not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping

import pytest

from monitor.detectors.gradient_explosion import ACTOR, CRITIC, GradientExplosion
from monitor.engine import Engine
from monitor.model import Incident
from tests.helpers import LAB, feed, observation, rows, shared

Row = Mapping[str, object]
_SLOW = (0.23, 0.26, 0.30, 0.34, 0.46, 0.58, 1.15, 1.70)


def found(data: Iterable[tuple[int, Row]]) -> list[Incident]:
    engine = Engine(make_detectors=lambda _: [GradientExplosion()])
    feed(engine, data)
    snapshot = engine.snapshot()
    assert snapshot.costs["gradient_explosion"][0] == 0, "it raised an exception"
    return list(snapshot.runs[0].incidents)


def made(norm: Callable[[int, random.Random], float], steps: int, seed: int = 0, *, noise: float = 0.25,
         reward: Callable[[int], float] = lambda _: 0.5, key: str = "actor/grad_norm") -> list[Incident]:
    rng = random.Random(seed)
    return found([(s, {key: norm(s, rng) * math.exp(rng.gauss(0, noise)),
                       "critic/score/mean": reward(s) + rng.gauss(0, 0.03)}) for s in range(1, steps + 1)])


def slow(step: int) -> float:
    return _SLOW[min(7, max(0, (step - 1) // 15))]


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e-3])
@pytest.mark.parametrize(("norm", "noise", "steps", "by"), [
    (lambda s, _: slow(s), 0.12, 120, 115),
    (lambda s, _: slow(s - 100), 0.12, 220, 215),
    (lambda s, r: r.uniform(40, 160) if s in (50, 110, 160, 220, 270, 330, 380) else 1.0, 0.3, 400, 199),
    (lambda s, _: 0.3 if s < 60 else 2.4, 0.3, 100, 68),
    (lambda s, _: 0.4 * 2.0 ** max(0, s - 30), 0.1, 45, 36),
], ids=["slow", "slow after 100", "spikes", "jump", "doubling"])
def test_growth_is_told_in_time(norm: Callable[[int, random.Random], float], noise: float, steps: int, by: int,
                                scale: float) -> None:
    for seed in range(3):
        told = made(lambda s, r: scale * norm(s, r), steps, seed, noise=noise)
        assert told, seed
        assert told[0].raised_step <= by


def test_an_explosion_in_the_first_steps_is_told_before_the_run_has_a_usual_level() -> None:
    told = made(lambda s, _: 0.4 * 10.0 ** max(0, s - 3), 8, noise=0.0)
    assert [i.raised_step for i in told] == [7]


def test_a_critics_gradient_is_judged_for_itself_and_never_critical() -> None:
    told = made(lambda s, _: 2.0 if s < 60 else 400.0, 100, key="critic/grad_norm")
    assert [i.severity.value for i in told] == ["warning"]
    assert "Critic" in told[0].reason


HEALTHY: dict[str, tuple[Callable[[int, random.Random], float], Callable[[int], float], float]] = {
    "warm-up": (lambda s, _: 0.3 * (1 + 2 * min(1, s / 30)), lambda _: 0.5, 0.25),
    "sharpening with reward": (lambda s, _: 0.3 * (1 + 2 * min(1, s / 80)), lambda s: 0.2 + 0.5 * min(1, s / 80), 0.25),
    "sparse reward found": (lambda s, _: 0.05 + 0.3 / (1 + math.exp((60 - s) / 8)),
                            lambda s: 0.02 + 0.6 / (1 + math.exp((60 - s) / 8)), 0.25),
    "decline": (lambda s, _: 0.05 + 0.4 * math.exp(-s / 15), lambda _: 0.5, 0.2),
    "two spikes": (lambda s, _: 40.0 if s in (60, 200) else 0.3, lambda _: 0.5, 0.3),
    "spikes of 18 times": (lambda _, r: 18.0 if r.random() < 0.02 else 1.0, lambda _: 0.5, 0.3),
    "ties": (lambda _, r: 0.0 if r.random() < 0.6 else 0.3, lambda _: 0.9, 0.4),
    "a reward service that comes back": (lambda s, _: 1e-4 if 40 < s < 120 else 0.3, lambda _: 0.5, 0.2),
    "large from the first step": (lambda _, __: 2000.0, lambda _: 0.5, 0.3),
    "fresh critic": (lambda s, _: 30 + 377 * math.exp(-s / 3), lambda _: 0.5, 0.3),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_well_stays_silent(name: str) -> None:
    norm, reward, noise = HEALTHY[name]
    assert [i for seed in range(3) for i in made(norm, 300, seed, noise=noise, reward=reward)] == []


def test_stationary_noise_is_silent() -> None:
    rng = random.Random(0)
    level = 0.0
    data: list[tuple[int, Row]] = []
    for step in range(10_000):
        level = 0.9 * level + rng.gauss(0, 0.09)
        heavy = 0.2 * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 1) / 1.5)
        data.append((step, {"actor/grad_norm": 0.3 * math.exp(level), "critic/grad_norm": 2 * math.exp(heavy)}))
    assert found(data) == []


@pytest.mark.parametrize(("run", "first", "by"), [
    ("dapo-collapse", 1, 84), ("grpo-slow-gradient-growth", 60, 125), ("rloo-advantage-explosion", 41, 50)])
def test_recorded_faults(run: str, first: int, by: int) -> None:
    folder = "lab" if run.startswith("rloo") else "runs"
    told = found(rows(shared("corpus", folder, f"{run}.jsonl")))
    assert first <= told[0].raised_step <= by


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_healthy_runs_stay_silent(noise: float) -> None:
    labels = json.loads(shared("corpus", "labels.json").read_text())["runs"]
    rng = random.Random(1)
    for name, label in labels.items():
        if label["verdict"] == "healthy":
            path = shared("corpus", "lab" if label["source"].startswith("lab") else "runs", f"{name}.jsonl")
            data = [(s, {k: v * (1 + rng.gauss(0, noise)) if isinstance(v, float) else v for k, v in d.items()})
                    for s, d in rows(path)]
            assert found(data) == [], name


@pytest.mark.parametrize("run", ["grpo-healthy", "ppo-healthy", "ppo-kl-runaway", "ppo-skipped-updates"])
def test_recorded_runs_without_this_fault(run: str) -> None:
    assert found(rows(LAB / f"{run}.jsonl")) == []


def test_a_row_without_a_norm_says_nothing() -> None:
    detector = GradientExplosion()
    assert detector.update(observation(1, {"score/mean": 1.0})) is None
    assert detector.update(observation(1, {ACTOR: math.nan, CRITIC: math.nan})) is None
