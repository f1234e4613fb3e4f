"""Entropy collapse: the policy stops exploring, and the reward does not pay for it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.detectors.reward import REWARD, Reward, mean
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import median
from monitor.units import Unit, quantity

ENTROPY, SPREAD = "entropy_nats", "advantage/max"

_BLOCK = 5
_LOOKBACK = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Blocks that an earlier entropy may lie back."""
_REWARD_BLOCKS = 12
"""Blocks whose rewards are taken together, at most."""
_REWARD_BACK = 24
"""Blocks that an earlier reward must lie back, where the run is as long: a gain is not visible within few steps."""
_NEAR_HIGHEST = 0.7


@dataclass(frozen=True, kw_only=True)
class EntropyCollapseSettings(Settings):
    """Limits of ``entropy_collapse``. Levels are medians over five steps."""

    fall_ratio: float = setting(
        0.3, "ratio", "Entropy, as a share of an earlier level, that is a collapse when the reward gained nothing.")
    slow_ratio: float = setting(
        0.6, "ratio", "The same for a fall from near the run's highest level that lasts long and goes on.")
    slow_steps: float = setting(100.0, "steps", "What counts as long.")
    critical_ratio: float = setting(0.2, "ratio", "Share of an earlier level that is critical.")
    critical_nats: float = setting(0.5, "nats", "Entropy above this is never critical, whatever it was before.")
    converged_ratio: float = setting(
        0.15, "ratio", "An earlier level below this share of the run's start is not compared with any more: such a run "
                       "has converged already.")
    ceiling: float = setting(
        0.85, "ratio", "Mean reward, between the worst score and the best, from which on low entropy is success.")
    spread_ratio: float = setting(
        0.25, "ratio", "Largest advantage, as a share of its earlier level, that shows that answers no longer differ "
                       "although the reward is far from its ceiling.")


SPEC = DetectorSpec(
    id="entropy_collapse",
    title="Entropy collapse",
    severity=Severity.CRITICAL,
    required=((ENTROPY,), REWARD),
    optional=(SPREAD, "score/max", "score/min"),
    wake="actor/entropy is logged by every PPO-like trainer (actor/entropy_loss in old versions), critic/score/mean "
         "with it.",
    meaning="The entropy of the policy has fallen to a fraction of what it was, and the reward did not rise with it: "
            "the policy settles on a few answers that are no better than the ones it gave up.",
    impact="A policy that no longer explores cannot find better answers. All responses to a prompt become alike, so "
           "advantages vanish and the rest of the run teaches nothing.",
    diagnosis=(
        "Compare actor/entropy with critic/score/mean: falling entropy under a rising reward is convergence.",
        "Read a few responses of the last steps: one stock answer, or the same beginning every time, confirms it.",
        "Look at critic/advantages/max and the spread of scores: near zero means that the answers no longer differ.",
        "A KL to the reference that climbs at the same time says that the policy also left its starting point.",
    ),
    actions=(
        "resume from a checkpoint before the fall (trainer.resume_mode=resume_path, trainer.resume_from_path)",
        "raise actor_rollout_ref.actor.clip_ratio_high (0.28 with clip_ratio_low 0.2 is usual), so that rare tokens "
        "may become more likely",
        "add a small entropy bonus: actor_rollout_ref.actor.entropy_coeff=0.001, and watch that entropy does not grow",
        "lower actor_rollout_ref.actor.optim.lr, and keep actor_rollout_ref.rollout.temperature at 1.0",
        "sample more answers for each prompt (actor_rollout_ref.rollout.n) and drop prompts whose answers all score "
        "the same (algorithm.filter_groups.enable=True)",
    ),
    misses="A collapse while the reward still rises, or that ends above 85 % of the best score. A fall slower than to "
           "60 % within 240 steps or since the run's start.",
    source="Maintainers of RL trainers: a converged easy task ends at low entropy too, so low entropy counts only "
           "with a reward or an advantage spread that falls or stays. Healthy runs of 0.5 to 7B models fall to a "
           "tenth of their start while the score climbs.",
    guide="-",
    panel=(ENTROPY, REWARD[0]),
    rise_steps=3,
    clear_steps=10,
    under=("non_finite",),
)


class _Block(NamedTuple):
    """Five steps taken together."""

    step: int
    entropy: float
    reward: float
    spread: float


class _Fall(NamedTuple):
    """A fall of the entropy that nothing paid for: since when, from which level, and what the second sign is."""

    step: int
    entropy: float
    why: str
    reward: float


class EntropyCollapse(Detector):
    """Entropy against earlier levels of the run, with a second sign.

    Five steps form a block. At the end of a block its entropy is compared with earlier ones (10 to 240 steps back, and
    the run's first): a finding when it is at 30 % or less, or at 60 % or less after a fall that took over 100 steps and
    goes on, and the reward gained nothing that can be told from its noise, or lost half of what it had gained, or the
    largest advantage fell to a quarter. At its ceiling a reward cannot rise, so nothing is a finding there.
    A false alarm would stop a run that converges well, which is what low entropy usually means.

    >>> from monitor.model import Observation
    >>> detector = EntropyCollapse()
    >>> for step in range(60):
    ...     values = {"entropy_nats": 0.6 * 0.93 ** step, "score/mean": 0.3 + 0.01 * (step % 3)}
    ...     verdict = detector.update(Observation("run", step, 0.0, values))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = EntropyCollapseSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(EntropyCollapseSettings, self._settings)
        self._open: list[_Block] = []  # steps of the block that is not full yet
        self._blocks: deque[_Block] = deque(maxlen=_LOOKBACK[-1] + _REWARD_BLOCKS)
        self._first: list[_Block] = []
        self._count = 0  # of blocks
        self._highest, self._best = NAN, NAN  # entropy of all blocks; smoothed reward of all blocks
        self._reward = Reward()
        self._fall: _Fall | None = None
        self._calm = Verdict(
            Status.WARMING, reason=f"Fewer than {_BLOCK} values of the entropy so far.", signal=ENTROPY)

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the entropy of the row."""
        values = observation.values
        entropy = values.get(ENTROPY, NAN)
        if entropy != entropy:
            return None
        self._open.append(_Block(observation.step, entropy, self._reward.add(values), values.get(SPREAD, NAN)))
        if len(self._open) == _BLOCK:
            self._close()
            if self._fall is None:
                self._calm = self._well()
        return self._calm if self._fall is None else self._finding(self._fall, observation.step)

    def _well(self) -> Verdict:
        level, limit = self._blocks[-1].entropy, self._s.fall_ratio * self._highest
        return Verdict(
            Status.OK if self._count > _LOOKBACK[0] else Status.WARMING, signal=ENTROPY, value=level, threshold=limit,
            score=min(0.99, max(0.0, limit / level)) if level > 0 else 0.0,
            reason=f"Entropy is {level:.3g} nats; it is judged together with the reward from {limit:.3g} nats on.")

    def _close(self) -> None:
        rows = self._open
        block = _Block(rows[0].step, median([r.entropy for r in rows]), mean([r.reward for r in rows]),
                       median([r.spread for r in rows if r.spread == r.spread]))
        self._open = []
        self._blocks.append(block)
        self._count += 1
        if len(self._first) < _REWARD_BLOCKS:
            self._first.append(block)
        self._highest = max(block.entropy, self._highest) if self._count > 1 else block.entropy
        if self._count % 4 == 0:
            level = mean([b.reward for b in list(self._blocks)[-4:]])
            self._best = level if self._best != self._best else max(self._best, level)
        if block.entropy <= self._s.slow_ratio * self._highest and self._count > _LOOKBACK[0]:
            self._fall = self._keep(block) if self._fall is not None else None
            self._fall = self._fall or self._find(block)
        else:
            self._fall = None

    def _keep(self, block: _Block) -> _Fall | None:
        """The finding goes on until the entropy has come back or the reward has clearly risen after all."""
        fall = cast(_Fall, self._fall)
        gain = self._reward.level(20) - fall.reward
        cleared = gain > self._reward.blur(20, 20, 6.0) and "advantage" not in fall.why
        recovered = block.entropy > 1.3 * self._s.slow_ratio * fall.entropy
        return None if cleared or recovered or self._at_ceiling() else fall

    def _at_ceiling(self) -> bool:
        return self._reward.position() >= self._s.ceiling

    def _find(self, block: _Block) -> _Fall | None:
        if self._at_ceiling():
            return None
        blocks = list(self._blocks)
        first = mean([b.entropy for b in self._first[:2]])
        for back in (*_LOOKBACK, self._count - 1):
            then = self._ago(blocks, back)
            if not then:
                continue
            start = back == self._count - 1
            level = first if start else median([b.entropy for b in then[-2:]])
            ratio = block.entropy / level if level > max(self._s.converged_ratio * first, 0.0) else math.inf
            if ratio > self._s.slow_ratio or (ratio > self._s.fall_ratio and not self._slow(blocks, back, then)):
                continue
            sign = self._second_sign(blocks, back, ratio)
            if sign is not None:
                return _Fall(then[0 if start else -1].step, level, *sign)
        return None

    def _ago(self, blocks: list[_Block], back: int) -> list[_Block]:
        """The blocks that end ``back`` blocks ago, or begin the run; none where the run is not as long."""
        count = max(2, min(_REWARD_BLOCKS, back // 3))
        if back >= self._count - 1:
            return self._first[:count] if back == self._count - 1 else []
        end = len(blocks) - back
        return blocks[max(0, end - count):end] if end > 0 else []

    def _slow(self, blocks: list[_Block], back: int, then: list[_Block]) -> bool:
        """Whether a fall is long, goes on, began near the run's highest level, and is no swing of a noisy entropy."""
        if back * _BLOCK < self._s.slow_steps or len(blocks) < 16:
            return False
        now, ago = median([b.entropy for b in blocks[-4:]]), median([b.entropy for b in blocks[-16:-10]])
        level = median([b.entropy for b in then])
        return now <= 0.9 * ago and now <= self._s.slow_ratio * level and level >= _NEAR_HIGHEST * self._highest

    def _second_sign(self, blocks: list[_Block], back: int, ratio: float) -> tuple[str, float] | None:
        """What says that the fall is no success, and the reward that it is measured by."""
        then = self._ago(blocks, back)
        now = blocks[-len(then):]
        before, after = _rewards(then), _rewards(now)
        blur = self._reward.blur(_BLOCK * len(then), _BLOCK * len(now))
        if after - before < -2 * blur:
            return f"the reward fell by {before - after:.3g}", before
        # A gain is not visible within few steps: it is looked for over many.
        long_then = self._ago(blocks, min(max(back, _REWARD_BACK), self._count - 1))
        long_before, long_after = _rewards(long_then), _rewards(blocks[-len(long_then):])
        count = _BLOCK * len(long_then)
        errors = 1.0 if ratio <= self._s.critical_ratio else 0.5
        if long_after - long_before <= errors * self._reward.blur(count, count):
            return f"the reward changed by {long_after - long_before:+.3g}", long_before
        lost = self._best - after
        if lost > max(3 * blur, 0.5 * (self._best - _rewards(self._first[:4]))):
            return f"the reward fell by {lost:.3g} from its best", after
        spread_then, spread_now = _spread(then), _spread(now[-2:])
        if ratio <= self._s.fall_ratio and 0 <= spread_now <= self._s.spread_ratio * spread_then:
            return f"the largest advantage fell from {quantity(spread_then)} to {quantity(spread_now)}", before
        return None

    def _finding(self, fall: _Fall, step: int) -> Verdict:
        level = self._blocks[-1].entropy
        ratio = level / fall.entropy
        critical = ratio <= self._s.critical_ratio and level <= self._s.critical_nats
        limit = self._s.slow_ratio * fall.entropy
        since = min(fall.step, step)  # a restart may have set the counter back
        return Verdict(
            Status.CRITICAL if critical else Status.WARNING, score=max(1.0, min(100.0, limit / max(level, 1e-9))),
            since_step=since, signal=ENTROPY, value=level, threshold=limit,
            reason=f"Entropy fell from {quantity(fall.entropy, Unit.NATS)} at step {since} to "
                   f"{quantity(level, Unit.NATS)} while {fall.why}: the policy stops exploring without getting better.",
            evidence={"entropy_before": fall.entropy, "entropy": level, "reward": self._reward.level()})


def _rewards(blocks: list[_Block]) -> float:
    return mean([b.reward for b in blocks])


def _spread(blocks: list[_Block]) -> float:
    return median([b.spread for b in blocks if b.spread == b.spread])
