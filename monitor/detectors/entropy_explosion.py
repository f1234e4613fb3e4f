"""Entropy explosion: the policy becomes random, and the reward does not pay for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.detectors.reward import REWARD, Level, Reward
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.units import Unit, quantity

ENTROPY = "entropy_nats"

_CALM = 1.25
_LEAST = 0.7
_REWARDS_BEFORE, _REWARDS_NOW = 20, 10


@dataclass(frozen=True, kw_only=True)
class EntropyExplosionSettings(Settings):
    """Limits of ``entropy_explosion``. All growth is measured against the run's own start, or its lowest level."""

    growth_warning: float = setting(
        2.0, "ratio", "Growth of the entropy, without any gain in reward, that is a warning.")
    rise_warning_nats: float = setting(0.5, "nats", "The same growth in nats; both are needed.")
    growth_critical: float = setting(3.0, "ratio", "Growth that is critical when the reward falls with it.")
    rise_critical_nats: float = setting(1.0, "nats", "The same growth in nats; both are needed.")
    absurd_nats: float = setting(
        5.0, "nats", "Entropy that is critical once it has grown by half: as if 150 tokens were equally likely.")
    reward_share: float = setting(
        0.05, "ratio", "Gain, as a share of the span of scores, by which a reward must have risen to pay for a jump "
                       "within few steps, when its noise is not known yet.")


SPEC = DetectorSpec(
    id="entropy_explosion",
    title="Entropy explosion",
    severity=Severity.CRITICAL,
    required=((ENTROPY,),),
    optional=(*REWARD, "score/max", "score/min"),
    wake="actor/entropy is logged by every PPO-like trainer (actor/entropy_loss in old versions).",
    meaning="The entropy of the policy grows far beyond where the run started, and the reward does not rise with it: "
            "the policy becomes random.",
    impact="Responses turn into noise and run into the length limit. A policy that has lost its language does not find "
           "back; steps after the growth began are lost.",
    diagnosis=(
        "Compare actor/entropy with critic/score/mean: entropy that grows by half while the reward climbs is "
        "exploration, and fine.",
        "Read a few responses of the last steps: mixed languages, broken words or endless text confirm it.",
        "A jump within a few steps: look at actor/grad_norm, actor/ppo_kl and the learning rate of the same steps.",
        "A slow growth over hundreds of steps: look at the entropy bonus and the upper clip bound.",
    ),
    actions=(
        "stop and resume from a checkpoint before the growth (trainer.resume_mode=resume_path, "
        "trainer.resume_from_path)",
        "set actor_rollout_ref.actor.entropy_coeff=0, or a tenth of what it is",
        "lower actor_rollout_ref.actor.clip_ratio_high towards actor_rollout_ref.actor.clip_ratio_low",
        "lower actor_rollout_ref.actor.optim.lr, and check actor_rollout_ref.actor.grad_clip",
        "hold the policy to its reference: actor_rollout_ref.actor.use_kl_loss=True",
    ),
    misses="A policy that was random from the start, growth below a doubling or below half a nat, and growth while the "
           "reward still rises.",
    source="Public reports: clip-higher or an entropy bonus let entropy grow to 2 nats within 1000 steps and quality "
           "fell; maintainers call a rise fine while it stays below about 1 nat. Healthy clip-higher runs grow by a "
           "half.",
    guide="-",
    panel=(ENTROPY, REWARD[0]),
    rise_steps=3,
    clear_steps=8,
    under=("non_finite",),
)


class _Left(NamedTuple):
    """The last step at which the entropy was usual, and the reward then."""

    step: int
    reward: float


class EntropyExplosion(Detector):
    """Entropy against the run's own start, with the reward as a second sign.

    *Growth*: the median over five steps is above twice the start (or the lowest level since, but at least 70 % of
    the start) and half a nat above it, and the reward has not risen since the entropy was last usual. *Jump*: two
    values in a row at three times the usual and a nat above it, from the third step on; that needs no confirmation.
    Without any reward the growth alone decides. A false alarm would stop a run that explores, which is wanted.

    >>> from monitor.model import Observation
    >>> detector = EntropyExplosion()
    >>> for step, (entropy, score) in enumerate([(0.3, 0.5), (0.5, 0.45), (1.6, 0.3), (3.0, 0.1)], start=1):
    ...     verdict = detector.update(Observation("run", step, 0.0, {"entropy_nats": entropy, "score/mean": score}))
    >>> verdict.status.name, verdict.hard
    ('CRITICAL', True)
    """

    spec = SPEC
    settings_type = EntropyExplosionSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(EntropyExplosionSettings, self._settings)
        self._level = Level()
        self._start = NAN  # the lesser of the first two values, for what happens before the level is known
        self._before = NAN  # the value before this one
        self._reward = Reward()
        self._left: _Left | None = None  # set while the entropy is not usual
        self._usual_step: int | None = None
        self._calm: Verdict | None = None  # the latest verdict that is no finding; renewed every few steps
        self._age = 0

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the entropy of the row."""
        values = observation.values
        entropy = values.get(ENTROPY, NAN)
        if entropy != entropy:
            return None
        self._reward.add(values)
        track = self._level
        track.add(entropy)
        before, self._before = self._before, entropy
        both = min(entropy, before) if before == before else entropy
        known = track.first == track.first
        if known:
            # A median of values that were rising already is no start.
            first = min(track.first, _CALM * self._start)
            base, level = max(min(track.low, first), _LEAST * first), track.now
        else:
            # Until the median of five is known two values in a row must agree.
            if self._age < 2:
                self._start = both
            base, level = self._start, both
        if entropy <= _CALM * base and level <= _CALM * base:
            self._left, self._usual_step = None, observation.step
        elif self._left is None:
            usual = self._usual_step if self._usual_step is not None else observation.step
            self._left = _Left(usual, self._reward.level(_REWARDS_BEFORE))
        limit = max(self._s.growth_warning * base, base + self._s.rise_warning_nats)
        finding = self._judge(observation.step, level, both if before == before else NAN, base, limit)
        self._age += 1
        if finding is not None:
            self._calm = None
            return finding
        if self._calm is None or self._age % 5 == 0:
            self._calm = Verdict(
                Status.OK if known else Status.WARMING, signal=ENTROPY,
                score=min(0.99, max(0.0, level / limit)) if limit > 0 else 0.0,  # an estimate may be below 0
                value=level, threshold=limit,
                reason=f"Entropy is {level:.3g} nats; growth is judged together with the reward from {limit:.3g} nats "
                       f"on.")
        return self._calm

    def _judge(self, step: int, level: float, both: float, base: float, limit: float) -> Verdict | None:
        track, s = self._level, self._s
        if both >= max(s.growth_critical * base, base + s.rise_critical_nats) and not self._jump_paid():
            return self._finding(step, both, base, limit, critical=True, hard=True)
        if level >= limit and level >= 0.8 * track.high:
            change, blur = self._change()
            if not change > blur:
                grown = level >= s.growth_critical * base and level >= base + s.rise_critical_nats
                critical = (grown and not change > -blur) or (level >= s.absurd_nats and level >= 1.5 * base)
                return self._finding(step, level, base, limit, critical=critical, hard=False)
        return None

    def _change(self) -> tuple[float, float]:
        """Change of the reward since the entropy was last usual, and how much of it may be noise; NaN without one."""
        before = self._left.reward if self._left is not None else NAN
        return self._reward.level(_REWARDS_NOW) - before, self._reward.blur(_REWARDS_NOW, _REWARDS_BEFORE, 1.5)

    def _jump_paid(self) -> bool:
        """Whether the reward has risen within the few steps of a jump."""
        before = self._left.reward if self._left is not None else NAN
        span = self._reward.span()
        scale = span if span > 0 else abs(before)
        return self._reward.level(2) - before > self._s.reward_share * scale

    def _finding(self, step: int, level: float, base: float, limit: float, *, critical: bool, hard: bool) -> Verdict:
        left = self._left or _Left(step, NAN)
        change = self._reward.level(2 if hard else _REWARDS_NOW) - left.reward
        since = min(left.step, step)  # a restart may have set the counter back
        reward = f"the reward changed by {change:+.3g}" if change == change else "the reward is not logged"
        return Verdict(
            Status.CRITICAL if critical else Status.WARNING, score=max(1.0, level / limit) if limit > 0 else 1.0,
            since_step=since, hard=hard, signal=ENTROPY, value=level, threshold=limit,
            reason=f"Entropy grew to {quantity(level, Unit.NATS)} from {quantity(base, Unit.NATS)} since step {since} "
                   f"while {reward}: the policy becomes random.",
            evidence={"entropy": level, "entropy_before": base, "reward_change": change})
