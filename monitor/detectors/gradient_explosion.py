"""Gradient explosion: the gradient norm leaves its own level, at once, slowly or again and again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import MAD_TO_SIGMA, Track, median, noise
from monitor.units import quantity

ACTOR, CRITIC, REWARD = "gradient_norm/actor", "gradient_norm/critic", "score/mean"

_YOUNG = 30  # values after which a run's usual level is taken at its word
_YOUNG_RATIO = 10.0
_NOISY_RATIO = 12.0
_NO_SIGNAL = 1 / 30  # of the usual level: a batch whose rewards tie, no scale to compare with
_SUSPECT = 2.5  # from this ratio on a norm does not become usual
_LEARNING = 2.0  # standard errors by which the reward must have risen
_BLOCK = 10  # values whose median is a point of the slow trend
_TREND = 6  # points that must rise
_TREND_SIGMAS, _STEP_SIGMAS = 10.0, 6.0  # of points about a line through their neighbours; from point to point
_NEW = 1.5  # times the highest point before the last 60 steps: a level that the run has not had before
_APART = 3  # steps between two spikes; closer ones are one
_QUIET = 100  # steps after which a spike is forgotten when none has followed


@dataclass(frozen=True, kw_only=True)
class GradientExplosionSettings(Settings):
    """Limits of ``gradient_explosion``. Ratios are to the run's own usual norm."""

    ratio_warning: float = setting(
        4.0, "ratio", "Median norm of five steps, over the usual one, that is a warning; more where the norm is noisy.")
    ratio_critical: float = setting(10.0, "ratio", "The same, critical.")
    ceiling: float = setting(
        100.0, "norm", "Norm before clipping that is large whatever the run's noise, if it is also three times what is "
                       "usual.")
    ceiling_steps_warning: float = setting(3.0, "steps", "Steps among the last 10 above the ceiling, a warning.")
    ceiling_steps_critical: float = setting(6.0, "steps", "Steps among the last 10 above the ceiling, critical.")
    spike_ratio: float = setting(30.0, "ratio", "A single norm this many times the usual one is a spike.")
    spikes: float = setting(3.0, "spikes", "Spikes within the window that are a warning; one or two do no harm.")
    spike_window_steps: float = setting(400.0, "steps", "Window in which spikes are counted.")
    slow_ratio: float = setting(
        2.2, "ratio", "Growth over up to 160 steps that is a warning while it gathers speed and the reward stays flat.")
    slow_pace: float = setting(1.3, "ratio", "Growth over the last 30 steps that such a rise must still have.")


SPEC = DetectorSpec(
    id="gradient_explosion",
    title="Gradient explosion",
    severity=Severity.CRITICAL,
    required=((ACTOR, CRITIC),),
    optional=(ACTOR, CRITIC, REWARD),
    wake="actor/grad_norm is logged by every trainer; if it is missing, the log is not verl's training log.",
    meaning="The gradient norm before clipping has left the level that is usual for this run: it stays high, it climbs "
            "while the reward does not, or it spikes again and again.",
    impact="Clipping hides the size but not the direction: each update follows a few extreme tokens, and clipped steps "
           "drown the useful ones. Runs that go on like this lose their policy within tens of steps.",
    diagnosis=(
        "The reason says whose gradient it is. The critic's alone means its targets: compare critic/vf_loss and "
        "critic/returns/max.",
        "Compare actor/ppo_kl and actor/pg_clipfrac: if they rise too, single updates are too large.",
        "critic/advantages/max far above its usual value means that the reward or the normalisation is the cause.",
        "For spikes look at the batches of the steps named: very long answers, repeated tokens, odd scores.",
        "training/rollout_probs_diff_mean that grows with it means that rollout and trainer no longer agree.",
    ),
    actions=(
        "lower actor_rollout_ref.actor.optim.lr (or critic.optim.lr), and lengthen the warm-up "
        "(actor_rollout_ref.actor.optim.lr_warmup_steps_ratio)",
        "clip harder: actor_rollout_ref.actor.grad_clip and critic.grad_clip (1.0 by default)",
        "make updates smaller: fewer actor_rollout_ref.actor.ppo_epochs, a larger "
        "actor_rollout_ref.actor.ppo_mini_batch_size, a lower actor_rollout_ref.actor.clip_ratio_high",
        "hold the policy near the reference: actor_rollout_ref.actor.use_kl_loss=True",
        "resume from the last checkpoint before the step named (trainer.resume_mode=resume_path, "
        "trainer.resume_from_path)",
    ),
    misses="A run whose gradients are large from its first step and stay as they are, growth that doubles in more than "
           "60 steps until it is four times the run's beginning, spikes below 30 times the usual norm, and one or two "
           "spikes of any size. A norm that comes back from near zero to where the run began is no explosion.",
    source="Ceiling: verl clips at 1.0, so above 100 less than a hundredth of the gradient is applied; public reports "
           "of GRPO runs show 0.1 to 3 in health and 111 as the last sign before 5e7, but also harmless runs at 100 "
           "to 2500 throughout, so the level must be new to the run. Ratios: healthy runs change their norm by a "
           "factor of two to three and spike once to 18 times the median.",
    guide="3",
    panel=(ACTOR, CRITIC),
    rise_steps=1,
    clear_steps=10,
    under=("non_finite", "advantage_explosion"),
)


class GradientExplosion(Detector):
    """Norm of the actor's and of the critic's gradient, each against its own usual level.

    *Sustained*: the median of five steps is four times the usual norm and above that of the run's beginning; twice that
    while the reward rises. *Ceiling*: several of the last ten steps above 100, where that is new to the run. *Slow*:
    medians of ten steps rise to 2.2 times while the reward stays flat, or to four times the run's beginning. *Spikes*:
    three within 400 steps. Zeros are batches without signal and count for nothing. A false alarm would have someone
    lower the learning rate of a run that learns.

    >>> from monitor.model import Observation
    >>> detector = GradientExplosion()
    >>> for step in range(60):
    ...     norm = 0.3 if step < 50 else 9.0
    ...     verdict = detector.update(Observation("run", step, 0.0, {"gradient_norm/actor": norm}))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = GradientExplosionSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(GradientExplosionSettings, self._settings)
        self._rewards: deque[float] = deque(maxlen=6 * _BLOCK)
        self._norms = (_Norm(ACTOR, self._s, self._gain), _Norm(CRITIC, self._s, self._gain))

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the norms that the row holds."""
        values = observation.values
        reward = values.get(REWARD, NAN)
        if reward == reward:
            self._rewards.append(reward)
        worst: Verdict | None = None
        highest: _Norm | None = None
        for norm in self._norms:
            value = values.get(norm.series, NAN)
            if value >= 0.0:  # NaN is non_finite's business
                found = norm.update(observation.step, value)
                if found is not None and (worst is None or (found.status, found.score) > (worst.status, worst.score)):
                    worst = found
                if highest is None or norm.ratio > highest.ratio:
                    highest = norm
        return highest.calm() if worst is None and highest is not None else worst

    def _gain(self) -> float:
        """Change of the reward over the last 60 steps in units of what its noise can do; NaN when not known."""
        rewards = list(self._rewards)
        count = len(rewards) // 3
        if count < 5:
            return NAN
        error = 1.77 * max(noise(rewards), 1e-9) / math.sqrt(count)  # standard error of a difference of two medians
        return (median(rewards[-count:]) - median(rewards[:count])) / error


class _Norm:
    """The norm of one network: its usual level, its ceiling count, its spikes and its slow trend."""

    def __init__(self, series: str, settings: GradientExplosionSettings, gain: Callable[[], float]) -> None:
        self.series = series
        self._s, self._gain = settings, gain
        self._track = Track(recent=5, memory=100, warm=6)
        self.ratio = self._before = 0.0  # level over reference, now and one value before
        self._lowest = math.inf
        self._since: int | None = None  # the level is above twice the reference
        self._above: deque[tuple[int, int]] = deque(maxlen=10)  # index and step of norms above the ceiling
        self._spikes: deque[tuple[int, int, float]] = deque(maxlen=8)  # index, step, ratio
        self._block: list[float] = []
        self._points: deque[tuple[int, float]] = deque(maxlen=16)  # last step and median of a block
        self._start = self._high = 0.0  # highest of the first three points; highest that has left ``_points``' trend
        self._blocks = 0
        self._slow: tuple[int, float, float] | None = None  # since, level then, growth

    def update(self, step: int, value: float) -> Verdict | None:
        """Take in the norm of a step, zero included; the finding, if there is one."""
        track = self._track
        usual = track.usual
        if value > 0.0 and not value < _NO_SIGNAL * usual:
            index = track.seen
            self._single(index, step, value, usual)
            # What the reward pays for is normal.
            track.add(value, normal=self.ratio < _SUSPECT or self._gain() > _LEARNING)
            if value < self._lowest:
                self._lowest = value
            self._block.append(value)
            if len(self._block) == _BLOCK:
                self._point(step)
            usual = track.usual
            if usual == usual:
                reference = max(usual, track.first / self._s.ratio_warning)
                self._before, self.ratio = self.ratio, track.level / reference
                if self.ratio < 2.0:
                    self._since = None
                elif self._since is None or self._since > step:
                    self._since = step
        if self.ratio >= self._s.ratio_warning or self._above or self._spikes or self._slow:
            return self._finding(track.seen, step, value)
        return None

    def calm(self) -> Verdict:
        """The verdict when nothing was found."""
        track, limit = self._track, self._s.ratio_warning
        if track.usual != track.usual:
            return Verdict(Status.WARMING, signal=self.series, value=track.level)
        return Verdict(Status.OK, score=min(0.99, self.ratio / limit), signal=self.series, value=track.level,
                       threshold=limit * track.usual)

    def _single(self, index: int, step: int, value: float, usual: float) -> None:
        """Ceiling and spikes: what a single norm tells."""
        if value >= self._s.ceiling and value >= (3.0 * usual if usual == usual else 10.0 * self._lowest):
            self._above.append((index, step))
        elif self._above and index - self._above[-1][0] >= 10:
            self._above.clear()
        if value >= self._s.spike_ratio * usual and value >= self._noisy(6.0) * usual:
            if not self._spikes or index - self._spikes[-1][0] > _APART:
                self._spikes.append((index, step, value / usual))
        elif self._spikes and index - self._spikes[-1][0] > self._s.spike_window_steps:
            self._spikes.clear()

    def _noisy(self, sigmas: float) -> float:
        """Ratio to the usual norm that its own noise does not reach; the noise is taken as that of the logarithm."""
        return math.exp(min(sigmas * math.asinh(self._track.spread / self._track.usual), 50.0))

    def _point(self, step: int) -> None:
        """A block is full: judge the slow trend."""
        self._blocks += 1
        level = median(self._block)
        self._block.clear()
        points = self._points
        if len(points) >= _TREND:
            self._high = max(self._high, points[-_TREND][1])
        points.append((step, level))
        if self._blocks <= 3:
            self._start = max(self._start, level)
            return
        if self._slow is not None and level < 0.6 * self._slow[1] * self._slow[2]:
            self._slow = None
        found = self._trend(level) or self._long_rise(level)
        if found is not None:
            since, base, growth = found
            if self._slow is not None and self._slow[1] * growth <= level:
                since, base = self._slow[0], self._slow[1]
            self._slow = (min(since, step), base, level / base)

    def _trend(self, level: float) -> tuple[int, float, float] | None:
        """A rise that gathers speed while the reward is known to be flat."""
        points = list(self._points)
        if len(points) < _TREND or level < self._s.slow_ratio * min(p for _, p in points):
            return None
        since, base = min(points[:-1], key=lambda point: point[1])
        logs = [math.log(p) for _, p in points]
        pace = (logs[-1] + logs[-2] - logs[-4] - logs[-5]) / 2
        bends = [abs(a - 2 * b + c) for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]
        blur = _TREND_SIGMAS * MAD_TO_SIGMA * median(bends) / math.sqrt(6)
        blur = max(blur, _STEP_SIGMAS * noise(logs))
        if pace < math.log(self._s.slow_pace) or logs[-1] - math.log(base) < blur:
            return None
        recent = [p for _, p in points[-_TREND:]]
        pairs = [b > a for i, a in enumerate(recent) for b in recent[i + 1:]]
        if sum(pairs) < 0.8 * len(pairs) or level < _NEW * self._high or not self._gain() < _LEARNING:
            return None
        return since, base, level / base

    def _long_rise(self, level: float) -> tuple[int, float, float] | None:
        """Four times the run's beginning, however long it took; two points must say so."""
        limit = self._s.ratio_warning * self._start
        if min(level, self._points[-2][1]) < limit or level < _NEW * self._high:
            return None
        if self._gain() > _LEARNING:
            self._start = level / 2.0
            return None
        since = next((step for step, point in self._points if point >= 0.5 * limit), self._points[-1][0])
        return since, self._start, level / self._start

    def _finding(self, index: int, step: int, value: float) -> Verdict | None:
        found = [f for f in (self._sustained(step), self._ceiling(index, value), self._repeated(index, value),
                             self._creeping(step)) if f is not None]
        return max(found, key=lambda v: (v.status, v.score), default=None)

    def _sustained(self, step: int) -> Verdict | None:
        track, s = self._track, self._s
        if min(self.ratio, self._before) < s.ratio_warning:
            return None
        limit = min(max(s.ratio_warning, self._noisy(5.5)), _NOISY_RATIO)
        limit = max(limit, _YOUNG_RATIO) if track.seen < _YOUNG else limit
        limit *= 2.0 if self._gain() > _LEARNING else 1.0
        if self.ratio < limit:
            return None
        since = self._since if self._since is not None else step
        return self._tell(
            critical=self.ratio >= max(s.ratio_critical, 1.5 * limit), score=self.ratio / limit, since=since,
            value=track.level, threshold=limit * track.level / self.ratio, ratio=self.ratio,
            text=f"norm before clipping stays at {quantity(track.level)} since step {since}, {self.ratio:.3g} times "
                 f"what is usual for this run ({quantity(track.usual)}): updates follow a few extreme samples")

    def _ceiling(self, index: int, value: float) -> Verdict | None:
        steps = [step for i, step in self._above if i > index - 10]
        needed = self._s.ceiling_steps_warning if self._track.usual == self._track.usual else 2.0
        if len(steps) < needed:
            return None
        since = min(steps)
        return self._tell(
            critical=len(steps) >= self._s.ceiling_steps_critical, score=len(steps) / needed, since=since, value=value,
            threshold=self._s.ceiling, ratio=self.ratio,
            text=f"norm before clipping was above {quantity(self._s.ceiling)} in {len(steps)} of the last 10 steps "
                 f"since step {since}, now {quantity(value)}: clipping leaves less than a hundredth of it")

    def _repeated(self, index: int, value: float) -> Verdict | None:
        spikes = [(step, ratio) for i, step, ratio in self._spikes if i > index - self._s.spike_window_steps]
        if len(spikes) < self._s.spikes or index - self._spikes[-1][0] > _QUIET:
            return None
        since, usual = min(step for step, _ in spikes), self._track.usual
        return self._tell(
            critical=False, score=len(spikes) / self._s.spikes, since=since, value=value,
            threshold=self._s.spike_ratio * usual, ratio=max(ratio for _, ratio in spikes),
            text=f"norm spiked {len(spikes)} times since step {since}, to {min(r for _, r in spikes):.3g} to "
                 f"{max(r for _, r in spikes):.3g} times the usual {quantity(usual)}: some batches hold samples that "
                 f"throw the policy about")

    def _creeping(self, step: int) -> Verdict | None:
        if self._slow is None:
            return None
        since, base, growth = self._slow
        since = min(since, step)
        return self._tell(
            critical=False, score=max(1.0, growth / self._s.ratio_warning), since=since, value=base * growth,
            threshold=self._s.slow_ratio * base, ratio=growth,
            text=f"norm has climbed from {quantity(base)} to {quantity(base * growth)}, {growth:.2g} times, since step "
                 f"{since}, and the reward does not rise with it: the policy is becoming unstable")

    def _tell(self, *, critical: bool, score: float, since: int, value: float, threshold: float, ratio: float,
              text: str) -> Verdict:
        # A critic's gradient alone harms the values, which critic_divergence judges: a warning at most.
        actor = self.series == ACTOR
        return Verdict(
            Status.CRITICAL if critical and actor else Status.WARNING, score=max(1.0, score), since_step=since,
            reason=f"{'Actor' if actor else 'Critic'} gradient {text}.", signal=self.series, value=value,
            threshold=threshold, evidence={"norm": value, "usual": self._track.usual, "ratio": ratio})
