"""Series made by the test: noise that must raise nothing, learning that is none of it a fault, and gentle faults."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest

from monitor.engine import Engine
from monitor.model import Incident, RawStep, Severity

Row = Mapping[str, object]
Maker = Callable[[int, random.Random], Row]


def row(rng: random.Random, *, kl: float = 0.01, reward: float = 0.5, **over: float) -> dict[str, float]:
    """A step of a PPO run that is well; noise as in recorded runs."""
    gauss = rng.gauss
    return {
        "actor/pg_loss": gauss(0, 0.01), "actor/kl_loss": abs(kl * (1 + gauss(0, 0.15))),
        "actor/ppo_kl": gauss(0, 0.0005), "actor/grad_norm": math.exp(gauss(0, 0.3)), "actor/entropy": 0.4,
        "critic/score/mean": reward + gauss(0, 0.03), "critic/score/max": 1.0,
        "critic/returns/max": 1.0 + gauss(0, 0.02), "critic/returns/min": gauss(-0.1, 0.02),
        "critic/values/max": 0.9 + gauss(0, 0.1), "critic/values/min": gauss(-0.1, 0.05),
        "critic/advantages/max": math.exp(gauss(1.2, 0.35)), "critic/advantages/min": -math.exp(gauss(1.2, 0.35)),
        "critic/vf_loss": 0.1 * math.exp(gauss(0, 0.35)), "timing_s/step": 60 * math.exp(gauss(0, 0.1)),
    } | {key.replace("__", "/"): value for key, value in over.items()}


def found(make: Maker, steps: int, seed: int) -> list[Incident]:
    engine, rng = Engine(), random.Random(seed)
    for step in range(1, steps + 1):
        engine.handle(RawStep("run", step, float(step), make(step, rng)))
    return list(engine.snapshot().runs[0].incidents)


def _spikes(key: str, rate: float, size: float) -> Maker:
    def make(_: int, rng: random.Random) -> Row:
        values = row(rng)
        if rng.random() < rate:
            values[key] = values[key] * size if size > 1 else size
        return values
    return make


HEALTHY: dict[str, tuple[Maker, int]] = {
    "noise": (lambda _, r: row(r), 3000),
    "a noisy value loss": (lambda _, r: row(r, critic__vf_loss=0.1 * math.exp(r.gauss(0, 0.8))), 1500),
    "spikes of the value loss": (_spikes("critic/vf_loss", 0.02, 30.0), 600),
    "spikes of the advantage": (_spikes("critic/advantages/max", 0.02, 40.0), 400),
    "spikes of the update KL": (_spikes("actor/ppo_kl", 0.01, 0.3), 600),
    "learning with a KL that grows to 1": (
        lambda s, r: row(r, kl=min(1.0, 0.001 * math.exp(s / 40)), reward=0.2 + 0.6 * (1 - math.exp(-s / 150))), 400),
    "a plateau after fast learning": (
        lambda s, r: row(r, kl=0.05 * math.log1p(s / 1.5), reward=0.3 + 0.5 * (1 - math.exp(-s / 8))), 300),
    "sparse rewards": (
        lambda _, r: row(r, critic__returns__max=float(r.random() < 0.2), critic__returns__min=0.0,
                         critic__values__max=abs(r.gauss(0.05, 0.02)), critic__values__min=0.0), 500),
    "values that grow with the reward": (
        lambda s, r: row(r, critic__values__max=min(1.0, 0.02 * 1.25**s), critic__values__min=0.0), 100),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_well_stays_silent(name: str) -> None:
    make, steps = HEALTHY[name]
    told = [incident for seed in range(5) for incident in found(make, steps, seed)]
    assert told == []


FAULTS: dict[str, tuple[Maker, int, str, Severity, int]] = {
    "KL 0.02 to 4.5 in 400 steps, exponential": (
        lambda s, r: row(r, kl=0.02 * 225 ** (s / 400)), 400, "kl_runaway", Severity.CRITICAL, 200),
    "KL 0.02 to 4.5 in 400 steps, linear": (
        lambda s, r: row(r, kl=0.02 + 4.48 * s / 400), 400, "kl_runaway", Severity.CRITICAL, 60),
    "KL grows after the reward has arrived": (
        lambda s, r: row(r, kl=0.02 * 225 ** (max(0, s - 100) / 400), reward=0.3 + 0.4 * min(1.0, s / 60)), 500,
        "kl_runaway", Severity.CRITICAL, 360),
    "single updates grow": (
        lambda s, r: row(r, actor__ppo_kl=0.0005 * 1000 ** min(1.0, max(0, s - 50) / 150) * math.exp(r.gauss(0, 0.4))),
        250, "kl_runaway", Severity.CRITICAL, 180),
    "value loss swings by 1.3 decades": (
        lambda s, r: row(r, critic__vf_loss=0.1 * (20 if s > 50 and s // 2 % 2 else 1) * math.exp(r.gauss(0, 0.2))),
        150, "critic_loss_oscillation", Severity.WARNING, 70),
    "value loss swings by five decades, as in the guide": (
        lambda s, r: row(r, critic__vf_loss=(1e3 if s % 4 < 2 else 1e-2) * math.exp(r.gauss(0, 0.5))), 60,
        "critic_loss_oscillation", Severity.CRITICAL, 20),
    "the advantage triples at each step": (
        lambda s, r: row(r, critic__advantages__max=math.exp(r.gauss(1.2, 0.35)) * 3.0 ** min(20, max(0, s - 60))), 100,
        "advantage_explosion", Severity.CRITICAL, 68),
}


ALONGSIDE = {"kl_runaway": ("vanishing_policy_gradient",)}
"""Detectors that may say the same in their own words, as a warning before it."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_in_time(name: str) -> None:
    make, steps, detector, severity, by = FAULTS[name]
    for seed in range(5):
        told = found(make, steps, seed)
        ours = [i for i in told if i.detector == detector]
        assert {i.detector for i in told} <= {detector, *ALONGSIDE.get(detector, ())}
        assert min(i.raised_step for i in ours) <= by
        assert severity in {i.severity for i in ours}


def test_a_fault_that_stays_is_one_incident() -> None:
    for name in ("KL 0.02 to 4.5 in 400 steps, linear", "the advantage triples at each step"):
        make, steps, *_ = FAULTS[name]
        assert len([i for i in found(make, steps, 0) if i.severity is Severity.CRITICAL]) == 1, name


def test_a_value_loss_beyond_all_measure_is_still_judged() -> None:
    told = found(lambda s, r: row(r, critic__vf_loss=1.7e308 if s % 2 else 1e-300), 20, 0)
    assert "critic_loss_oscillation" in {i.detector for i in told}
