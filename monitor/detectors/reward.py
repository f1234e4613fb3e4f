"""The run's reward, as a second sign for detectors whose series alone does not tell learning from failing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from monitor.model import NAN
from monitor.stats import median, noise

MEAN, WITH_PENALTY = "score/mean", "reward/mean"
REWARD = (MEAN, WITH_PENALTY)
"""The mean reward per response; with the KL penalty taken off only where the score itself is not logged."""

_KEPT = 40
_ERROR_OF_MEDIAN = 1.25


class Reward:
    """The latest rewards, their noise, and how near they are to the best that can be reached.

    The noise comes from step-to-step differences, so a reward that climbs is not taken for a noisy one. Values that
    are not finite are left out.
    """

    __slots__ = ("_highest", "_lowest", "_means")

    def __init__(self) -> None:
        self._means: deque[float] = deque(maxlen=_KEPT)
        self._highest: deque[float] = deque(maxlen=_KEPT)
        self._lowest = math.inf

    def add(self, values: Mapping[str, float]) -> float:
        """Take in a row; returns its mean reward, NaN when it has none."""
        mean = values.get(MEAN, NAN)
        if mean != mean:
            mean = values.get(WITH_PENALTY, NAN)
            if mean != mean:
                return NAN
        self._means.append(mean)
        highest, lowest = values.get("score/max", NAN), values.get("score/min", NAN)
        if highest == highest:
            self._highest.append(highest)
        if lowest < self._lowest:
            self._lowest = lowest
        return mean

    def __len__(self) -> int:
        return len(self._means)

    def level(self, count: int = 10) -> float:
        """Median of the latest ``count`` rewards; NaN of none."""
        return median(list(self._means)[-count:])

    def sigma(self) -> float:
        """Noise of one step's mean reward; 0 while fewer than two are known."""
        sigma = noise(self._means)
        return sigma if sigma == sigma else 0.0

    def blur(self, first: int, second: int, errors: float = 1.0) -> float:
        """Difference of two medians, of ``first`` and ``second`` rewards, that is ``errors`` standard errors."""
        return errors * _ERROR_OF_MEDIAN * self.sigma() * math.sqrt(1 / first + 1 / second)

    def span(self) -> float:
        """From the worst score of all to the best of late; NaN when scores are not logged, 0 when all are equal."""
        if not self._highest or self._lowest == math.inf:
            return NAN
        # As many as the level has: in a run that learns within few steps the older ones are of another time.
        return median(list(self._highest)[-10:]) - self._lowest

    def position(self) -> float:
        """Where the latest rewards lie between the worst score (0) and the best (1); NaN when that is not known."""
        span = self.span()
        position = (self.level() - self._lowest) / span if span > 0 else NAN
        # A mean well above the largest score is no mean of these scores: the largest says nothing then.
        return position if position <= 1.25 else NAN


class Level:
    """Median of the latest five values, with what it was at first, at least and at most. Takes finite values only."""

    __slots__ = ("_recent", "first", "high", "latest_low", "low", "now")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=5)
        self.now = self.first = self.low = self.high = self.latest_low = NAN

    def add(self, value: float) -> None:
        """Take in a value; nothing is known before the fifth."""
        recent = self._recent
        recent.append(value)
        if len(recent) < 5:
            return
        ordered = sorted(recent)
        self.latest_low, now = ordered[0], ordered[2]
        self.now = now
        if self.first != self.first:
            self.first = self.low = self.high = now
        elif now < self.low:
            self.low = now
        elif now > self.high:
            self.high = now


def mean(values: Sequence[float]) -> float:
    """Mean of the values that are numbers; NaN of none."""
    numbers = [value for value in values if value == value]
    return sum(numbers) / len(numbers) if numbers else NAN
