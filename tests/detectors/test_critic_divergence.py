"""critic_divergence: a value loss that leaves the returns behind is told; one that follows them is not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from monitor.detectors.critic_divergence import CriticDivergence
from monitor.engine import Engine
from monitor.model import Incident
from tests.helpers import LAB, feed, observation, rows, shared

Row = Mapping[str, object]
Maker = Callable[[int, random.Random], Row]


def found(data: Iterable[tuple[int, Row]]) -> list[Incident]:
    engine = Engine(make_detectors=lambda _: [CriticDivergence()])
    feed(engine, data)
    snapshot = engine.snapshot()
    assert snapshot.costs["critic_divergence"][0] == 0, "it raised an exception"
    return list(snapshot.runs[0].incidents)


def made(make: Maker, steps: int, seed: int = 0) -> list[Incident]:
    rng = random.Random(seed)
    return found([(step, make(step, rng)) for step in range(1, steps + 1)])


def row(rng: random.Random, loss: float, explained: float | None = None, *, scale: float = 1.0,
        mean: float = 0.5) -> dict[str, float]:
    values = {"critic/vf_loss": loss * math.exp(rng.gauss(0, 0.35)), "critic/score/max": scale, "critic/score/min": 0.0,
              "critic/score/mean": mean * scale, "critic/returns/max": scale, "critic/returns/mean": mean * scale}
    return values if explained is None else values | {"critic/vf_explained_var": explained + rng.gauss(0, 0.05)}


def gentle(step: int) -> float:
    return min(1.0, max(0, step - 60) / 150)


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e-3])
def test_a_gentle_divergence_is_told_before_half_of_its_course(factor: float) -> None:
    told = [made(lambda s, r: row(r, factor * 0.1 * 5 ** gentle(s), 0.6 - 1.1 * gentle(s)), 210, seed)
            for seed in range(8)]
    assert [len(incidents) for incidents in told] == [1] * 8
    raised = sorted(incidents[0].raised_step for incidents in told)
    assert raised[0] > 60
    assert raised[-2] <= 135, "noise of 0.35 delays one in some dozens of such runs by another look"
    assert raised[-1] <= 145


def test_a_loss_without_bound_is_critical_with_and_without_explained_variance() -> None:
    for explained in (True, False):
        told = made(lambda s, r: row(r, 0.1 * 10 ** (0.2 * max(0, s - 40)),
                                     (0.5 - 10 ** (0.2 * max(0, s - 40))) if explained else None), 130)  # noqa: B023
        assert told[0].raised_step <= 65
        assert told[0].critical_step is not None


HEALTHY: dict[str, Maker] = {
    "steady": lambda s, r: row(r, 0.1, 0.6),
    "returns grow with success": lambda s, r: row(r, 0.1 * (1 + 9 * min(1, s / 100)) ** 2, 0.6,
                                                  scale=1 + 9 * min(1, s / 100)),
    "the same without explained variance": lambda s, r: row(r, 0.1 * (1 + 9 * min(1, s / 100)) ** 2,
                                                            scale=1 + 9 * min(1, s / 100)),
    "a rare success becomes common": lambda s, r: row(
        r, 0.4 * (0.02 + 0.48 * min(1, s / 100)) * (0.98 - 0.48 * min(1, s / 100)), mean=0.02 + 0.48 * min(1, s / 100)),
    "fresh critic": lambda s, r: row(r, 0.05 + 10 * math.exp(-s / 4), 0.5 - 800 * math.exp(-s / 3)),
    "spikes": lambda s, r: row(r, 3.0 if r.random() < 0.03 else 0.1, 0.4),
    "a critic that lags for some steps": lambda s, r: row(
        r, 0.1 * (1 + 1.5 * math.exp(-((s - 100) / 8) ** 2)), 0.6 - 0.35 * math.exp(-((s - 100) / 8) ** 2)),
    "at the ceiling": lambda s, r: row(r, 1e-7 * (1 + s / 30), 0.8 - s / 100, mean=0.9999),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_well_stays_silent(name: str) -> None:
    assert [i for seed in range(4) for i in made(HEALTHY[name], 300, seed)] == []


def test_stationary_noise_is_silent() -> None:
    rng, level = random.Random(3), 0.0
    data: list[tuple[int, Row]] = []
    for step in range(10_000):
        level = 0.9 * level + rng.gauss(0, 0.1)
        data.append((step, row(rng, 0.1 * math.exp(level), 0.4 - 0.2 * level)))
    assert found(data) == []


def test_a_drift_of_returns_is_named() -> None:
    told = found(rows(shared("cases", "fixtures", "09_value_scale.jsonl")))
    assert told[0].raised_step <= 25
    assert "Value loss rose" in told[0].reason
    assert "scale of returns drifted" in told[0].reason


@pytest.mark.parametrize("case", ["00_healthy_ppo", "00_healthy_grpo", "09_vf_oscillation", "05_benign_loss_follows_kl",
                                  "02_critic_nan_as_null"])
def test_other_cases_are_not_this(case: str) -> None:
    assert found(rows(shared("cases", "fixtures", f"{case}.jsonl"))) == []


def test_only_runs_that_fail_may_be_told() -> None:
    labels = json.loads(shared("corpus", "labels.json").read_text())["runs"]
    for name, label in labels.items():
        if label["critic"]:
            path: Path = shared("corpus", "lab" if label["source"].startswith("lab") else "runs", f"{name}.jsonl")
            assert found(rows(path)) == [], name


def test_lab_runs_with_noise_are_silent() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        data = [(s, {k: v * (1 + rng.gauss(0, 0.05)) if isinstance(v, float) else v for k, v in d.items()})
                for s, d in rows(LAB / "ppo-healthy.jsonl")]
        assert found(data) == []


def test_a_run_without_a_critic_is_not_judged() -> None:
    assert CriticDivergence().update(observation(1, {"return/max": 1.0, "score/mean": 0.5})) is None
