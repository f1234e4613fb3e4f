"""Advantage explosion: advantages, returns or values leave their scale within a few steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import Baseline
from monitor.units import quantity

_GROUPS = {
    "advantage": ("advantage/max", "advantage/min"),
    "return": ("return/max", "return/min"),
    "value": ("value/max", "value/min"),
}


@dataclass(frozen=True, kw_only=True)
class AdvantageExplosionSettings(Settings):
    """Limits of ``advantage_explosion``. Ratios are to the run's own 90th percentile."""

    ratio_warning: float = setting(
        6.0, "ratio", "Largest magnitude in the batch, over the run's own 90th percentile of it, that is a warning.")
    ratio_critical: float = setting(20.0, "ratio", "The same, critical.")
    ratio_suspect: float = setting(3.0, "ratio", "From this ratio on a value no longer enters the baseline.")
    count: float = setting(3.0, "steps", "Steps among the last 6 that must be above a limit: a spike is no explosion.")
    warmup: float = setting(8.0, "steps", "Values other than zero needed before a run is compared with itself.")


SPEC = DetectorSpec(
    id="advantage_explosion",
    title="Advantage explosion",
    severity=Severity.CRITICAL,
    required=(("advantage/max", "advantage/min", "return/max", "return/min", "value/max", "value/min"),),
    optional=("advantage/max", "advantage/min", "return/max", "return/min", "value/max", "value/min", "score/max"),
    wake="critic/advantages/max, critic/returns/max and their /min are logged by every PPO-like trainer, with or "
         "without a critic.",
    meaning="The largest advantage, return or value of the batch is many times what this run is used to, and not for "
            "one step only. Group-normalised advantages (grpo) are bounded and whitened ones (gae) nearly so: there "
            "the explosion shows in returns and values.",
    impact="A few tokens or samples decide the whole policy update; the gradient is clipped to their direction and "
           "the model is pulled away from everything else.",
    diagnosis=(
        "See which series exploded: advantages alone mean normalisation over too few tokens or padding that was "
        "counted; returns mean the reward; values mean the critic.",
        "Compare with critic/score/max: a reward without bound is the usual cause.",
        "A single sign (only min, hugely negative) on responses that ended early points at masks: critic and actor "
        "do not see the same tokens.",
        "Look at the sample with the largest score of the last steps.",
    ),
    actions=(
        "bound the reward in the reward function (a score per response between -1 and 1, or normalised)",
        "normalise the advantages: algorithm.norm_adv_by_std_in_grpo=True, or an estimator that normalises instead of "
        "rloo, remax or reinforce without baseline (algorithm.adv_estimator)",
        "keep critic and actor on the same sequence limits (data.max_prompt_length, data.max_response_length, "
        "critic.ppo_max_token_len_per_gpu)",
        "resume from the last checkpoint before the step named",
    ),
    misses="An explosion from the very first steps, since there is no scale to compare with; and slow growth: a scale "
           "that rises less than threefold in five steps or so is followed.",
    source="Ratios to the run's own 90th percentile: maxima of healthy runs stay within three times of it after their "
           "first eight steps.",
    guide="2.2",
    panel=("advantage/max", "return/max", "value/max"),
    rise_steps=1,
    clear_steps=8,
    under=("non_finite",),
)


class AdvantageExplosion(Detector):
    """Largest magnitude of advantages, returns and values against the run's own 90th percentile.

    The baseline takes in what is below three times itself, so it follows a reward that grows by learning and is not
    dragged along by a jump. Values must also leave the scale of the returns: a critic that learns to predict a
    reward of 1 grows from nothing without exploding. A false alarm costs a look at the reward function.

    >>> from monitor.model import Observation
    >>> detector = AdvantageExplosion()
    >>> for step in range(20):
    ...     verdict = detector.update(Observation("run", step, 0.0, {"advantage/max": 1.0 if step < 15 else 1e3}))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = AdvantageExplosionSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(AdvantageExplosionSettings, self._settings)
        self._groups = {name: _Group(self._s) for name in _GROUPS}

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the magnitudes that the row holds."""
        judged: list[_Group] = []
        floor = 0.0
        values = observation.values
        for name, group in self._groups.items():
            size, series = -1.0, ""
            for candidate in _GROUPS[name]:
                value = values.get(candidate, NAN)
                if value < 0.0:
                    value = -value
                if value > size:
                    size, series = value, candidate
            if not series:
                continue
            group.update(observation.step, series, size, floor if name == "value" else 0.0)
            judged.append(group)
            if name == "return":
                floor = max(size, group.usual())
        if not judged:
            return None
        worst = max(judged, key=lambda g: (g.status, g.score))
        # Advantages that are logged and calm bound the update: the explosion has not reached the policy.
        bounded = judged[0] is self._groups["advantage"] and judged[0].status < Status.WARNING
        return worst.verdict(bounded=bounded)


class _Group:
    """One of advantages, returns, values: baseline and the ratios of the last six steps."""

    def __init__(self, settings: AdvantageExplosionSettings) -> None:
        self._s = settings
        self._baseline = Baseline(100)
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=6)  # step, ratio, size
        self._since: int | None = None
        self._series, self._usual = "", 0.0
        self.status, self.score = Status.WARMING, 0.0

    def usual(self) -> float:
        """The run's own 90th percentile; 0 while there is none."""
        return self._baseline.quantile(0.9) if len(self._baseline) else 0.0

    def update(self, step: int, series: str, size: float, floor: float) -> None:
        """Take in the largest magnitude of a step; ``floor`` is a scale below which nothing explodes."""
        usual = max(self.usual(), floor)
        known = len(self._baseline) >= self._s.warmup
        ratio = size / usual if known and usual > 0.0 else 0.0
        # Zero is a batch without signal, not a scale.
        self._baseline.offer(size, normal=size > 0.0 and ratio < self._s.ratio_suspect)
        self._recent.append((step, ratio, size))
        self.score = min(0.99, ratio / self._s.ratio_warning)
        self._series, self._usual = series, usual
        if ratio < self._s.ratio_suspect and self._since is None:
            self.status = Status.OK if known else Status.WARMING
            return
        if ratio >= self._s.ratio_suspect:
            self._since = step if self._since is None else min(self._since, step)
        elif all(r < self._s.ratio_suspect for _, r, _ in self._recent):
            self._since = None
        warning = sum(r >= self._s.ratio_warning for _, r, _ in self._recent)
        critical = sum(r >= self._s.ratio_critical for _, r, _ in self._recent)
        if warning >= self._s.count:
            self.status = Status.CRITICAL if critical >= self._s.count else Status.WARNING
            self.score = max(r for _, r, _ in self._recent) / self._s.ratio_warning
        else:
            self.status = Status.OK if known else Status.WARMING

    def verdict(self, *, bounded: bool) -> Verdict:
        """The last step's verdict; ``bounded``: the policy's update is, so it is a warning at most."""
        step, _, size = self._recent[-1]
        usual = self._usual
        limit = usual * self._s.ratio_warning
        if self.status < Status.WARNING:
            return Verdict(
                self.status, score=self.score, signal=self._series, value=size,
                threshold=limit if self.status is Status.OK else NAN)
        word = self._series.split("/", 1)[0]
        worst = self.score * self._s.ratio_warning
        peak = max(s for _, _, s in self._recent)
        since = self._since if self._since is not None else step
        consequence = ("the advantages are normalised and calm so far, but the critic and every other sample now learn "
                       "on the wrong scale" if bounded else "a few samples decide the whole update")
        return Verdict(
            Status.WARNING if bounded else self.status, score=self.score, since_step=since,
            reason=f"The largest {word} of the batch reached {quantity(peak)}, {worst:.3g} times what is usual for "
                   f"this run ({quantity(usual)}), since step {since}: {consequence}.",
            signal=self._series, value=size, threshold=limit,
            evidence={"magnitude": size, "usual": usual, "ratio": worst})
