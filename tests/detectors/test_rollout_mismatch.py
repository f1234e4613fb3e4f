"""rollout_mismatch: what is no number, what two other estimators say, noise about a limit, drifts at any pace."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from monitor.detectors.rollout_mismatch import RolloutMismatch
from tests.detectors.lone import Row, found
from tests.detectors.simulate import Wander

DIFFERENCE, VALID = "training/rollout_probs_diff_mean", "training/rollout_probs_diff_valid"
CORRELATION = "training/rollout_actor_probs_pearson_corr"


def made(steps: int, **series: Callable[[int], float]) -> list[Row]:
    return [(step, {key.replace("__", "/"): call(step) for key, call in series.items()})
            for step in range(1, steps + 1)]


def test_a_difference_that_could_not_be_computed_says_nothing() -> None:
    assert found(RolloutMismatch, [(s, {DIFFERENCE: 0.2, CORRELATION: 0.0, VALID: 0.0}) for s in range(1, 40)]) == []
    assert len(found(RolloutMismatch, [(s, {DIFFERENCE: 0.2, VALID: 1.0}) for s in range(1, 40)])) == 1


@pytest.mark.parametrize(("key", "value", "words"), [
    ("rollout_corr/k3_kl", 0.3, "KL of trainer to rollout engine is 0.3"),
    ("rollout_corr/ppl_ratio", 1.4, "perplexity ratio of trainer to rollout engine is 1.4"),
    ("rollout_corr/ppl_ratio", 0.7, "beyond 0.905"),
    (CORRELATION, 0.7, "correlation of the token probabilities is 0.7"),
])
def test_other_estimators_of_the_same(key: str, value: float, words: str) -> None:
    (incident,) = found(RolloutMismatch, [(s, {DIFFERENCE: 0.005, key: value}) for s in range(1, 30)])
    assert incident.raised_step == 5
    assert words in incident.reason


def test_the_correlation_of_near_constants_says_nothing() -> None:
    assert found(RolloutMismatch, [(s, {DIFFERENCE: 1e-4, CORRELATION: 0.2}) for s in range(1, 60)]) == []
    assert found(RolloutMismatch, [(s, {DIFFERENCE: 1e-4, CORRELATION: math.nan}) for s in range(1, 60)]) == []


def test_noise_about_a_limit_is_one_finding() -> None:
    random = Random(3)
    (incident,) = found(RolloutMismatch, made(200, rollout_corr__kl=lambda s: random.gauss(0.15, 0.04)))
    assert incident.ended == ""


def test_it_ends_when_the_engines_agree_again() -> None:
    (incident,) = found(RolloutMismatch, made(60, rollout_corr__kl=lambda s: 0.3 if s <= 20 else 0.001))
    assert incident.ended
    assert incident.last_step <= 25


@pytest.mark.parametrize("steps", [50, 200, 600])
def test_a_drift_of_the_difference_is_told_before_it_is_complete(steps: int) -> None:
    random = Random(1)

    def drift(step: int) -> float:
        return float(0.0035 * 10 ** min(1.0, max(0, step - 50) / steps) * math.exp(random.gauss(0, 0.15)))

    (incident,) = found(RolloutMismatch, made(50 + steps, training__rollout_probs_diff_mean=drift))
    assert 50 < incident.raised_step <= 50 + 0.75 * steps


def test_noise_of_any_kind_is_silent() -> None:
    random = Random(5)
    slow, quick = Wander(random, 0.95), Wander(random)

    def tail() -> float:
        return math.exp(0.25 * random.gauss(0, 1)) * (4.0 if random.random() < 0.01 else 1.0)

    data = made(
        10_000, rollout_corr__kl=lambda s: 0.02 * slow(), rollout_corr__k3_kl=lambda s: 0.012 * tail(),
        rollout_corr__chi2_token=lambda s: 0.2 * tail(), rollout_corr__ppl_ratio=lambda s: 1 + 0.02 * quick(),
        training__rollout_probs_diff_mean=lambda s: 0.003 * tail(),
        training__rollout_actor_probs_pearson_corr=lambda s: 0.995 - 0.005 * tail())
    assert found(RolloutMismatch, data) == []


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scaled_weights_are_a_mismatch_and_scaled_differences_only_upwards(scale: float) -> None:
    weights = found(RolloutMismatch, [(s, {"rollout_corr/rollout_is_mean": scale}) for s in range(1, 30)])
    assert len(weights) == 1
    assert len(found(RolloutMismatch, [(s, {DIFFERENCE: 0.003 * scale}) for s in range(1, 30)])) == int(scale > 1)
