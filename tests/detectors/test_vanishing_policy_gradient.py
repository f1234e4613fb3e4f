"""vanishing_policy_gradient: loss near zero, KL climbing, reward flat; any one of the three missing acquits."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping

import pytest

from monitor.detectors.vanishing_policy_gradient import VanishingPolicyGradient
from monitor.engine import Engine
from monitor.model import Incident, Severity, Status
from tests.helpers import LAB, feed, observation, rows, shared

Row = Mapping[str, object]
Maker = Callable[[int, random.Random], Row]


def found(data: Iterable[tuple[int, Row]]) -> list[Incident]:
    engine = Engine(make_detectors=lambda _: [VanishingPolicyGradient()])
    feed(engine, data)
    snapshot = engine.snapshot()
    assert snapshot.costs["vanishing_policy_gradient"][0] == 0, "it raised an exception"
    return list(snapshot.runs[0].incidents)


def made(make: Maker, steps: int, seed: int = 0) -> list[Incident]:
    rng = random.Random(seed)
    return found([(step, make(step, rng)) for step in range(1, steps + 1)])


def row(rng: random.Random, *, kl: float, reward: float = 0.5, loss: float = -0.002, **over: float) -> dict[str, float]:
    return {"actor/pg_loss": loss * (1 + rng.gauss(0, 0.5)), "actor/kl_loss": kl * math.exp(rng.gauss(0, 0.15)),
            "actor/ppo_kl": rng.gauss(0, 0.0005), "critic/score/mean": reward + rng.gauss(0, 0.03),
            "critic/advantages/max": 3.0, "critic/advantages/min": -3.0, "response_length/mean": 3000.0} | over


FAULTS: dict[str, tuple[Maker, int, int]] = {
    "the guide's: to 12 nats": (lambda s, r: row(r, kl=0.01 * 1200 ** (s / 300)), 300, 150),
    "after a calm beginning": (lambda s, r: row(r, kl=0.02 * 100 ** (max(0, s - 100) / 200)), 300, 200),
    "linear to half a nat": (lambda s, r: row(r, kl=0.01 + 0.5 * s / 150), 150, 75),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_drift_without_direction_is_told(name: str) -> None:
    make, steps, by = FAULTS[name]
    for seed in range(4):
        told = made(make, steps, seed)
        assert told, seed
        assert told[0].raised_step <= by
        assert "3000 tokens" in told[0].reason


def test_the_kl_of_updates_does_where_there_is_no_reference() -> None:
    def make(step: int, rng: random.Random) -> Row:
        values = row(rng, kl=0.0)
        del values["actor/kl_loss"]
        kl = 0.001 * 200 ** (max(0, step - 60) / 100) * math.exp(rng.gauss(0, 0.3))
        return values | {"actor/ppo_kl": kl}
    told = made(make, 160)
    assert told[0].raised_step <= 150
    assert "KL of single updates" in told[0].reason


HEALTHY: dict[str, Maker] = {
    "a loss of ordinary size": lambda s, r: row(r, kl=0.01 * 1200 ** (s / 300), loss=-0.15),
    "learning": lambda s, r: row(r, kl=min(1.0, 0.001 * math.exp(s / 40)), reward=0.2 + 0.6 * (1 - math.exp(-s / 150))),
    "a plateau after learning": lambda s, r: row(
        r, kl=0.05 * math.log1p(s / 1.5), reward=0.3 + 0.5 * (1 - math.exp(-s / 8))),
    "slow learning": lambda s, r: row(r, kl=0.002 * s, reward=0.3 + 0.001 * s),
    "a rare success": lambda s, r: row(r, kl=0.003 * s, reward=0.02 + 0.0004 * s),
    "a policy that has settled": lambda s, r: row(r, kl=0.2),
    "a small KL": lambda s, r: row(r, kl=0.0003 * s),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_well_stays_silent(name: str) -> None:
    assert [i for seed in range(4) for i in made(HEALTHY[name], 300, seed)] == []


def test_stationary_noise_is_silent() -> None:
    rng, level = random.Random(1), 0.0
    data: list[tuple[int, Row]] = []
    for step in range(10_000):
        level = 0.9 * level + rng.gauss(0, 0.1)
        data.append((step, row(rng, kl=0.15 * math.exp(level))))
    assert found(data) == []


@pytest.mark.parametrize("run", ["ppo-kl-runaway", "ppo-uninformative-reward"])
def test_recorded_runs_with_a_random_reward(run: str) -> None:
    told = found(rows(shared("corpus", "lab", f"{run}.jsonl")))
    assert len(told) == 1
    assert told[0].raised_step <= 65
    assert run == "ppo-kl-runaway" or told[0].severity is Severity.WARNING


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_healthy_runs_stay_silent(noise: float) -> None:
    labels = json.loads(shared("corpus", "labels.json").read_text())["runs"]
    rng = random.Random(9)
    for name, label in labels.items():
        if label["verdict"] == "healthy":
            path = shared("corpus", "lab" if label["source"].startswith("lab") else "runs", f"{name}.jsonl")
            data = [(s, {k: v * (1 + rng.gauss(0, noise)) if isinstance(v, float) else v for k, v in d.items()})
                    for s, d in rows(path)]
            assert found(data) == [], name


@pytest.mark.parametrize("case", ["00_healthy_grpo", "00_healthy_ppo", "05_benign_loss_follows_kl", "09_value_scale",
                                  "21_resume_ok_replay"])
def test_other_cases_are_not_this(case: str) -> None:
    assert found(rows(shared("cases", "fixtures", f"{case}.jsonl"))) == []


@pytest.mark.parametrize("run", ["grpo-healthy", "ppo-healthy", "ppo-critic-swing", "rloo-advantage-explosion"])
def test_lab_runs_without_this_fault(run: str) -> None:
    assert found(rows(LAB / f"{run}.jsonl")) == []


def test_a_row_that_lacks_one_of_the_three_says_nothing_and_lambda_is_named() -> None:
    detector = VanishingPolicyGradient()
    detector.configured({"algorithm.lam": 0.95})
    assert detector.update(observation(1, {"policy_loss": 0.0, "score/mean": 0.5})) is None
    for step in range(80):
        verdict = detector.update(observation(step, {
            "policy_loss": -0.002, "kl_divergence/reference": 0.01 * 1.06**step, "score/mean": 0.5,
            "response_length_tokens/mean": 3000.0}))
    assert verdict is not None
    assert verdict.status is Status.WARNING
    assert "algorithm.lam 0.95" in verdict.reason
