"""Bounded streaming statistics.

Non-finite policy, the same for all: a value that is not finite is not taken in. It is never averaged, never
counted as a sample and never moves a baseline; whoever needs to know about it looks at the observation itself
(``non_finite`` does). That way a NaN cannot hide a later fault.

All windows are short (at most a few hundred values), so a sort per step costs microseconds.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

NAN = math.nan

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of a normal distribution times this is its standard deviation."""


def median(values: Sequence[float]) -> float:
    """Median; NaN of nothing."""
    if not values:
        return NAN
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])


def noise(values: Sequence[float]) -> float:
    """Robust standard deviation of a series about its own trend, from its step-to-step differences; NaN of fewer
    than two values. A trend inside the window does not count as noise."""
    steps = [abs(b - a) for a, b in pairwise(values)]
    return MAD_TO_SIGMA * median(steps) / math.sqrt(2)


class Baseline:
    """What is normal for this run: the last ``size`` values that were accepted as normal.

    ``offer`` keeps a value only while the caller calls it normal, so a fault cannot drag the baseline along:
    a slow fault is compared with the run before it. Sorted copy kept, so quantiles are O(1) to read.
    """

    __slots__ = ("_order", "_sorted", "accepted")

    def __init__(self, size: int) -> None:
        self._order: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []
        self.accepted = 0
        """Values ever accepted."""

    def offer(self, value: float, *, normal: bool = True) -> None:
        """Take ``value`` in if it is finite and normal."""
        if not normal or not math.isfinite(value):
            return
        if len(self._order) == self._order.maxlen:
            self._sorted.remove(self._order[0])
        self._order.append(value)
        insort(self._sorted, value)
        self.accepted += 1

    def __len__(self) -> int:
        return len(self._order)

    def quantile(self, q: float) -> float:
        """Quantile ``q`` in 0..1, nearest rank; NaN while empty."""
        return self._sorted[round(q * (len(self._sorted) - 1))] if self._sorted else NAN

    def median(self) -> float:
        """Median, nearest rank; NaN while empty."""
        return self.quantile(0.5)
