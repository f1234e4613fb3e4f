"""Critic divergence: the value loss grows beyond what the returns account for, and does not come back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import MAD_TO_SIGMA, median, noise
from monitor.units import quantity

LOSS, EXPLAINED = "critic_loss", "value_explained_variance"
_RETURNS = ("return/max", "return/min", "return/mean")
_SCORES = ("score/max", "score/min", "score/mean")

_EVERY = 5  # values between two judgements
_SPAN = 10  # values whose median is a point
_POINTS = 40  # points remembered: 200 values
_TREND = 6  # points, ten values apart, that must rise where the growth is moderate
_CONFIRM = 2  # of three looks must find it, so no single step and no single window raises it
_HELD = 0.7  # of the growth that made a finding keeps it
_RISING = 0.7  # of the pairs of points
_SIGMAS, _SIGMAS_LOSS, _SIGMAS_ALONE = 5.0, 2.0, 7.0  # of points ten values apart: of the explained variance, of the
# loss beside it, and of the loss where explained variance is not logged
_OWN_SPREAD = 0.01  # of the squared scale: scores that tie in a batch have no spread, but the reward has one


@dataclass(frozen=True, kw_only=True)
class CriticDivergenceSettings(Settings):
    """Limits of ``critic_divergence``. Growth is that of the median loss of ten steps over its lowest in 200."""

    growth: float = setting(1.5, "ratio", "Growth of the value loss that is a warning when explained variance sinks.")
    explained_drop: float = setting(
        0.2, "ratio", "Fall of the explained variance, from its best since then, that counts as sinking.")
    explained_low: float = setting(
        0.1, "ratio", "It must also have come below this, or below the next share of its best.")
    explained_left: float = setting(0.4, "ratio", "Share of the best explained variance that is left when it counts.")
    growth_alone: float = setting(
        5.0, "ratio", "Growth that is a warning where explained variance is not logged; more where the loss is noisy.")
    growth_scaled: float = setting(3.0, "ratio", "The same, after division by the squared scale of the rewards.")
    growth_sudden: float = setting(10.0, "ratio", "Growth that needs no steady rise.")
    growth_critical: float = setting(20.0, "ratio", "Growth that is critical when the value error is large, too.")
    material_ratio: float = setting(
        0.01, "ratio", "Value error (root of twice the loss), as a share of the largest score or return, below which "
                       "nothing matters.")


SPEC = DetectorSpec(
    id="critic_divergence",
    title="Critic divergence",
    severity=Severity.CRITICAL,
    required=((LOSS,),),
    optional=(EXPLAINED, *_RETURNS, *_SCORES),
    wake="critic/vf_loss exists only in runs with a critic (algorithm.adv_estimator=gae). A run without a critic "
         "cannot have this failure.",
    meaning="The value loss rises far above its own level and stays there, by more than the returns' own spread "
            "explains: the critic's predictions get worse while training goes on.",
    impact="Advantages are differences to values that mean nothing. The policy is pushed by the critic's error; its "
           "own loss and the reward may still look like progress for a while.",
    diagnosis=(
        "Compare critic/vf_loss with critic/returns/max and critic/returns/mean: returns that drift away are a target "
        "that moves faster than the critic learns.",
        "critic/vf_explained_var below 0 is worse than a constant prediction; one that sinks says that this critic was "
        "better before.",
        "critic/values/max and /min beyond the range of critic/score/* mean that the values run away by themselves.",
        "critic/grad_norm and critic/vf_clipfrac: a clip fraction near 1 means that the critic may not follow.",
    ),
    actions=(
        "bring rewards to a scale near 1 in the reward function, or normalise them, so that returns do not drift",
        "lower critic.optim.lr when values run away; raise it, or critic.ppo_epochs, when returns outrun the critic",
        "check critic.grad_clip (1.0 by default) and critic.cliprange_value (0.5): returns larger than the clip range "
        "cannot be followed",
        "resume actor and critic from a checkpoint before the step named (trainer.resume_mode=resume_path, "
        "trainer.resume_from_path), with a few steps of trainer.critic_warmup",
    ),
    misses="A critic that is bad from the first step and stays so, growth by less than 1.5 times within 200 steps, "
           "and, where explained variance is not logged, growth below five times.",
    source="Relative to the run's own lowest level of 200 steps. Healthy critics more than triple their loss while "
           "the reward is learned, but their explained variance does not sink; public reports show losses that grow by "
           "two to eighteen decades while returns drift from 4 to 20 and explained variance falls from 0.5 below 0.",
    guide="3.2",
    panel=(LOSS, EXPLAINED),
    rise_steps=1,
    clear_steps=10,
    under=("non_finite", "advantage_explosion", "critic_loss_oscillation"),
)


class _Row(NamedTuple):
    loss: float
    explained: float  # NaN: not logged
    spread: float  # largest variance of scores of this range and mean; NaN: not known
    largest: float  # magnitude of a score or return; 0: not known
    returns: float  # typical size of the returns; 0: not known


class _Point(NamedTuple):
    loss: float  # first, so that the least point is the one of the least loss
    step: int
    low: float  # what seven of ten losses reach
    explained: float
    spread: float  # squared scale of the rewards; NaN: not known
    returns: float  # NaN: not known
    largest: float  # magnitude of a score or return


class CriticDivergence(Detector):
    """Median value loss of ten steps against its lowest in the last 200, judged every five steps.

    With explained variance, a loss 1.5 times its lowest counts when that share has sunk by 0.2 to near 0: a loss that
    grows because the returns vary more leaves it where it was. Without it, the loss must grow fivefold, threefold in
    units of the spread that scores of this mean and range can have, and steadily or tenfold. A fresh critic's loss
    falls, so it is no divergence however bad it is. A false alarm would send someone to tune a critic that learns.

    >>> from monitor.model import Observation
    >>> detector = CriticDivergence()
    >>> for step in range(80):
    ...     values = {"critic_loss": 0.1 * 1.1 ** step, "value_explained_variance": 0.6 - 0.05 * step}
    ...     verdict = detector.update(Observation("run", step, 0.0, values))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = CriticDivergenceSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(CriticDivergenceSettings, self._settings)
        self._seen = 0
        self._rows: deque[_Row] = deque(maxlen=_SPAN)
        self._points: deque[_Point] = deque(maxlen=_POINTS)
        self._found: tuple[_Point, float] | None = None  # what the loss has grown from, and the growth it took
        self._looks: deque[bool] = deque(maxlen=3)  # whether the latest looks found it
        self._verdict = Verdict(Status.WARMING)

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the value loss of the row."""
        values = observation.values
        loss = values.get(LOSS, NAN)
        if not 0.0 < loss < math.inf:  # NaN is non_finite's business
            return None
        self._seen += 1
        self._rows.append(_row(values, loss))
        if self._seen % _EVERY == 0:
            self._points.append(self._point(observation.step))
            self._verdict = self._judge(observation.step)
        return self._verdict

    def _point(self, step: int) -> _Point:
        rows = self._rows
        losses = sorted(row.loss for row in rows)
        known = [row.spread for row in rows if row.spread == row.spread]
        largest = max(row.largest for row in rows)
        spread = max(sum(known) / len(known) if known else largest**2, _OWN_SPREAD * largest**2)
        return _Point(median(losses), step, losses[3 * len(losses) // 10],
                      median([row.explained for row in rows if row.explained == row.explained]), spread or NAN,
                      median([row.returns for row in rows if row.returns > 0.0]), largest)

    def _judge(self, step: int) -> Verdict:
        points = list(self._points)
        now = points[-1]
        before = points[:-2]  # the windows of the last two overlap with the present one
        if not before:
            return Verdict(Status.WARMING, signal=LOSS, value=now.loss)
        base = min(before)
        growth = now.loss / base.loss
        needed = math.inf
        if growth >= self._s.growth and now.low >= base.loss * math.sqrt(growth):  # a swing comes back
            needed = self._needed(now, base, growth, points)
        self._looks.append(growth >= needed)
        if growth >= needed and sum(self._looks) >= _CONFIRM:
            self._found = (base, needed)
            return self._finding(now, base, growth, needed, step)
        if self._found is not None:
            base, needed = self._found
            if base in before and now.loss >= _HELD * needed * base.loss:
                return self._finding(now, base, now.loss / base.loss, needed, step)
            self._found = None
        return Verdict(Status.OK, score=min(0.99, growth / self._s.growth_alone), signal=LOSS, value=now.loss,
                       threshold=base.loss * self._s.growth_alone)

    def _needed(self, now: _Point, base: _Point, growth: float, points: Sequence[_Point]) -> float:
        """Growth of the loss that is a finding under these circumstances; infinite where none is."""
        s = self._s
        error = math.sqrt(2.0 * now.loss)
        scale = math.sqrt(now.spread)
        if error < s.material_ratio * now.largest:
            return math.inf
        trail = points[::-2][::-1]  # windows that do not overlap
        logs = [math.log(p.loss) for p in trail]
        scaled = growth * base.spread / now.spread
        scaled = scaled if scaled == scaled else growth
        steady = growth >= s.growth_sudden or _rising(logs[-_TREND:])
        if now.explained == now.explained:
            since = points[points.index(base):]
            shares = [-p.explained for p in since[::-2][::-1] if p.explained == p.explained]
            best = max(p.explained for p in since if p.explained == p.explained)
            drop = best - now.explained
            sunk = drop >= max(s.explained_drop, _SIGMAS * _wander(shares)) and _rising(shares[-_TREND:])
            if steady and sunk and now.explained < max(s.explained_low, s.explained_left * best):
                few = len(shares) < 4  # points in order, by chance
                return max(s.growth_alone if few else s.growth, math.exp(min(_SIGMAS_LOSS * _wander(logs), 50.0)))
            # An explained variance that stays put beside an error beyond all rewards tells of something else.
            beyond = scaled >= s.growth_sudden and error > 2.0 * scale
            return s.growth_sudden if beyond else math.inf
        if scaled < s.growth_scaled or not steady:
            return math.inf
        return max(s.growth_alone, math.exp(min(_SIGMAS_ALONE * _wander(logs), 50.0)))

    def _finding(self, now: _Point, base: _Point, growth: float, needed: float, step: int) -> Verdict:
        error, scale = math.sqrt(2.0 * now.loss), math.sqrt(now.spread)
        bad = now.explained <= -1.0 or (now.explained != now.explained and error > scale) or error > 2.0 * scale
        critical = growth >= self._s.growth_critical and bad
        since = min(base.step, step)
        told = f"Value loss rose from {quantity(base.loss)} to {quantity(now.loss)}, {growth:.3g} times, since step " \
               f"{since}"
        if now.explained == now.explained and base.explained == base.explained:
            told += f", explained variance went from {base.explained:.2g} to {now.explained:.2g}"
        if now.returns == now.returns and base.returns == base.returns:
            drift = now.returns / base.returns
            told += f", the scale of returns {'drifted' if not 0.67 < drift < 1.5 else 'went'} from " \
                    f"{quantity(base.returns)} to {quantity(now.returns)}"
        return Verdict(
            Status.CRITICAL if critical else Status.WARNING, score=max(1.0, growth / needed), since_step=since,
            reason=f"{told}: the critic gets worse, and the advantages with it.",
            signal=LOSS, value=now.loss, threshold=needed * base.loss,
            evidence={"growth": growth, "loss_before": base.loss, "explained_variance": now.explained,
                      "explained_variance_before": base.explained, "return_scale": now.returns,
                      "return_scale_before": base.returns})


def _rising(values: Sequence[float]) -> bool:
    """Whether most pairs rise: a drift, no wandering. Two or three values in order are taken for one."""
    pairs = [b > a for i, a in enumerate(values) for b in values[i + 1:]]
    return sum(pairs) >= _RISING * len(pairs)


def _wander(values: Sequence[float]) -> float:
    """How much points differ by noise, from how they bend: a trend does not bend. None where each is higher than the
    one before."""
    if all(b > a for a, b in pairwise(values[-_TREND:])):
        return 0.0
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return MAD_TO_SIGMA * median(bends) / math.sqrt(6) if bends else noise(values)


def _row(values: Mapping[str, float], loss: float) -> _Row:
    get = values.get
    score_high, score_low, score = get("score/max", NAN), get("score/min", NAN), get("score/mean", NAN)
    high, low, mean = get("return/max", NAN), get("return/min", NAN), get("return/mean", NAN)
    spread = (score_high - score) * (score - score_low)
    if spread != spread:
        spread = (high - mean) * (mean - low)
    largest = 0.0
    for value in (score_high, score_low, score, high, low, mean):
        if abs(value) > largest:  # false for NaN
            largest = abs(value)
    returns = abs(mean) if mean == mean else abs(high) if high == high else 0.0
    return _Row(loss, values.get(EXPLAINED, NAN), spread, largest, returns)
