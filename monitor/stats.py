"""Bounded streaming statistics.

Non-finite policy, the same for all: a value that is not finite is not taken in. It is never averaged, never
counted as a sample and never moves a baseline; whoever needs to know about it looks at the observation itself
(``non_finite`` does). That way a NaN cannot hide a later fault.

All windows are short (at most a few hundred values), so a sort per step costs microseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
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
        if not normal or not -math.inf < value < math.inf:
            return
        order, ranked = self._order, self._sorted
        if len(order) == order.maxlen:
            del ranked[bisect_left(ranked, order[0])]
        order.append(value)
        insort(ranked, value)
        self.accepted += 1

    def __len__(self) -> int:
        return len(self._order)

    def quantile(self, q: float) -> float:
        """Quantile ``q`` in 0..1, nearest rank; NaN while empty."""
        return self._sorted[round(q * (len(self._sorted) - 1))] if self._sorted else NAN

    def median(self) -> float:
        """Median, nearest rank; NaN while empty."""
        ranked = self._sorted
        return ranked[round(0.5 * (len(ranked) - 1))] if ranked else NAN


class Track:
    """A series' level now beside what was normal for it before.

    The level is the median of the last ``recent`` values, so a single value moves it little. A value becomes part of
    the normal ones when ``recent`` later ones have come, and only while the caller calls the time normal: a fault that
    is suspected cannot become the new normal. Values that are not finite are left out.
    """

    __slots__ = ("_base", "_full", "_recent", "_suspect", "first", "high", "level", "low", "seen", "usual")

    def __init__(self, recent: int = 5, memory: int = 100, warm: int = 10) -> None:
        self._recent: deque[float] = deque(maxlen=recent)
        self._full = recent
        self._base = Baseline(memory)
        self._suspect = warm
        self.seen = 0
        """Finite values so far."""
        self.level = NAN
        """Median of the latest values; NaN until there are ``recent``."""
        self.usual = NAN
        """Median of the normal values; NaN until there are ``warm``."""
        self.first = NAN
        """``usual`` when it was first known: the run's beginning. It stays."""
        self.low = self.high = NAN
        """Least and greatest level so far, from ``first`` on."""

    def add(self, value: float, *, normal: bool = True) -> None:
        """Take in a value; ``normal``: nothing was suspicious before it."""
        if not -math.inf < value < math.inf:
            return
        self.seen += 1
        recent, full = self._recent, self._full
        if self.seen > full:
            known = self.usual == self.usual
            if normal or not known:
                self._base.offer(recent[0])
                if known or len(self._base) >= self._suspect:
                    self.usual = self._base.median()
                    if not known:
                        self.first = self.low = self.high = self.usual
        recent.append(value)
        if self.seen >= full:
            self.level = level = sorted(recent)[full // 2]
            if level < self.low:
                self.low = level
            elif level > self.high:
                self.high = level

    @property
    def spread(self) -> float:
        """Robust standard deviation of the normal values, trend and all; NaN until ``usual`` is known."""
        if self.usual != self.usual:
            return NAN
        return (self._base.quantile(0.84) - self._base.quantile(0.16)) / 2

    @property
    def latest(self) -> tuple[float, ...]:
        """The latest values, oldest first."""
        return tuple(self._recent)
