"""Reward collapse: the reward falls back for good from a level that it had reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import MAD_TO_SIGMA, Track
from monitor.units import quantity

_SERIES = (("score/mean", "score/min"), ("reward/mean", "reward/min"))
_FOLLOW = 0.05  # weight of a batch in the mean of worst answers
_SWING = 20  # steps over which the level's downward moves are measured
_DELAY = 15  # steps before such a move counts as normal: a collapse is told by then
_SWINGS = 20  # moves from which on a run knows its swings
_MEASURE = 8  # steps between two looks at noise and swings, which change slowly
_RECOVERED = 0.25  # a fall of which no more than this is left was none for good


@dataclass(frozen=True, kw_only=True)
class RewardCollapseSettings(Settings):
    """Limits of ``reward_collapse``. The scale is the distance from the usual worst answer to the best level."""

    gain_lost_warning: float = setting(0.5, "ratio", "Share of the reward's gain that is lost, a warning.")
    gain_lost_critical: float = setting(0.8, "ratio", "Share of the reward's gain that is lost, critical.")
    scale_warning: float = setting(
        0.25, "ratio", "The fall must also reach this share of the scale: harder data cost 10 to 20 %.")
    scale_no_gain: float = setting(
        0.45, "ratio", "Share of the scale that a run must lose which never made a gain worth the name.")
    scale_critical: float = setting(0.6, "ratio", "Share of the scale that is critical.")
    noise_factor: float = setting(3.0, "ratio", "The fall must be this many times the reward's own noise.")
    swing_factor: float = setting(
        2.5, "ratio", "The fall must be this many times what the level at times loses within 20 steps.")
    earlier_factor: float = setting(
        1.5, "ratio", "The fall must be this many times the deepest one from which the run has recovered.")
    quick_steps: float = setting(
        3.0, "steps", "Consecutive steps at which a fall far outside noise and swings must be seen.")
    slow_steps: float = setting(
        20.0, "steps", "The same of a fall that is only a few times noise and swings.")
    quick_factor: float = setting(
        2.0, "ratio", "How far outside its limits by noise and swings a fall is told quickly.")
    half_steps: float = setting(
        6.0, "steps", "Consecutive steps for which at least half of the fall must have lasted: a dip is none for good.")
    early_factor: float = setting(
        1.5, "ratio", "By this factor a run too young to know its swings must lose more of the scale, and more "
                      "times its noise.")
    gone_steps: float = setting(
        10.0, "steps", "Consecutive steps at which nine tenths of the highest level are gone that are critical in a "
                       "young run, however short that level was held.")
    young_steps: float = setting(100.0, "steps", "Steps for which a run is young.")
    gone_noise: float = setting(
        12.0, "ratio", "How many times the noise of the run's first steps that level must have been gained.")
    floor_steps: float = setting(
        6.0, "steps", "Consecutive steps with a mean below the worst answer ever seen before that are critical.")


SPEC = DetectorSpec(
    id="reward_collapse",
    title="Reward collapse",
    severity=Severity.CRITICAL,
    required=(("score/mean", "reward/mean"),),
    optional=("score/min", "reward/min"),
    wake="critic/score/mean is logged by every trainer; if it is missing, the log is not verl's training log.",
    meaning="The mean reward has fallen far below the best level that this run had reached, and stays there.",
    impact="What the run had learned is being lost; the newest checkpoints are worse than older ones.",
    diagnosis=(
        "Look at what moved first: actor/ppo_kl, actor/grad_norm and actor/entropy before the fall mean that the "
        "policy broke; nothing of the kind means that the reward or the data changed.",
        "response_length/mean and clip_ratio: answers that got very long or very short score nothing.",
        "Read a few answers of the last rollout, and score them by hand.",
        "Compare with the validation score: if that stays, the training data or the reward function changed.",
    ),
    actions=(
        "resume from the last checkpoint before the fall (trainer.resume_mode=resume_path, trainer.resume_from_path)",
        "make updates smaller: lower actor_rollout_ref.actor.optim.lr, fewer actor_rollout_ref.actor.ppo_epochs, a "
        "lower actor_rollout_ref.actor.clip_ratio",
        "hold the policy near the reference: actor_rollout_ref.actor.use_kl_loss=True with a larger "
        "actor_rollout_ref.actor.kl_loss_coef",
        "if the data changed on purpose, mix the old prompts in (data.train_files)",
    ),
    misses="A loss of less than half of the gain or a quarter of the scale (without a gain, half of the scale), a "
           "collapse within the first 20 steps, one that is no deeper than swings the run has had before, and what was "
           "reached before a restart.",
    source="Relative to the run: healthy runs lose at most a fifth of their scale when the data get harder, while "
           "collapses seen in public lost all of their gain. Noise from the run's own residuals.",
    guide="-",
    panel=("score/mean", "reward/mean"),
    rise_steps=1,
    clear_steps=10,
    under=("non_finite", "no_learning_signal"),
)


class RewardCollapse(Detector):
    """Level of the reward (median of five steps) against the best level that was held for ten.

    A collapse has lost half of the gain and a quarter of the scale, stands out of the run's noise and is deeper than
    what the level loses within 20 steps at times, and than the falls from which it has come back: data that get harder
    in turns are known by then. Far outside all of these three steps are enough, else 20. A mean below the worst single
    answer ever seen is a collapse whatever was gained. A false alarm would stop a run for a hard batch or a new stage
    of its curriculum.

    >>> from monitor.model import Observation
    >>> detector = RewardCollapse()
    >>> for step in range(80):
    ...     reward = 0.2 + 0.01 * step if step < 50 else 0.1
    ...     verdict = detector.update(Observation("run", step, 0.0, {"score/mean": reward, "score/min": 0.0}))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = RewardCollapseSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(RewardCollapseSettings, self._settings)
        self._track = Track(recent=5, memory=10, warm=10)
        self._noise: deque[float] = deque(maxlen=60)  # distance of a value from the level before it
        self._levels: deque[float] = deque(maxlen=_SWING + _DELAY + 1)
        self._swings: deque[float] = deque(maxlen=200)  # what the level lost within _SWING steps, 0 where it rose
        self._usual_fall = 0.0
        self._needed = 0.0  # depth of a fall that counts
        self._calm: Verdict | None = None  # of a while ago, while there is nothing to see
        self._confirmed = 0  # consecutive steps on which a collapse is seen
        self._trough = NAN  # lowest level so far
        self._best = self._gain = NAN  # highest level so far, and its height above the lowest before it
        self._worst = NAN  # worst single answer so far
        self._floor = self._scale = NAN  # usual worst answer of a batch; distance from it to the best level
        self._below, self._below_since = 0, 0  # consecutive steps whose mean lies below the worst answer
        self._deepest = self._recovered = 0.0  # deepest fall since the best level; deepest that was made good
        self._early = NAN  # noise of the run's first steps
        self._peak = self._before_peak = NAN  # highest level so far, however short, and the lowest before it
        self._gone, self._gone_since = 0, 0  # consecutive steps at which nearly all of that is gone
        self._since: int | None = None  # first step of a fall of half the size that counts
        self._lasted = 0
        self._resumed = False

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the mean reward of the row."""
        values = observation.values
        mean_series, low_series = _SERIES[0]
        mean = values.get(mean_series, NAN)
        if mean != mean:
            mean_series, low_series = _SERIES[1]
            mean = values.get(mean_series, NAN)
            if mean != mean:
                return None
        self._take(observation.step, mean, values.get(low_series, NAN))
        track = self._track
        if track.first != track.first:
            return Verdict(Status.WARMING, reason=f"Reward is {quantity(mean)}.", signal=mean_series, value=mean)
        level = track.level
        if self._best != self._best and not self._resumed:
            self._reached(track.first, track.first)
        self._trough = level if not self._trough <= level else self._trough
        levels = self._levels
        levels.append(level)
        # A level counts as reached when it was held for ten steps; the records of noise are not.
        held = min(level, levels[-6], levels[-11]) if len(levels) > 10 else min(levels)
        if not self._best >= held:
            self._reached(held, self._trough)
        measure = track.seen % _MEASURE == 0
        if measure:
            self._usual_fall = self._measure()
            self._needed = self._need()
        fall = self._best - level
        self._learn(fall)
        if self._is_gone(observation.step, level):
            return self._all_gone(mean_series, level)
        if fall < 0.5 * self._needed and self._below < self._s.floor_steps:
            self._since, self._lasted, self._confirmed = None, 0, 0
            if measure or self._calm is None:
                self._calm = self._well(mean_series, fall)
            return self._calm
        return self._suspect(mean_series, observation.step, mean, fall)

    def _is_gone(self, step: int, level: float) -> bool:
        """Whether a level that rose far out of the first steps' noise has been lost again for some steps."""
        if self._early != self._early:
            if len(self._noise) < 10:
                return False
            self._early = MAD_TO_SIGMA * _quantile([abs(value) for value in self._noise], 0.5)
        if not self._peak >= level:
            self._peak, self._before_peak = level, self._trough
        gained = self._peak - self._before_peak
        if self._track.seen > self._s.young_steps and not self._gone:
            return False
        height = self._peak - self._floor if self._floor == self._floor else abs(self._peak)
        least = max(self._s.gone_noise * self._early, self._s.scale_warning * height)
        if gained < least or gained <= 0.0 or level > self._before_peak + 0.1 * gained:
            self._gone = 0
            return False
        self._gone_since = step if self._gone == 0 else min(self._gone_since, step)
        self._gone += 1
        return self._gone >= self._s.gone_steps

    def _all_gone(self, series: str, level: float) -> Verdict:
        since = self._gone_since
        return Verdict(
            Status.CRITICAL, score=max(1.0, self._gone / self._s.gone_steps), since_step=since, hard=True,
            reason=f"Reward had risen from {quantity(self._before_peak)} to {quantity(self._peak)} and has been back "
                   f"at {quantity(level)} since step {since}: all that was learned is gone.",
            signal=series, value=level, threshold=self._before_peak + 0.1 * (self._peak - self._before_peak),
            evidence={"peak": self._peak, "before": self._before_peak, "level": level})

    def _reached(self, level: float, low: float) -> None:
        """Take note of a new best level, and of the lowest one before it."""
        self._recovered, self._deepest = max(self._recovered, self._deepest), 0.0
        self._best, self._gain, self._scale = level, level - low, level - self._floor
        if not self._scale > self._gain:  # the worst answers are not logged
            self._scale = max(abs(level), self._gain)
        self._needed = self._need()

    def _suspect(self, series: str, step: int, mean: float, fall: float) -> Verdict:
        """Judge a reward that has fallen at least half as deep as counts."""
        needed = self._needed
        self._since = step if self._since is None else min(self._since, step)
        self._lasted += 1
        self._confirmed = self._confirmed + 1 if fall >= needed > 0.0 else 0
        clear = fall >= self._s.quick_factor * self._usual_fall
        if self._lasted >= self._s.half_steps and self._confirmed >= (
                self._s.quick_steps if clear else self._s.slow_steps):
            return self._finding(series, fall)
        if self._below >= self._s.floor_steps:
            return self._below_all(series, mean)
        return self._well(series, fall)

    def _well(self, series: str, fall: float) -> Verdict:
        level, needed = self._track.level, self._needed
        return Verdict(Status.OK, score=min(0.99, max(0.0, fall / needed)) if needed > 0.0 else 0.0, signal=series,
                       value=level, threshold=self._best - needed,
                       reason=f"Reward is {quantity(level)}, best level {quantity(self._best)}.")

    def restarted(self, time_seconds: float) -> None:
        """The run may go on from an older checkpoint: what was reached after that is no longer its own. A fall that
        is seen already is not forgotten, since a run may also be resumed in the midst of it."""
        if self._since is None:
            self._resumed = self._track.first == self._track.first
            self._trough = self._best = self._peak = NAN
            self._deepest = 0.0

    def _take(self, step: int, mean: float, low: float) -> None:
        if mean < self._worst:
            self._below_since = step if self._below == 0 else min(self._below_since, step)
            self._below += 1
        else:
            self._below = 0
        if self._below == 0 and low == low:  # what a batch below all others is like is not known yet
            self._worst = low if not self._worst <= low else self._worst
            self._floor = low if self._floor != self._floor else self._floor + _FOLLOW * (low - self._floor)
        if self._since is None and self._track.level == self._track.level:
            self._noise.append(mean - self._track.level)
        self._track.add(mean)

    def _need(self) -> float:
        """Depth of a fall that is a collapse."""
        s = self._s
        share = (max(s.gain_lost_warning * self._gain, s.scale_warning * self._scale) if self._has_gained()
                 else s.scale_no_gain * self._scale)
        if len(self._swings) < _SWINGS:
            share *= s.early_factor
        return max(share, self._usual_fall)

    def _has_gained(self) -> bool:
        """Whether the best level was reached by learning rather than by chance."""
        return self._gain >= max(self._s.scale_warning * self._scale, self._s.earlier_factor * self._usual_fall)

    def _measure(self) -> float:
        """Depth below which a fall is like this run's noise and swings."""
        s = self._s
        noise = (_quantile(self._noise, 0.84) - _quantile(self._noise, 0.16)) / 2
        moves = len(self._swings)
        # The 95th percentile; of few, overlapping moves the largest, since larger ones are still to come.
        if moves < _SWINGS:
            return max(s.early_factor * s.noise_factor * noise, s.earlier_factor * self._recovered)
        swing = _quantile(self._swings, 0.95 if moves >= 4 * _SWINGS else 1.0)
        return max(s.noise_factor * noise, s.swing_factor * swing, s.earlier_factor * self._recovered)

    def _learn(self, fall: float) -> None:
        """Learn how much this run's level loses at times, and how deep a fall was from which it has recovered."""
        levels = self._levels
        if len(levels) > _SWING + _DELAY and self._since is None:
            self._swings.append(max(0.0, levels[0] - levels[_SWING]))
        if fall <= _RECOVERED * self._deepest and self._deepest < self._needed:
            self._recovered = max(self._recovered, self._deepest)
            self._deepest = fall
        self._deepest = max(self._deepest, fall)

    def _finding(self, series: str, fall: float) -> Verdict:
        gain, scale, needed, level, since = self._gain, self._scale, self._needed, self._track.level, self._since
        of_gain = self._has_gained()
        critical = fall >= self._s.scale_critical * scale and (
            not of_gain or fall >= self._s.gain_lost_critical * gain)
        lost = (f"{fall / gain:.0%} of its gain" if of_gain and fall < gain else "all of its gain" if of_gain else
                f"{min(1.0, fall / scale):.0%} of its height above the worst answers")
        return Verdict(
            Status.CRITICAL if critical else Status.WARNING, score=max(1.0, fall / needed), since_step=since,
            reason=f"Reward has fallen from {quantity(self._best)} to {quantity(level)} since step {since} and stays "
                   f"there: the run has lost {lost}.",
            signal=series, value=level, threshold=self._best - needed,
            evidence={"best": self._best, "level": level, "gain": gain, "scale": scale})

    def _below_all(self, series: str, mean: float) -> Verdict:
        return Verdict(
            Status.CRITICAL, score=self._below / self._s.floor_steps, since_step=self._below_since, hard=True,
            reason=f"Mean reward is {quantity(mean)}, below the worst single answer of all steps before "
                   f"({quantity(self._worst)}), since step {self._below_since}: the reward function or the policy "
                   f"has broken down.",
            signal=series, value=mean, threshold=self._worst,
            evidence={"mean": mean, "worst_answer": self._worst, "best": self._best})


def _quantile(values: Collection[float], q: float) -> float:
    """Quantile ``q``, nearest rank; 0 of nothing."""
    return sorted(values)[round(q * (len(values) - 1))] if values else 0.0
