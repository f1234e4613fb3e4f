"""KL runaway: the policy drifts away from where it started, and the reward does not pay for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import Baseline, median, noise
from monitor.units import Unit, quantity

REFERENCE, UPDATE, ROLLOUT = "kl_divergence/reference", "kl_divergence/update", "kl_divergence/rollout"
REWARD, POLICY_LOSS = "score/mean", "policy_loss"

_LOOKBACK = (10, 20, 40, 80, 160)
_SMOOTH = 5
_REWARD_FEW, _REWARD_MANY = 8, 24
_GAIN_SIGMAS = 3.5
"""A median of n values has a standard error of 1.25 sigma / sqrt(n), a difference of two of them 1.77: two of those are
a gain. So a gain is more than 3.5 sigma / sqrt(n)."""


@dataclass(frozen=True, kw_only=True)
class KlRunawaySettings(Settings):
    """Limits of ``kl_runaway``. KL values are nats per token."""

    floor_nats: float = setting(
        0.05, "nats", "Reference KL below this counts as this: growth out of nothing is how every run begins.")
    learned_floor_nats: float = setting(
        0.125, "nats", "The same floor for a run whose reward has risen: learning costs some KL.")
    growth_warning: float = setting(
        4.0, "ratio", "Growth of the reference KL, without any gain in reward, that is a warning (two doublings).")
    growth_critical: float = setting(10.0, "ratio", "The same, critical.")
    absolute_warning_nats: float = setting(5.0, "nats", "Reference KL that is a warning whatever the reward does.")
    absolute_critical_nats: float = setting(10.0, "nats", "Reference KL that is critical whatever the reward does.")
    step_limit_nats: float = setting(0.1, "nats", "KL of one update, or to the rollout engine, called large.")
    step_baseline_factor: float = setting(
        5.0, "ratio", "Large also means this many times the run's own median.")
    step_ceiling_nats: float = setting(1.0, "nats", "KL of one update that is large whatever is usual for the run.")
    step_count_warning: float = setting(3.0, "steps", "Large steps among the last 10 that are a warning.")
    step_count_critical: float = setting(6.0, "steps", "Large steps among the last 10 that are critical.")


SPEC = DetectorSpec(
    id="kl_runaway",
    title="KL runaway",
    severity=Severity.CRITICAL,
    required=((REFERENCE, UPDATE, ROLLOUT),),
    optional=(REFERENCE, UPDATE, ROLLOUT, REWARD, POLICY_LOSS),
    wake="actor/ppo_kl is logged by every PPO-like trainer; for the KL to the reference set "
         "actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True.",
    meaning="The policy moves away from its reference, or jumps in single updates, and the reward does not rise "
            "with it. The policy loss may look calm meanwhile.",
    impact="The model degenerates into one kind of answer. What is trained from here on is lost; the last "
           "checkpoint from before is the one to keep.",
    diagnosis=(
        "Compare the KL curve with score/mean: a KL that grows together with the reward is learning.",
        "Look at the policy loss: pinned near zero while KL climbs means that the advantages carry no signal "
        "(GAE lambda against response length, or a reward that does not tell answers apart).",
        "KL of single updates above 0.1 with a clip fraction that rises means that the updates are too large.",
        "Read a few responses of the last steps: repetition or one stock answer confirms it.",
    ),
    actions=(
        "stop and resume from the last checkpoint before the drift (trainer.resume_mode=resume_path, "
        "trainer.resume_from_path)",
        "lower actor_rollout_ref.actor.optim.lr, and actor_rollout_ref.actor.clip_ratio if single updates jump",
        "hold the policy to its reference: actor_rollout_ref.actor.use_kl_loss=True with a larger "
        "actor_rollout_ref.actor.kl_loss_coef, or algorithm.use_kl_in_reward=True with algorithm.kl_ctrl.kl_coef",
        "with a critic and long responses lower algorithm.lam (0.6 to 0.75 beyond 2048 tokens)",
    ),
    misses="A run without a reference model shows only the KL of its updates: a slow drift of small steps stays "
           "unseen. A drift slower than a fourfold growth in 160 steps is told by the absolute limit alone.",
    source="Growth without reward gain: public reports of runs that ended in one answer to everything. 0.1 nats "
           "for one update: early-stop limits of PPO implementations lie at 0.1 to 0.5. 10 nats: a failing 7B run "
           "reached 12.",
    guide="3.1",
    panel=(REFERENCE, UPDATE),
    rise_steps=2,
    clear_steps=8,
    under=("non_finite",),
)


class KlRunaway(Detector):
    """KL of each kind against the run's own history, its reward, and absolute limits.

    *Reference KL* (smoothed by a median over 5 steps): a finding when it grew fourfold within 10 to 160 steps and
    the reward did not rise over the same steps by more than its noise; floors keep the first nats of a run out.
    *Update and rollout KL*: a finding when several of the last ten steps are above 0.1 nats and above five times
    the run's own median. A false alarm costs an engineer a look at two curves.

    >>> from monitor.model import Observation
    >>> detector = KlRunaway()
    >>> for step in range(60):
    ...     values = {"kl_divergence/reference": 0.001 * 1.15 ** step, "score/mean": 0.5}
    ...     verdict = detector.update(Observation("run", step, 0.0, values))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = KlRunawaySettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(KlRunawaySettings, self._settings)
        size = _LOOKBACK[-1] + _REWARD_MANY
        self._reference: deque[tuple[int, float, float]] = deque(maxlen=size)  # step, KL, reward (NaN: none)
        self._reward_first: list[float] = []
        self._reward_recent: deque[float] = deque(maxlen=_REWARD_FEW)
        self._reward_best = NAN
        self._loss: deque[float] = deque(maxlen=20)
        self._drift: _Drift | None = None
        self._steps = {UPDATE: _StepKl(UPDATE, self._s), ROLLOUT: _StepKl(ROLLOUT, self._s)}

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the KL values that the row holds."""
        values = observation.values
        self._watch_reward(values)
        loss = values.get(POLICY_LOSS, NAN)
        if loss == loss:
            self._loss.append(loss)
        judged = [step_kl for series, step_kl in self._steps.items() if series in values]
        for step_kl in judged:
            step_kl.update(observation.step, values[step_kl.series])
        worst = max(judged, key=lambda s: (s.status, s.score), default=None)
        if REFERENCE in values:
            reference = self._judge_reference(observation.step, values)
            if worst is None or (reference.status, reference.score) >= (worst.status, worst.score):
                return reference
        return worst.verdict() if worst is not None else None

    def _watch_reward(self, values: Mapping[str, float]) -> None:
        reward = values.get(REWARD, NAN)
        if reward != reward:
            return
        if len(self._reward_first) < _REWARD_FEW:
            self._reward_first.append(reward)
        self._reward_recent.append(reward)
        if len(self._reward_recent) == _REWARD_FEW:
            level = median(self._reward_recent)
            self._reward_best = level if self._reward_best != self._reward_best else max(self._reward_best, level)

    def _judge_reference(self, step: int, values: Mapping[str, float]) -> Verdict:
        kl, reward = values[REFERENCE], values.get(REWARD, NAN)
        if kl == kl:  # NaN is non_finite's business and must not enter the history
            self._reference.append((step, abs(kl), reward))
        history = self._reference
        if len(history) < 3:
            return Verdict(Status.WARMING, reason="Fewer than 3 values of the reference KL so far.", signal=REFERENCE)
        now = median([k for _, k, _ in _slice(history, 0, _SMOOTH)])
        findings = [self._judge_absolute(step, now)]
        limit = self._s.floor_nats * self._s.growth_warning
        if now >= limit or self._drift is not None:
            floor = self._floor()
            limit = floor * self._s.growth_warning
            if (now >= limit or self._drift is not None) and len(history) >= _LOOKBACK[0] + _SMOOTH:
                findings.append(self._judge_growth(now, floor))
        worst = max((f for f in findings if f is not None), key=lambda v: (v.status, v.score), default=None)
        if worst is not None:
            return worst
        return Verdict(
            Status.OK if len(history) >= _LOOKBACK[0] + _SMOOTH else Status.WARMING, score=min(0.99, now / limit),
            signal=REFERENCE, value=now, threshold=limit, evidence={"kl_reference": now})

    def _judge_absolute(self, step: int, now: float) -> Verdict | None:
        warning, critical = self._s.absolute_warning_nats, self._s.absolute_critical_nats
        if now < warning:
            return None
        since = step
        for past_step, kl, _ in reversed(self._reference):
            if kl < warning:
                break
            since = past_step
        return Verdict(
            Status.CRITICAL if now >= critical else Status.WARNING, score=now / warning, since_step=since,
            reason=f"KL to the reference is {quantity(now, Unit.NATS)} since step {since}, above "
                   f"{quantity(warning, Unit.NATS)} whatever the reward does: the policy no longer resembles its "
                   f"reference.",
            signal=REFERENCE, value=now, threshold=warning, evidence={"kl_reference": now})

    def _floor(self) -> float:
        """Floor for the growth rule: higher once the reward has risen and stayed up."""
        if len(self._reward_recent) < _REWARD_FEW:
            return self._s.learned_floor_nats
        start, now, best = median(self._reward_first), median(self._reward_recent), self._reward_best
        blur = _blur(self._reward_first, list(self._reward_recent))
        learned = best - start > blur and best - now <= max(blur, 0.25 * (best - start))
        return self._s.learned_floor_nats if learned else self._s.floor_nats

    def _judge_growth(self, now: float, floor: float) -> Verdict | None:
        reward_now = self._rewards(0, _REWARD_FEW)
        drift = self._find_drift(now, floor)
        if drift is None:
            drift = self._drift
            # A drift is over when the KL has come back, or the reward has clearly risen after all.
            if drift is None or now < 0.5 * drift.peak or drift.gain(reward_now) > 2 * drift.blur:
                self._drift = None
                return None
        drift.peak = max(drift.peak, now)
        self._drift = drift
        growth, gain = now / drift.level, drift.gain(reward_now)
        loss = max((abs(value) for value in self._loss), default=NAN)
        loss_text = f", policy loss stays within ±{loss:.2g}" if loss == loss else ""
        reward_text = "reward is not logged" if gain != gain else f"reward changed by {gain:+.3g} over the same steps"
        return Verdict(
            Status.CRITICAL if growth >= self._s.growth_critical else Status.WARNING,
            score=max(1.0, growth / self._s.growth_warning), since_step=drift.since,
            reason=f"KL to the reference rose to {quantity(now, Unit.NATS)}, {growth:.2g} times its level at step "
                   f"{drift.since} (levels below {quantity(floor, Unit.NATS)} count as that), while {reward_text}"
                   f"{loss_text}: the policy drifts without learning.",
            signal=REFERENCE, value=now, threshold=drift.level * self._s.growth_warning,
            evidence={"kl_reference": now, "kl_growth": growth, "reward_gain": gain, "policy_loss_band": loss})

    def _rewards(self, back: int, count: int) -> list[float]:
        return [reward for _, _, reward in _slice(self._reference, back, count) if reward == reward]

    def _find_drift(self, now: float, floor: float) -> _Drift | None:
        """The strongest growth over any lookback in which the reward gained nothing."""
        history = self._reference
        found: _Drift | None = None
        for lookback in _LOOKBACK:
            if len(history) < lookback + _SMOOTH:
                break
            level = max(median([k for _, k, _ in _slice(history, lookback, _SMOOTH)]), floor)
            if now < self._s.growth_warning * level or (found is not None and level >= found.level):
                continue
            # The longer ago, the more steps may be taken together, and the smaller a gain can be seen.
            count = max(_REWARD_FEW, min(lookback // 2, _REWARD_MANY, len(history) - lookback))
            reward_now, reward_then = self._rewards(0, count), self._rewards(lookback, count)
            blur = _blur(reward_then, reward_now)
            drift = _Drift(history[-1 - lookback][0], level, median(reward_then), blur, now)
            if drift.gain(reward_now) > blur:
                continue
            # The same drift seen further on keeps its beginning.
            if self._drift is not None and self._drift.level <= level:
                return self._drift
            found = drift
        return found


@dataclass(slots=True)
class _Drift:
    """A growth of the KL without gain: where it began, from which level, the reward then, and the gain that its noise
    would hide."""

    since: int
    level: float
    reward: float
    blur: float
    peak: float

    def gain(self, reward_now: list[float]) -> float:
        """Change of the reward since then; NaN when the reward is not logged."""
        return median(reward_now) - self.reward


class _StepKl:
    """KL of single steps: how many of the last ten are large, absolutely and for this run."""

    def __init__(self, series: str, settings: KlRunawaySettings) -> None:
        self.series = series
        self._s = settings
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=10)
        self._baseline = Baseline(100)
        self._quiet = 0  # steps since a large one
        self._usual, self._limit, self._count = NAN, settings.step_limit_nats, 0
        self.status, self.score = Status.WARMING, 0.0

    def update(self, step: int, value: float) -> None:
        """Take in the KL of a step."""
        size = abs(value)
        self._usual = self._baseline.median()
        # Until the run has a history of its own there is nothing to compare with.
        known = len(self._baseline) >= 10
        relative = self._s.step_baseline_factor * self._usual if known else 0.0
        self._limit = min(max(self._s.step_limit_nats, relative), self._s.step_ceiling_nats)
        if size == size:
            large = size > self._limit
            self._recent.append((step, size, large))
            self._quiet = 0 if large else self._quiet + 1
            # After ten steps that were not large there is none left to count.
            self._count = 0 if self._quiet >= 10 else sum(large for _, _, large in self._recent)
            # Frozen while any recent step is suspect: a slow fault must not become the new normal.
            self._baseline.offer(size, normal=not known or not self._count)
        if known and self._count >= self._s.step_count_warning:
            self.status = Status.CRITICAL if self._count >= self._s.step_count_critical else Status.WARNING
            self.score = self._count / self._s.step_count_warning
        else:
            self.status = Status.OK if known else Status.WARMING
            self.score = min(0.99, self._count / self._s.step_count_warning)

    def verdict(self) -> Verdict:
        """Verdict on the last step."""
        latest = self._recent[-1][1] if self._recent else NAN
        if self.status < Status.WARNING:
            return Verdict(self.status, score=self.score, signal=self.series, value=latest, threshold=self._limit)
        what = "KL of single updates" if self.series == UPDATE else "KL of trainer to rollout engine"
        limit = quantity(self._limit, Unit.NATS)
        large = [(step, size) for step, size, is_large in self._recent if is_large]
        since, worst = large[0][0], max(size for _, size in large)
        return Verdict(
            self.status, score=self.score, since_step=since,
            reason=f"{what} was above {limit} in {self._count} of the last {len(self._recent)} steps since step "
                   f"{since}, worst {quantity(worst, Unit.NATS)} (usual for this run "
                   f"{quantity(self._usual, Unit.NATS)}): each step moves the policy too far.",
            signal=self.series, value=latest, threshold=self._limit,
            evidence={"large_steps": float(self._count), "worst": worst, "usual": self._usual})


def _blur(first: list[float], second: list[float]) -> float:
    """Largest difference of the medians of two windows of rewards that may still be noise."""
    count = min(len(first), len(second))
    return _GAIN_SIGMAS * max(noise(first), noise(second), 1e-9) / count**0.5 if count > 1 else NAN


def _slice(history: deque[tuple[int, float, float]], back: int, count: int) -> list[tuple[int, float, float]]:
    """``count`` entries that end ``back`` entries before the newest."""
    end = len(history) - back
    return [history[i] for i in range(max(0, end - count), end)]
