"""Statistics: bounded, and deaf to what is not finite."""

from __future__ import annotations

import math
import pickle
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.stats import Baseline, Recent, median, quantile, sigma

FINITE = st.floats(-1e9, 1e9)


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_median_and_quantiles_agree_with_the_library(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values))
    assert quantile(values, 0.0) == min(values)
    assert quantile(values, 1.0) == max(values)
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values))


def test_nothing_gives_nan() -> None:
    assert all(math.isnan(x) for x in (median([]), quantile([], 0.5), sigma([]), Recent(3).median(),
                                       Baseline(3).median()))


def test_sigma_is_that_of_a_normal_distribution() -> None:
    normal = [statistics.NormalDist(5, 2).inv_cdf((i + 0.5) / 999) for i in range(999)]
    assert sigma(normal) == pytest.approx(2.0, rel=0.01)
    assert sigma([*normal, *[1e9] * 100]) < 3.0, "a tenth of outliers must not matter"


@given(st.lists(st.floats(), max_size=60))
def test_recent_holds_the_last_finite_values(values: list[float]) -> None:
    window = Recent(10)
    for value in values:
        assert window.push(value) == math.isfinite(value)
    finite = [v for v in values if math.isfinite(v)]
    assert list(window) == finite[-10:]
    assert window.last(3) == finite[-3:]
    assert window.seen == len(finite)


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
