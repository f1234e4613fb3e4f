"""Ways of being well that look like a failure to somebody: all detectors together stay silent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random

import pytest

from tests.detectors.simulate import Row, Wander, healthy
from tests.detectors.test_gentle import incidents

Rows = Iterable[tuple[int, Row]]
_REWARD = ("critic/score/mean", "critic/rewards/mean", "critic/returns/mean")
_LENGTH = ("response_length/mean", "response_length/max", "perf/total_num_tokens", "timing_s/gen")


def _numbered(seed: int, steps: int, **options: bool) -> list[tuple[int, Row]]:
    rows = healthy(seed, steps, critic=options.get("critic", True), learns=options.get("learns", True))
    return list(enumerate(rows, 1))


def _set(row: Row, keys: Iterable[str], value: float) -> None:
    row.update(dict.fromkeys(keys, value))


def _times(row: Row, keys: Iterable[str], factor: float) -> None:
    for key in keys:
        row[key] *= factor
    row["timing_s/step"] = row["timing_s/gen"] + 14.0


def first_steps_are_wild(seed: int) -> Rows:
    """Learning-rate warm-up and a fresh critic."""
    for step, row in _numbered(seed, 300):
        row["actor/grad_norm"] *= 1 + 12 * math.exp(-step / 8)
        row["critic/vf_loss"] *= 1 + 200 * math.exp(-step / 6)
        row["critic/grad_norm"] *= 1 + 60 * math.exp(-step / 6)
        row["critic/vf_explained_var"] -= 8 * math.exp(-step / 6)
        yield step, row


def late_breakthrough(seed: int) -> Rows:
    """Nothing for 200 steps, then the reward jumps; entropy falls and answers grow with it."""
    random = Random(seed)
    for step, row in _numbered(seed, 400, learns=False):
        learned = 1 / (1 + math.exp(-(step - 200) / 12))
        _set(row, (*_REWARD, "critic/values/mean"), max(0.0, 0.02 + 0.7 * learned + random.gauss(0, 0.01)))
        row["actor/entropy"] *= 1 - 0.6 * learned
        row["actor/kl_loss"] = 0.002 + 0.1 * learned
        _times(row, _LENGTH, 1 + 0.5 * learned)
        yield step, row


def reasoning_grows(seed: int) -> Rows:
    """Answers grow to 2.8 times over 700 steps while the reward climbs."""
    for step, row in _numbered(seed, 800):
        _times(row, _LENGTH, 1 + 1.8 * min(1.0, step / 700))
        row["response_length/clip_ratio"] = 0.02 + 0.06 * min(1.0, step / 700)
        yield step, row


def clip_higher(seed: int) -> Rows:
    """Entropy and the KL of updates rise while the reward does."""
    random = Random(seed)
    for step, row in _numbered(seed, 400, critic=False):
        row["actor/entropy"] = 0.4 * (1 + 0.6 * min(1.0, step / 200)) * math.exp(random.gauss(0, 0.04))
        row["actor/ppo_kl"] *= 1 + 10 * min(1.0, step / 300)
        yield step, row


def noisy_lengths(seed: int) -> Rows:
    """A small batch of answers of very different length."""
    wander = Wander(Random(seed), 0.7)
    for step, row in _numbered(seed, 500):
        _times(row, _LENGTH, math.exp(0.22 * wander()))
        yield step, row


def resumed(seed: int) -> Rows:
    """Twenty steps are taken again after a crash."""
    rows = _numbered(seed, 260)
    return [*rows[:150], *((step - 20, row) for step, row in rows[150:])]


def several_rows_a_step(seed: int) -> Rows:
    """An asynchronous trainer logs timings and losses apart."""
    for step, row in _numbered(seed, 300):
        first = {key: value for key, value in row.items() if key.startswith(("timing", "perf", "response"))}
        yield step, first
        yield step, {key: value for key, value in row.items() if key not in first}


def harder_data(seed: int) -> Rows:
    """The next stage of a curriculum costs 15 % of the reward and makes answers longer."""
    for step, row in _numbered(seed, 600):
        if step > 300:
            for key in _REWARD:
                row[key] *= 0.85
            _times(row, _LENGTH, 1.3)
            row["actor/entropy"] *= 1.15
        yield step, row


def rare_success(seed: int) -> Rows:
    """One answer in seventy is right, and in some batches none."""
    random = Random(seed)
    for step, row in _numbered(seed, 400, learns=False):
        mean = 0.0 if random.random() < 0.1 else max(0.0, random.gauss(0.015, 0.008))
        _set(row, _REWARD, mean)
        if mean == 0.0:
            _set(row, ("critic/score/max", "critic/rewards/max"), 0.0)
        yield step, row


def few_metrics(seed: int) -> Rows:
    """A trainer that logs next to nothing."""
    kept = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "timing_s/step", "actor/entropy")
    return [(step, {key: row[key] for key in kept}) for step, row in _numbered(seed, 400)]


def ties_at_the_ceiling(seed: int) -> Rows:
    """Most batches are solved whole: no advantage, no gradient."""
    random = Random(seed)
    for step, row in _numbered(seed, 300, critic=False):
        mean = min(1.0, 0.5 + 0.6 * (1 - math.exp(-step / 40)) + random.gauss(0, 0.005))
        if step > 90 and random.random() < 0.6:
            mean = 1.0
            _set(row, [key for key in row if "advantages" in key], 0.0)
            _set(row, ("actor/grad_norm", "actor/pg_loss"), 0.0)
            row["critic/score/min"] = 1.0
        _set(row, _REWARD, mean)
        row["actor/entropy"] *= 0.2 + 0.8 * math.exp(-step / 40)
        yield step, row


WELL: tuple[Callable[[int], Rows], ...] = (
    first_steps_are_wild, late_breakthrough, reasoning_grows, clip_higher, noisy_lengths, resumed, several_rows_a_step,
    harder_data, rare_success, few_metrics, ties_at_the_ceiling)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("run", WELL, ids=lambda run: run.__name__)
def test_what_is_well_stays_silent(run: Callable[[int], Rows], seed: int) -> None:
    assert incidents(run(seed)) == ()
