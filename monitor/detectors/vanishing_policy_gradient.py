"""Vanishing policy gradient: the policy loss is pinned near zero while the policy drifts and learns nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple, cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import median
from monitor.units import Unit, quantity
from monitor.verl_config import Value

LOSS, REFERENCE, UPDATE = "policy_loss", "kl_divergence/reference", "kl_divergence/update"
REWARD, LENGTH = "score/mean", "response_length_tokens/mean"
_ADVANTAGES = ("advantage/max", "advantage/min")
_SCORES = ("score/max", "score/min")

_EVERY = 5  # rows between two judgements
_NEW = 1.5  # times the highest level before the climb
_LOOKS = 3  # that a drift must last: as many as ``rise_steps`` needs
_HELD = 3.0  # times the gain that acquits: a drift that has been found is not dropped for noise
_LEARNED = 3.0  # standard errors of the reward since the run's beginning
_SMOOTH = 5  # rows whose median is the level of the KL
_LOOKBACK = (20, 30, 40, 60, 80, 110, 140)
_COMPARE = 30  # rewards compared at either end, at most
_WHAT = {REFERENCE: "KL to the reference", UPDATE: "KL of single updates"}
_RANGE = 0.1  # of the range of scores: a mean near zero is no small scale
_EARLY = 10  # rows that tell the early size of the loss


@dataclass(frozen=True, kw_only=True)
class VanishingPolicyGradientSettings(Settings):
    """Limits of ``vanishing_policy_gradient``. KL values are nats per token."""

    pinned_advantage: float = setting(
        0.01, "ratio", "Policy loss, as a share of the largest advantage, below which it is pinned.")
    advantage_cap: float = setting(
        2.0, "advantage", "Largest advantage that counts for this: single tokens of a whitened batch reach ten.")
    pinned_early: float = setting(0.1, "ratio", "The same as a share of the run's own early policy loss.")
    growth: float = setting(3.0, "ratio", "Growth of the KL over the steps looked back that is climbing.")
    floor_nats: float = setting(0.1, "nats", "Reference KL below this says nothing.")
    update_floor_nats: float = setting(0.02, "nats", "The same for the KL of single updates.")
    reward_sigmas: float = setting(
        1.25, "sigmas", "Gain of the reward, in standard errors, from which on the run is taken to learn.")
    learned: float = setting(
        3.0, "ratio", "Factor on these floors for a run whose reward has risen since its beginning: learning costs "
                      "KL. Its reward must have fallen since.")
    reward_blur: float = setting(
        0.1, "ratio", "Gain that noise would hide, over the reward's scale, from which on nothing can be said of it.")


SPEC = DetectorSpec(
    id="vanishing_policy_gradient",
    title="Vanishing policy gradient",
    severity=Severity.WARNING,
    required=((LOSS,), (REFERENCE, UPDATE), (REWARD,)),
    optional=(REFERENCE, UPDATE, *_ADVANTAGES, LENGTH),
    wake="actor/pg_loss and critic/score/mean are always logged; for the KL to the reference set "
         "actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True.",
    meaning="The policy loss stays near zero and the reward does not move, but the policy keeps moving away from its "
            "reference: the advantages carry no direction, and what moves the policy is noise.",
    impact="The run costs as much as one that learns and slowly destroys the model; the loss curve looks converged.",
    diagnosis=(
        "Compare response_length/mean with algorithm.lam: with 0.95 the advantage of a token more than a hundred "
        "tokens before the end is all but gone, so beyond 2048 tokens only the last few learn.",
        "critic/vf_explained_var near 0: the critic predicts nothing, so the advantages are the reward's noise.",
        "critic/score/max and /min: does the reward tell good answers from bad ones at all? Score some by hand.",
        "actor/entropy that falls along with it means that the policy is wandering into one kind of answer.",
    ),
    actions=(
        "set algorithm.lam for the length of the responses: 0.6 to 0.75 was reported to help beyond 2048 tokens, and "
        "1.0 (verl's default) loses nothing along a response",
        "limit the response length (data.max_response_length) while the signal is weak",
        "check the reward function (reward.custom_reward_function.path): a reward that does not depend on the answer "
        "looks just like this",
        "hold the policy to its reference until then: actor_rollout_ref.actor.use_kl_loss=True with a larger "
        "actor_rollout_ref.actor.kl_loss_coef, and a lower actor_rollout_ref.actor.optim.lr",
    ),
    misses="The first 25 steps, a reference KL below 0.1 nats or one that takes more than 140 steps to triple, and "
           "runs that log no reward. An on-policy loss is near zero in health, too: KL and reward decide.",
    source="A failing 7B run held its policy loss at -0.002 while KL climbed to 12. Runs with a random reward reached "
           "0.2 to 2.7 nats with a loss below 0.005 of the largest advantage; learning runs pass 0.1 nats with a "
           "reward that has clearly risen.",
    guide="3.1",
    panel=(LOSS, REFERENCE, REWARD),
    rise_steps=2 * _EVERY + 1,
    clear_steps=10,
    under=("non_finite", "no_learning_signal", "kl_runaway"),
)


class _Row(NamedTuple):
    step: int
    loss: float
    reference: float
    update: float
    reward: float
    advantage: float
    scale: float  # of the reward
    length: float


class _Drift(NamedTuple):
    """A climb of the KL without gain: its series, first step and level there, the reward there and how many values told
    it, the highest level since, the number of looks that found it."""

    series: str
    step: int
    before: float
    reward: float
    peak: float
    width: int
    looks: int


class VanishingPolicyGradient(Detector):
    """Three things at once, judged every five steps: policy loss pinned near zero, KL tripled, reward not moved.

    Pinned is below a hundredth of the largest advantage, or a tenth of the run's own early loss. The reward is compared
    over the steps in which the KL tripled, with windows long enough that a gain of 1.25 standard errors is seen. Group-
    relative losses are near zero in health, which is why a rising reward acquits. A false alarm would have someone
    search for a fault in a run that is only slow.

    >>> from monitor.model import Observation
    >>> detector = VanishingPolicyGradient()
    >>> for step in range(80):
    ...     values = {"policy_loss": -0.002, "kl_divergence/reference": 0.01 * 1.06 ** step, "score/mean": 0.5}
    ...     verdict = detector.update(Observation("run", step, 0.0, values))
    >>> verdict.status.name
    'WARNING'
    """

    spec = SPEC
    settings_type = VanishingPolicyGradientSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(VanishingPolicyGradientSettings, self._settings)
        self._seen = 0
        self._rows: deque[_Row] = deque(maxlen=_LOOKBACK[-1] + _COMPARE)
        self._early: list[float] = []  # sizes of the first losses
        self._first: list[float] = []  # the first rewards
        self._levels: deque[tuple[float, float]] = deque(maxlen=_LOOKBACK[-1] // _EVERY + 2)  # of both KLs
        self._high = [0.0, 0.0]  # highest that has left ``_levels``
        self._lam = NAN
        self._drift: _Drift | None = None
        self._verdict = Verdict(Status.WARMING)

    def configured(self, config: Mapping[str, Value]) -> None:
        """The run's lambda is worth a word in the reason."""
        lam = config.get("algorithm.lam")
        if isinstance(lam, (int, float)):
            self._lam = float(lam)

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the row; a row without any of the three says nothing."""
        values = observation.values
        loss, reward = values.get(LOSS, NAN), values.get(REWARD, NAN)
        reference, update = values.get(REFERENCE, NAN), values.get(UPDATE, NAN)
        if loss != loss or reward != reward or (reference != reference and update != update):
            return None
        if len(self._early) < _EARLY:
            self._early.append(abs(loss))
            self._first.append(reward)
        advantage = max(values.get(_ADVANTAGES[0], NAN), -values.get(_ADVANTAGES[1], NAN))
        self._rows.append(_Row(observation.step, abs(loss), abs(reference), abs(update), reward, advantage,
                               max(abs(reward), _RANGE * (values.get(_SCORES[0], NAN) - values.get(_SCORES[1], NAN))),
                               values.get(LENGTH, NAN)))
        self._seen += 1
        if self._seen % _EVERY == 0:
            self._verdict = self._judge()
        return self._verdict

    def _judge(self) -> Verdict:
        rows = list(self._rows)
        reference, update = _level(rows, 2, len(rows)), _level(rows, 3, len(rows))
        if len(self._levels) == self._levels.maxlen:
            self._high = [max(high, left) for high, left in zip(self._high, self._levels[0], strict=True)]
        self._levels.append((reference if reference == reference else 0.0, update if update == update else 0.0))
        kinds = [kind for kind in ((REFERENCE, 2, self._s.floor_nats, reference),
                                   (UPDATE, 3, self._s.update_floor_nats, update)) if kind[3] == kind[3]]
        if len(rows) < _LOOKBACK[0] + _SMOOTH or not kinds:
            return Verdict(Status.WARMING)
        series, column, floor, level = max(kinds, key=lambda kind: kind[3] / kind[2])
        learned = level >= floor and self._drift is None and self._learned(rows)
        floor *= self._s.learned if learned else 1.0
        drift = None
        if level >= floor and self._pinned(rows):
            sigmas = 0.0 if learned else self._s.reward_sigmas
            drift = self._held(rows, series, level) or self._climb(rows, series, column, level, sigmas)
        self._drift = drift
        if drift is not None:
            return self._finding(rows, drift, level, floor)
        return Verdict(Status.OK, score=min(0.99, level / floor), signal=series, value=level, threshold=floor)

    def _learned(self, rows: list[_Row]) -> bool:
        now = [row.reward for row in rows[-2 * _EARLY:]]
        error = _sigma([row.reward for row in rows]) * math.sqrt(1.0 / len(now) + 1.0 / len(self._first))
        return fmean(now) - fmean(self._first) > _LEARNED * error

    def _pinned(self, rows: list[_Row]) -> bool:
        recent = rows[-15:]
        loss = median([row.loss for row in recent])
        known = [row.advantage for row in recent if row.advantage == row.advantage]
        scale = min(median(known), self._s.advantage_cap) if known else 1.0
        return loss <= max(self._s.pinned_advantage * scale, self._s.pinned_early * median(self._early))

    def _climb(self, rows: list[_Row], series: str, column: int, level: float,
               sigmas: float) -> _Drift | None:
        """A KL that has tripled over the shortest of the lookbacks in which it did, without gain in reward."""
        for lookback in _LOOKBACK:
            start = len(rows) - lookback
            if start < _SMOOTH:
                return None
            before = _level(rows, column, start)
            if before == before and level >= self._s.growth * before and self._new(rows, column, start, level):
                count = min(max(12, lookback // 2), _COMPARE)
                then = [row.reward for row in rows[max(0, start - count // 2):start + (count + 1) // 2]]
                drift = _Drift(series, rows[start].step, before, fmean(then), level, len(then), 1)
                blur = 2.0 * _error(rows, drift)
                if blur <= self._s.reward_blur * median([row.scale for row in rows[-len(then):]]) \
                        and _gain(rows, drift) <= sigmas:
                    return drift
        return None

    def _new(self, rows: list[_Row], column: int, start: int, level: float) -> bool:
        """Whether the KL has climbed to where it has not been before, by one way: the KL of a policy that has settled
        wanders to and fro."""
        earlier = len(self._levels) - 1 - (len(rows) - start) // _EVERY
        highest = max((levels[column - 2] for levels in list(self._levels)[:max(earlier, 0)]), default=0.0)
        ends = [start + (len(rows) - start) * i // 4 for i in range(5)]
        levels = [_level(rows, column, end) for end in ends]
        pairs = [b > a for i, a in enumerate(levels) for b in levels[i + 1:]]
        return sum(pairs) >= 8 and level >= _NEW * max(highest, self._high[column - 2])

    def _held(self, rows: list[_Row], series: str, level: float) -> _Drift | None:
        """The drift found before, while the KL has not come back and the reward has not risen after all."""
        drift = self._drift
        if drift is None or drift.series != series or level < 0.5 * drift.peak:
            return None
        if _gain(rows, drift) > (_HELD if drift.looks >= _LOOKS else 1.0) * self._s.reward_sigmas:
            return None
        return drift._replace(peak=max(drift.peak, level), looks=drift.looks + 1)

    def _finding(self, rows: list[_Row], drift: _Drift, level: float, floor: float) -> Verdict:
        last = rows[-1]
        loss, gain = median([row.loss for row in rows[-15:]]), _now(rows, drift) - drift.reward
        lam = f", algorithm.lam {self._lam:g}" if self._lam == self._lam else ""
        length = f" (responses of {quantity(last.length, Unit.TOKENS)}{lam})" if last.length == last.length else ""
        since = min(drift.step, last.step)
        return Verdict(
            Status.WARNING, score=max(1.0, level / floor), since_step=since,
            reason=f"Policy loss is pinned near zero (median {loss:.2g}) while {_WHAT[drift.series]} grew from "
                   f"{quantity(drift.before, Unit.NATS)} to {quantity(level, Unit.NATS)} since step {since} and the "
                   f"reward did not rise ({gain:+.2g}){length}: the advantages give the policy no direction.",
            signal=drift.series, value=level, threshold=max(floor, self._s.growth * drift.before),
            evidence={"policy_loss": loss, "kl": level, "kl_before": drift.before, "reward_gain": gain,
                      "response_length": last.length})


def _now(rows: list[_Row], drift: _Drift) -> float:
    return fmean(row.reward for row in rows[-drift.width:])


def _gain(rows: list[_Row], drift: _Drift) -> float:
    """Gain of the reward since the drift began, in standard errors."""
    return (_now(rows, drift) - drift.reward) / max(_error(rows, drift), 1e-9)


def _error(rows: list[_Row], drift: _Drift) -> float:
    """Standard error of the difference of two means of the reward, from its differences from step to step."""
    return _sigma([row.reward for row in rows[-4 * drift.width:]]) * math.sqrt(2.0 / drift.width)


def _sigma(rewards: list[float]) -> float:
    """Standard deviation about the trend. Rewards are means over a batch, hence close to normal: the mean difference
    says more than the median one."""
    return fmean(abs(b - a) for a, b in pairwise(rewards)) / 1.128


def _level(rows: list[_Row], column: int, end: int) -> float:
    """Median KL of the rows before ``end``; NaN where none was logged."""
    known = [row[column] for row in rows[max(0, end - _SMOOTH):end] if row[column] == row[column]]
    return median(known)
