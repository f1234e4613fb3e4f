"""How much of a change between two series is more than their noise: a block bootstrap in plain Python.

Steps are autocorrelated and their times have long tails, so neither a t-test nor independent resampling will do. The
method is the moving-block bootstrap of Künsch (Annals of Statistics 17, 1989), with blocks that go on from the end to
the beginning, so that the first and last steps weigh as much as the others (Politis and Romano, 1992). Both series are
resampled by the same blocks of steps: what moves both alike, such as responses that grow in training, then cancels.
Block length: the cube root of the number of steps, rounded up, which is the order of growth that is best for variances
(Hall, Horowitz and Jing, Biometrika 82, 1995), or longer where the difference of the two series stays correlated for
longer. Few blocks make the percentiles too narrow; they are widened by Student's quantile over the normal one, for as
many blocks as there are.

Measured: of 498 figures of 27 recorded runs, whose steps were dealt out to two halves (in turns of ABBA, so that a
trend falls on both), 6 % were called clear; of the step times, 1 of 25. Where neighbours are correlated by 0.8 it is
more: in simulated runs one in four with 30 steps, one in six with 60.

The interval is of the noise between steps. What another seed or another day would change it cannot know.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import chain
from operator import mul
from statistics import fmean
from typing import NamedTuple

from monitor.stats import NAN, median

LEAST_STEPS = 8
"""Fewer common steps have no interval: there would be three blocks or less."""

LEVEL = 0.90
ROUNDS = 1000
MOST_VALUES = 400
"""Longer series are pooled into so many batches of neighbours, for a thousand rounds of each figure take a second."""

FLOOR = 0.02
"""Least change that is called clear, as a share of the first run's figure. Machines differ by it from day to day."""

_SEED = 20240517
_NORMAL = 1.6449  # 95th percentile


def spread(values: Sequence[float]) -> float:
    """Half the width of the middle 68 %, which of a normal distribution is its standard deviation; NaN of nothing. A
    single wild step does not move it."""
    if not values:
        return NAN
    ordered = sorted(values)
    low, high = 0.1587 * (len(ordered) - 1), 0.8413 * (len(ordered) - 1)
    return (_at(ordered, high) - _at(ordered, low)) / 2


def _at(ordered: Sequence[float], place: float) -> float:
    index = int(place)
    rest = place - index
    return ordered[index] + rest * (ordered[index + 1] - ordered[index]) if rest else ordered[index]


class Statistic(str, Enum):
    """What is told of a series."""

    MEDIAN = "median"
    MEAN = "mean"
    SPREAD = "spread"
    HIGHEST = "highest"
    LAST = "last"

    def of(self, values: Sequence[float]) -> float:
        """The statistic of values in the order of their steps; NaN of nothing."""
        return _OF[self](values) if values else NAN


_OF: dict[Statistic, Callable[[Sequence[float]], float]] = {
    Statistic.MEDIAN: median, Statistic.MEAN: fmean, Statistic.SPREAD: spread, Statistic.HIGHEST: max,
    Statistic.LAST: lambda values: values[-1]}


UNSURE = frozenset({Statistic.HIGHEST, Statistic.LAST})
"""Statistics that hang on a single step, of which there is no telling how much is noise."""


class Change(NamedTuple):
    """From one series to another. ``relative``: ``change``, ``low`` and ``high`` are shares of ``a``; else they are in
    the series' unit, because ``a`` is too near to 0. ``low``, ``high``: the interval, NaN without one. ``clear``: it
    excludes 0 and the change is beyond the floor."""

    a: float
    b: float
    change: float
    low: float
    high: float
    relative: bool
    clear: bool


def compare(a: Sequence[float], b: Sequence[float], statistic: Statistic, *, paired: bool = True) -> Change:
    """The change of a statistic between two series of finite values, neither empty.

    ``paired``: the values at the same place are of the same step. Without it, with fewer than ``LEAST_STEPS`` values
    and for the statistics of ``UNSURE`` there is no interval.
    """
    of = statistic.of
    from_a, to_b = of(a), of(b)
    relative = from_a > 0 and (statistic is Statistic.SPREAD or min(a) > 0 or from_a > spread(a))
    change = to_b / from_a - 1 if relative else to_b - from_a
    low = high = NAN
    if paired and len(a) >= LEAST_STEPS and statistic not in UNSURE:
        low, high = _interval(a, b, statistic, change, relative)
        if statistic is Statistic.SPREAD or min(b) >= 0:  # then the figure cannot fall below 0
            low = max(low, -1.0 if relative else -from_a)
    floor = FLOOR if relative else FLOOR * max(abs(from_a), spread(a), spread(b))
    return Change(from_a, to_b, change, low, high, relative, (low > 0 or high < 0) and abs(change) > floor)


def _interval(a: Sequence[float], b: Sequence[float], statistic: Statistic, change: float,
              relative: bool) -> tuple[float, float]:
    pool = -(-len(a) // MOST_VALUES)
    if pool > 1:
        # The spread of batches is not that of steps: of each batch one step stands for it.
        pooled = _POOLED[statistic]
        a, b = ([pooled(x[i:i + pool]) for i in range(0, len(x), pool)] for x in (a, b))
    of = statistic.of
    n = len(a)
    length = block_length([y - x for x, y in zip(a, b, strict=True)])
    blocks = -(-n // length)
    around_a, around_b = [*a, *a[:length - 1]], [*b, *b[:length - 1]]
    pieces_a = [around_a[i:i + length] for i in range(n)]
    pieces_b = [around_b[i:i + length] for i in range(n)]
    chosen = random.Random(_SEED)  # the same report each time
    changes: list[float] = []
    for _ in range(ROUNDS):
        starts = chosen.choices(range(n), k=blocks)
        x = of(list(chain.from_iterable([pieces_a[i] for i in starts]))[:n])
        y = of(list(chain.from_iterable([pieces_b[i] for i in starts]))[:n])
        if relative and x <= 0:
            return NAN, NAN
        changes.append(y / x - 1 if relative else y - x)
    changes.sort()
    tail = (1 - LEVEL) / 2
    low, high = changes[round(tail * (ROUNDS - 1))], changes[round((1 - tail) * (ROUNDS - 1))]
    # About the change of all steps: batches, and few blocks, have a little another middle.
    middle, wider = median(changes), student(n / length - 1) / _NORMAL
    return change + wider * (low - middle), change + wider * (high - middle)


_POOLED: dict[Statistic, Callable[[Sequence[float]], float]] = {
    Statistic.MEDIAN: median, Statistic.MEAN: fmean, Statistic.SPREAD: lambda values: values[len(values) // 2]}


def block_length(values: Sequence[float]) -> int:
    """Steps of a block: the cube root of their number, or twice as long as the autocorrelation is beyond its noise (one
    standard error of white noise), at most a quarter of the series.

    The correlation is that of ranks, since a few slow steps would hide it.
    """
    n = len(values)
    least = math.ceil(math.pow(n, 1 / 3) - 1e-9)
    ordered = sorted(values)
    ranks = [(bisect_left(ordered, value) + bisect_right(ordered, value) - n) / 2 for value in values]
    limit = sum(map(mul, ranks, ranks)) / math.sqrt(n)
    lag = 1
    while lag < n // 4 and sum(map(mul, ranks, ranks[lag:])) > limit:
        lag += 1
    return max(least, min(2 * lag if lag > 1 else 1, n // 4))


def student(freedom: float) -> float:
    """95th percentile of Student's distribution: the first terms of the expansion in 1/freedom (Abramowitz and Stegun
    26.7.5). Six thousandths too small at 3 degrees of freedom."""
    z, f = _NORMAL, max(freedom, 1.0)
    return (z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3))
