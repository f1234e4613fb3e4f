"""Rollout mismatch: the trainer and the rollout engine no longer agree on the policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import Track

DIFFERENCE, VALID = "rollout_probability_difference/mean", "rollout_probability_difference_valid"
KL, CHI2 = "kl_divergence/rollout", "rollout_chi2/token"
WEIGHT, WEIGHT_STD = "rollout_importance_weight/mean", "rollout_importance_weight/std"
SAMPLE_SIZE = "rollout_importance_weight/eff_sample_size"
K3_KL, PERPLEXITY = "rollout_k3_kl_nats", "rollout_perplexity_ratio"
CORRELATION = "rollout_probability_correlation"
_PROBABILITIES = frozenset({DIFFERENCE, CORRELATION})  # without meaning while VALID is 0
_ANY = 1e300
_STILL = 0.8  # share of its limit at which a drift that was found is over


@dataclass(frozen=True, kw_only=True)
class RolloutMismatchSettings(Settings):
    """Limits of ``rollout_mismatch``; those of verl's documentation where it has one."""

    kl_nats: float = setting(0.1, "nats", "KL of trainer to rollout engine, either sign, that is too much.")
    chi2: float = setting(1.0, "ratio", "Chi-squared divergence of tokens that is too much.")
    weight_low: float = setting(0.5, "ratio", "Mean importance weight below which it is biased.")
    weight_high: float = setting(2.0, "ratio", "Mean importance weight above which it is biased.")
    weight_std: float = setting(1.0, "ratio", "Standard deviation of the importance weights that is too much.")
    sample_size: float = setting(0.3, "ratio", "Effective share of the samples below which few decide.")
    difference_factor: float = setting(
        4.0, "ratio", "Probability difference over the run's own least level that is a drift.")
    difference_floor: float = setting(
        0.012, "ratio", "Probability difference up to which there is no drift: what a rollout in fp8 has.")
    difference_limit: float = setting(0.05, "ratio", "Probability difference that is too much from the start.")
    correlation: float = setting(0.9, "ratio", "Correlation of the probabilities below which they disagree.")
    normal_difference: float = setting(
        0.004, "ratio", "Probability difference below which a low correlation is that of near constants.")
    lasting: float = setting(5.0, "steps", "Steps in a row beyond a limit that count, and within it that end it.")


SPEC = DetectorSpec(
    id="rollout_mismatch",
    title="Rollout mismatch",
    severity=Severity.WARNING,
    required=((DIFFERENCE, KL, CHI2, WEIGHT),),
    optional=(VALID, WEIGHT_STD, SAMPLE_SIZE, K3_KL, PERPLEXITY, CORRELATION),
    wake="set actor_rollout_ref.rollout.calculate_log_probs=True (the default from verl 0.9 on)",
    meaning="The rollout engine gives tokens other probabilities than the trainer does, more than numerics explain, "
            "step after step: answers are sampled from another policy than the one that is updated.",
    impact="The policy gradient is biased. Such runs look well for a while and then collapse, most often with long "
           "answers or a mixture of experts.",
    diagnosis=(
        "From the first step on: precision (fp8 or a quantised rollout against bf16 training), another chat template "
        "or sampling parameter, a wrong model path.",
        "Growing since a step: weights that are not synchronised, or only in part (LoRA, a renamed layer); look at the "
        "stage update_weights.",
        "training/rollout_probs_diff_max and rollout_corr/* say whether few tokens or all are off.",
    ),
    actions=(
        "correct for it: algorithm.rollout_correction.rollout_is=token with rollout_is_threshold=2.0",
        "run the rollout in the trainer's precision (actor_rollout_ref.rollout.dtype=bfloat16, no quantization)",
        "check that the weights reach the engine after each update (actor_rollout_ref.rollout.load_format, "
        "free_cache_engine), and use the engine version that your verl release names",
        "mixture of experts: replay the rollout's routing in the trainer (actor_rollout_ref.actor.router_replay)",
    ),
    misses="A mismatch of few tokens that means hide, and runs that do not compute it.",
    source="verl's documentation on rollout correction: weights of 0.5 to 2 in the mean, a deviation up to 1, an "
           "effective sample size from 0.3, KL up to 0.1, chi-squared up to 1. Probability differences of 0.003 to "
           "0.004 are normal in bf16, 0.012 in fp8. The perplexity ratio's limits are the exponential of KL's; "
           "recorded runs correlate by 0.99 and more.",
    guide="-",
    panel=(DIFFERENCE,),
    rise_steps=1,
    clear_steps=2,
    under=("non_finite", "kl_runaway"),
)


@dataclass(slots=True)
class _Streak:
    """How long a series has been beyond its limit; found: long enough, until it has been within for as long."""

    since: int
    beyond: int = 0
    within: int = 0
    found: bool = False
    value: float = NAN  # the last one beyond


class RolloutMismatch(Detector):
    """Limits of verl's documentation, exceeded for five steps in a row; and a drift of the probability difference.

    The drift is of the median of five steps against the least that it ever was, so that a mismatch which grows with the
    run is seen at any pace. A false alarm sends somebody to compare two engines token by token.

    >>> from monitor.model import Observation
    >>> detector = RolloutMismatch()
    >>> for step in range(5):
    ...     verdict = detector.update(Observation("run", step, 0.0, {"kl_divergence/rollout": 0.3}))
    >>> verdict.status.name
    'WARNING'
    """

    spec = SPEC
    settings_type = RolloutMismatchSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = s = cast(RolloutMismatchSettings, self._settings)
        self._difference = Track(5, 60, 5)
        # Series, lowest and highest value that is well, and what it is called.
        self._limits = (
            (KL, -s.kl_nats, s.kl_nats, "KL of trainer to rollout engine"),
            (K3_KL, -_ANY, s.kl_nats, "KL of trainer to rollout engine"),
            (CHI2, -_ANY, s.chi2, "chi-squared divergence of tokens"),
            (PERPLEXITY, math.exp(-s.kl_nats), math.exp(s.kl_nats), "perplexity ratio of trainer to rollout engine"),
            (WEIGHT, s.weight_low, s.weight_high, "mean importance weight"),
            (WEIGHT_STD, -_ANY, s.weight_std, "standard deviation of the importance weights"),
            (SAMPLE_SIZE, s.sample_size, _ANY, "effective share of the samples"),
            (DIFFERENCE, -_ANY, s.difference_limit, "mean probability difference"),
            (CORRELATION, s.correlation, _ANY, "correlation of the token probabilities"))
        self._streaks: dict[str, _Streak] = {}  # of series that were beyond a limit lately
        self._drift_since: int | None = None

    def update(self, observation: Observation) -> Verdict | None:
        """Judge what the row says of trainer and rollout engine."""
        values, step, streaks = observation.values, observation.step, self._streaks
        invalid = values.get(VALID) == 0.0
        difference = NAN if invalid else values.get(DIFFERENCE, NAN)
        shown, finding = "", None
        for series, low, high, name in self._limits:
            value = values.get(series)
            if value is None or value != value or (invalid and series in _PROBABILITIES):
                continue
            shown = shown or series
            beyond = not low <= value <= high
            if series == CORRELATION and beyond and difference < self._s.normal_difference:
                beyond = False
            if beyond or series in streaks:
                streak = self._follow(series, step, beyond=beyond)
                if streak is None:
                    continue
                if beyond:
                    streak.value = value
                if streak.found and finding is None:
                    finding = self._finding(series, low, high, name, streak)
        if not shown:
            return None
        if difference == difference:
            self._difference.add(difference)
        if finding is not None:
            return finding
        level, least = self._difference.level, self._difference.low
        limit = max(self._s.difference_factor * least, self._s.difference_floor)
        if least == least and level > limit * (1.0 if self._drift_since is None else _STILL):
            return self._drift(step, level, least, limit)
        self._drift_since = None
        if level == level:
            return Verdict(Status.OK, min(0.99, level / limit) if limit == limit else 0.0, signal=DIFFERENCE,
                           value=level, threshold=limit)
        return Verdict(Status.OK, signal=shown, value=values[shown])

    def _follow(self, series: str, step: int, *, beyond: bool) -> _Streak | None:
        """Count a value beyond its limit, or back within it; None once it has been within for long enough."""
        streak = self._streaks.get(series)
        if streak is None:
            streak = self._streaks[series] = _Streak(step)
        if beyond:
            streak.beyond, streak.within = streak.beyond + 1, 0
            streak.found = streak.found or streak.beyond >= self._s.lasting
            streak.since = min(streak.since, step)
            return streak
        streak.beyond, streak.within = 0, streak.within + 1
        if not streak.found or streak.within >= self._s.lasting:
            del self._streaks[series]
            return None
        return streak

    def _finding(self, series: str, low: float, high: float, name: str, streak: _Streak) -> Verdict:
        value = streak.value
        limit = high if value > high else low
        times = abs(value / limit) if value > high or low < 0 else limit / value if value > 0 else 1.0
        return Verdict(
            Status.WARNING, score=max(1.0, min(1e6, times)), since_step=streak.since, signal=series,
            value=value, threshold=limit,
            reason=f"The {name} is {value:.3g} and beyond {limit:.3g} since step {streak.since}: the rollout engine "
                   f"samples from another policy than the one that is trained.",
            evidence={"value": value, "limit": limit, "steps_beyond": float(streak.beyond)})

    def _drift(self, step: int, level: float, least: float, limit: float) -> Verdict:
        self._drift_since = step if self._drift_since is None else min(self._drift_since, step)
        return Verdict(
            Status.WARNING, score=max(1.0, level / limit), since_step=self._drift_since, signal=DIFFERENCE, value=level,
            threshold=limit,
            reason=f"The mean probability difference between trainer and rollout engine has grown to {level:.3g} since "
                   f"step {self._drift_since}, from a least of {least:.3g}: they drift apart.",
            evidence={"difference": level, "least": least})
