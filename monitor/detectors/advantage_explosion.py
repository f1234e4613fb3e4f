"""Advantage explosion: advantages, returns or values leave their scale within a few steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
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
_CONSEQUENCE = "a few samples decide the whole update."


@dataclass(frozen=True, kw_only=True)
class AdvantageExplosionSettings(Settings):
    """Limits of ``advantage_explosion``. Ratios are to the run's own 90th percentile."""

    ratio_warning: float = setting(
        6.0, "ratio", "Largest magnitude in the batch, over the run's own 90th percentile of it, that is a warning.")
    ratio_critical: float = setting(20.0, "ratio", "The same, critical.")
    ratio_suspect: float = setting(3.0, "ratio", "From this ratio on a value no longer enters the baseline.")
    count: float = setting(2.0, "steps", "Steps among the last 4 that must be above a limit.")
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
        self._groups = {name: _Group(series, self._s) for name, series in _GROUPS.items()}

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the magnitudes that the row holds."""
        verdicts: list[Verdict] = []
        floor = 0.0
        for name, group in self._groups.items():
            size, series = NAN, ""
            for candidate in _GROUPS[name]:
                value = abs(observation.values.get(candidate, NAN))
                if value == value and not size >= value:
                    size, series = value, candidate
            if not series:
                continue
            verdicts.append(group.update(observation.step, series, size, floor if name == "value" else 0.0))
            if name == "return":
                floor = max(size, group.usual())
        if verdicts and verdicts[0].signal in _GROUPS["advantage"] and verdicts[0].status < Status.WARNING:
            # Advantages that are logged and calm bound the update: the explosion has not reached the policy.
            verdicts = [_soften(v) for v in verdicts]
        return max(verdicts, key=lambda v: (v.status, v.score), default=None)


def _soften(verdict: Verdict) -> Verdict:
    if verdict.status < Status.WARNING:
        return verdict
    reason = verdict.reason.replace(_CONSEQUENCE, "the advantages are normalised and calm so far, but the critic and "
                                                  "every other sample now learn on the wrong scale.")
    return replace(verdict, status=Status.WARNING, reason=reason)


class _Group:
    """One of advantages, returns, values: baseline and the ratios of the last four steps."""

    def __init__(self, series: tuple[str, ...], settings: AdvantageExplosionSettings) -> None:
        self._s = settings
        self._baseline = Baseline(100)
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=4)  # step, ratio, size
        self._since: int | None = None
        self._first = series[0]

    def usual(self) -> float:
        """The run's own 90th percentile; 0 while there is none."""
        return self._baseline.quantile(0.9) if len(self._baseline) else 0.0

    def update(self, step: int, series: str, size: float, floor: float) -> Verdict:
        usual = max(self.usual(), floor)
        known = len(self._baseline) >= self._s.warmup
        ratio = size / usual if known and usual > 0.0 else 0.0
        # Zero is a batch without signal, not a scale.
        self._baseline.offer(size, normal=size > 0.0 and ratio < self._s.ratio_suspect)
        self._recent.append((step, ratio, size))
        if ratio >= self._s.ratio_suspect:
            self._since = step if self._since is None else min(self._since, step)
        elif all(r < self._s.ratio_suspect for _, r, _ in self._recent):
            self._since = None
        limit = usual * self._s.ratio_warning
        counts = [sum(r >= bound for _, r, _ in self._recent) for bound in (self._s.ratio_warning,
                                                                            self._s.ratio_critical)]
        if counts[0] < self._s.count:
            return Verdict(
                Status.OK if known else Status.WARMING, score=min(0.99, ratio / self._s.ratio_warning),
                reason=f"Largest {_word(series)} of the batch is {quantity(size)}, usual {quantity(usual)}.",
                signal=series, value=size, threshold=limit if known else NAN)
        worst = max(r for _, r, _ in self._recent)
        peak = max(s for _, _, s in self._recent)
        since = self._since if self._since is not None else step
        return Verdict(
            Status.CRITICAL if counts[1] >= self._s.count else Status.WARNING,
            score=worst / self._s.ratio_warning, since_step=since,
            reason=f"The largest {_word(series)} of the batch reached {quantity(peak)}, {worst:.3g} times what is "
                   f"usual for this run ({quantity(usual)}), since step {since}: {_CONSEQUENCE}",
            signal=series, value=size, threshold=limit,
            evidence={"magnitude": size, "usual": usual, "ratio": worst, "steps_above": float(counts[0])})


def _word(series: str) -> str:
    return series.split("/", 1)[0]
