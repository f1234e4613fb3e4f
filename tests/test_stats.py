"""Statistics: bounded, and deaf to what is not finite."""

from __future__ import annotations

import math
import pickle
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.stats import NAN, Baseline, Track, median, noise

FINITE = st.floats(-1e9, 1e9)


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_the_median_agrees_with_the_library(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values))


def test_nothing_gives_nan() -> None:
    assert all(math.isnan(x) for x in (median([]), noise([]), noise([1.0]), Baseline(3).median()))


def test_noise_is_the_standard_deviation_about_a_trend() -> None:
    rng = random.Random(1)
    normal = [rng.gauss(5, 2) for _ in range(5000)]
    assert noise(normal) == pytest.approx(2.0, rel=0.05)
    assert noise([value + 0.5 * step for step, value in enumerate(normal)]) == pytest.approx(2.0, rel=0.1)
    assert noise([1e9 if step % 20 == 0 else value for step, value in enumerate(normal)]) < 2.6, "outliers hardly count"


@given(st.lists(st.floats(), max_size=80))
def test_baseline_quantiles_are_those_of_its_values(values: list[float]) -> None:
    baseline = Baseline(16)
    for value in values:
        baseline.offer(value)
    kept = sorted([v for v in values if math.isfinite(v)][-16:])
    assert len(baseline) == len(kept)
    if kept:
        assert baseline.quantile(0.0) == kept[0]
        assert baseline.quantile(1.0) == kept[-1]
        assert baseline.median() in kept


def test_baseline_does_not_take_in_a_fault() -> None:
    baseline = Baseline(50)
    for _ in range(50):
        baseline.offer(1.0)
    for _ in range(500):
        baseline.offer(100.0, normal=False)
    assert baseline.median() == 1.0
    assert pickle.loads(pickle.dumps(baseline)).median() == 1.0


def test_a_track_knows_its_level_and_what_was_usual_before() -> None:
    track = Track(recent=3, memory=10, warm=4)
    for value in (1.0, 2.0, 3.0, NAN, math.inf):
        track.add(value)
    assert (track.seen, track.level) == (3, 2.0)
    assert track.usual != track.usual
    for value in (4.0, 5.0, 6.0, 7.0):
        track.add(value)
    assert (track.level, track.usual, track.first, track.latest) == (6.0, 3.0, 3.0, (5.0, 6.0, 7.0))
    assert (track.low, track.high) == (3.0, 6.0)
    for value in (100.0,) * 20:
        track.add(value, normal=False)
    assert (track.level, track.usual, track.first) == (100.0, 3.0, 3.0), "a fault does not become the new normal"
    for value in (0.5,) * 20:
        track.add(value)
    assert (track.level, track.usual, track.first, track.low, track.high) == (0.5, 0.5, 3.0, 0.5, 100.0)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60), st.integers(1, 7))
def test_a_track_equals_its_definition(values: list[float], recent: int) -> None:
    track = Track(recent=recent, memory=1000, warm=3)
    for value in values:
        track.add(value)
    finite = [value for value in values if math.isfinite(value)]
    assert track.seen == len(finite)
    assert track.latest == tuple(finite[-recent:])
    if len(finite) >= recent:
        assert track.level == sorted(finite[-recent:])[recent // 2]
    before = sorted(finite[:-recent] if len(finite) > recent else [])
    assert track.usual == before[round(0.5 * (len(before) - 1))] if len(before) >= 3 else track.usual != track.usual
