"""Response length: answers run into the limit, grow without end, or shrink to a stub."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.detectors.reward import REWARD, Level, Reward
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import median, noise
from monitor.units import Unit, quantity
from monitor.verl_config import Value

LENGTH, LONGEST, CUT = "response_length_tokens/mean", "response_length_tokens/max", "response_clip_ratio"
VALID_LENGTH, VALID_CUT = "response_length_non_aborted_tokens/mean", "response_non_aborted_clip_ratio"

_BLOCK = 10
_KNOWN_BLOCKS = 8  # blocks that a growth within few steps is judged by
_NOISE_SIGMAS = 7.0  # of the logarithm of a block
_NOW = 10
"""Rewards taken together for the reward now."""


@dataclass(frozen=True, kw_only=True)
class ResponseLengthSettings(Settings):
    """Limits of ``response_length``. Levels are medians over five steps."""

    cut_warning: float = setting(
        0.2, "ratio", "Share of responses cut at the limit that is a warning when it has risen from near nothing.")
    cut_paid: float = setting(0.25, "ratio", "The same while the reward rises.")
    cut_rise: float = setting(0.15, "ratio", "Rise of that share above its lowest level that counts; it must also have "
                                             "doubled.")
    cut_critical: float = setting(0.9, "ratio", "Share of cut responses that is critical when it has risen.")
    dead_cut: float = setting(
        0.95, "ratio", "Share of cut responses that is critical from the first steps on when the reward is at its "
                       "floor.")
    dead_position: float = setting(
        0.2, "ratio", "Mean reward, between the worst score and the best, that counts as its floor.")
    toy_tokens: float = setting(
        64.0, "tokens", "Longest response below which a cut response means nothing: such limits are set on purpose.")
    growth_falling: float = setting(1.75, "ratio", "Growth of the length that is a warning while the reward falls.")
    growth_fast: float = setting(1.75, "ratio", "The same within fast_steps, whatever the reward does.")
    growth_flat: float = setting(2.5, "ratio", "The same within window_steps while the reward stays.")
    growth_paid: float = setting(3.1, "ratio", "The same while the reward rises with it.")
    window_steps: float = setting(250.0, "steps", "Steps within which the growth must have happened.")
    fast_steps: float = setting(100.0, "steps", "Steps within which no reasoning run was seen to grow so.")
    stub_ratio: float = setting(
        0.15, "ratio", "Length, as a share of what it was, that is a stub unless the reward rises.")


SPEC = DetectorSpec(
    id="response_length",
    title="Response length out of hand",
    severity=Severity.CRITICAL,
    required=((CUT, VALID_CUT, LENGTH, VALID_LENGTH),),
    optional=(CUT, VALID_CUT, LENGTH, VALID_LENGTH, LONGEST, *REWARD, "score/max", "score/min"),
    wake="response_length/mean and response_length/clip_ratio are logged by every trainer since verl 0.3.",
    meaning="Responses run into the length limit, grow far beyond what they were, or shrink to a few tokens, and what "
            "is scored is no longer an answer.",
    impact="A cut response has no answer to score, so its reward is noise or the floor; ever longer responses also "
           "make every step slower. A stub teaches nothing.",
    diagnosis=(
        "The reason says which it is: cut at the limit, grown, or shrunk.",
        "Read a few of the longest responses of the last steps: a repeated sentence up to the limit is a broken "
        "policy, an unfinished argument is a limit that is too tight.",
        "Cut from the first step on: compare data.max_response_length with what the model needs, and check the chat "
        "template and the stop tokens.",
        "Length and reward grow together: see whether validation grows too, or only the score of longer answers.",
    ),
    actions=(
        "cut from the start: raise data.max_response_length, or fix the stop token and the chat template",
        "penalise length near the limit (reward.reward_kwargs.overlong_buffer_cfg.enable=True with the dapo reward "
        "manager)",
        "grown together with the reward: take the length out of the reward, or normalise it by length",
        "broken policy: resume from a checkpoint before (trainer.resume_mode=resume_path, trainer.resume_from_path) "
        "with a lower actor_rollout_ref.actor.optim.lr and actor_rollout_ref.actor.entropy_coeff=0",
        "keep actor_rollout_ref.rollout.temperature at 1.0 or below, and actor_rollout_ref.actor.clip_ratio_high near "
        "clip_ratio_low",
    ),
    misses="Responses cut from the first step on while the reward is above a fifth of its span; growth slower than "
           "threefold in 250 steps; limits below 64 tokens when responses were cut from the start.",
    source="Public reports: a fifth of the responses cut goes with weak reward, nearly all with a dead run. Healthy "
           "reasoning runs grow two- to threefold over hundreds of steps while the reward rises. DAPO cuts the length "
           "reward before the limit.",
    guide="-",
    panel=(LENGTH, CUT),
    rise_steps=2,
    clear_steps=12,
    under=("non_finite",),
)


class _Left(NamedTuple):
    """The last step at which the length was usual, and the reward then."""

    step: int
    reward: float
    rewards: int  # taken together for it
    most: float  # greatest length until then


class ResponseLength(Detector):
    """Share of cut responses and mean length, against the run's own history, with the reward as a second sign.

    *Cut*: a share that has risen to 20 % (25 % while the reward rises), critical from 90 %, or from 50 % under a
    falling reward; and a share near 1 from the third step on when the reward lies at its floor. *Grown*: to 1.75 times
    within 100 steps, or within 250 steps to 1.75 times under a falling reward, 2.5 times under a flat one, 3.1 times
    under a rising one. *Stub*: 15 % or less of what it was while the reward does not rise. A false alarm would stop a
    reasoning run that learns to think longer.

    >>> from monitor.model import Observation
    >>> detector = ResponseLength()
    >>> row = {"response_length_tokens/mean": 255.0, "response_length_tokens/max": 256.0, "response_clip_ratio": 0.98,
    ...        "score/mean": 0.01, "score/max": 1.0, "score/min": 0.0}
    >>> [detector.update(Observation("run", step, 0.0, row)).status.name for step in (1, 2, 3)]
    ['WARMING', 'WARMING', 'CRITICAL']
    """

    spec = SPEC
    settings_type = ResponseLengthSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(ResponseLengthSettings, self._settings)
        self._cut = Level()
        self._full = 0  # steps in a row with nearly all responses cut
        self._full_since = 0
        self._length = Level()
        self._block: list[float] = []  # lengths of the block that is not full yet
        self._blocks: deque[float] = deque(maxlen=max(2, int(self._s.window_steps) // _BLOCK))
        self._least = self._most = NAN  # of the blocks
        self._longest = self._peak = 0.0  # longest response of the last row, and of all
        self._limit = NAN  # data.max_response_length, where it is known
        self._reward = Reward()
        self._first_reward = NAN
        self._cut_left: _Left | None = None
        self._grown_left: _Left | None = None
        self._shrunk_left: _Left | None = None
        self._step = 0
        self._calm: Verdict | None = None  # the latest verdict that is no finding; renewed every few steps
        self._age = 0

    def configured(self, config: Mapping[str, Value]) -> None:
        """The limit says what was cut."""
        for key in ("actor_rollout_ref.rollout.response_length", "data.max_response_length"):
            value = config.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                self._limit = float(value)

    def restarted(self, time_seconds: float) -> None:
        """A new start may have another limit."""
        self._peak = 0.0

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the lengths of the row."""
        values = observation.values
        cut = values.get(VALID_CUT, NAN)
        if cut != cut:
            cut = values.get(CUT, NAN)
        length = values.get(VALID_LENGTH, NAN)
        if length != length:
            length = values.get(LENGTH, NAN)
        if cut != cut and length != length:
            return None
        self._step = observation.step
        self._reward.add(values)
        if len(self._reward) == _NOW and self._first_reward != self._first_reward:
            self._first_reward = self._reward.level(_NOW)
        longest = values.get(LONGEST, length)
        if longest == longest:
            self._longest, self._peak = longest, max(longest, self._peak)
            # V1 counts what is as long as the longest of the batch, which need not be cut: then the share says nothing.
            if longest < (0.9 * self._limit if self._limit == self._limit else 0.75 * self._peak):
                cut = NAN
        worst: Verdict | None = None
        if cut == cut:
            worst = self._judge_cut(cut)
        if length == length:
            worst = self._worse(worst, self._judge_length(length))
        self._age += 1
        if worst is not None:
            self._calm = None
            return worst
        if self._calm is None or self._age % 5 == 0:
            self._calm = self._well(cut, length)
        return self._calm

    def _well(self, cut: float, length: float) -> Verdict:
        has_length, level = length == length, self._cut.now
        tokens = f"Responses have {length:.4g} tokens on average" if has_length else "Responses are scored"
        share = f"{cut:.0%} of them are cut at the limit" if cut == cut else "how many are cut is not logged"
        return Verdict(
            Status.OK if self._length.first == self._length.first or level == level else Status.WARMING,
            score=min(0.99, level / self._s.cut_warning) if level >= 0 and not self._toy() else 0.0,
            signal=LENGTH if has_length else CUT, value=length if has_length else cut,
            threshold=NAN if has_length else self._s.cut_warning, reason=f"{tokens}; {share}.")

    @staticmethod
    def _worse(first: Verdict | None, second: Verdict | None) -> Verdict | None:
        return max((v for v in (first, second) if v is not None), key=lambda v: (v.status, v.score), default=None)

    def _toy(self) -> bool:
        return 0.0 < self._longest < self._s.toy_tokens

    # --- cut at the limit

    def _judge_cut(self, cut: float) -> Verdict | None:
        track = self._cut
        track.add(cut)
        if cut >= self._s.dead_cut:
            self._full_since = min(self._full_since, self._step) if self._full else self._step
            self._full += 1
            dead = self._judge_dead(cut) if self._full >= 3 else None
            if dead is not None:
                return dead
        else:
            self._full = 0
        low, level = track.low, track.now
        if low != low:
            return None
        limit = max(self._s.cut_warning, low + self._s.cut_rise, 2 * low)
        if level < limit / 2:
            self._cut_left = None
            return None
        if self._cut_left is None:
            self._cut_left = self._leave()
        if level < limit or track.latest_low < limit / 2:
            return None
        change, blur = self._change(self._cut_left)
        paid = change > 1.5 * blur or self._reward.position() >= 0.85
        if paid and level < self._s.cut_paid:
            return None
        critical = (level >= self._s.cut_critical and not paid) or (level >= 0.5 and change < -3 * blur)
        left = min(self._cut_left.step, self._step)
        return Verdict(
            Status.CRITICAL if critical else Status.WARNING, score=max(1.0, level / limit), since_step=left,
            signal=CUT, value=level, threshold=limit,
            reason=f"{level:.0%} of the responses are cut at the limit of {quantity(self._longest, Unit.TOKENS)}, up "
                   f"from {low:.0%}, since step {left}{_told(change)}: cut responses have no answer to score.",
            evidence={"cut_ratio": level, "cut_ratio_lowest": low, "reward_change": change})

    def _judge_dead(self, cut: float) -> Verdict | None:
        if self._toy() or not self._longest or not len(self._reward):
            return None
        span, position = self._reward.span(), self._reward.position()
        gained = self._reward.level(_NOW) - self._first_reward > self._reward.blur(_NOW, _NOW, 2.0)
        # Scores that are all equal, or a reward alone that never moves, are a floor too.
        floor = position < self._s.dead_position or span == 0 or (span != span and self._reward.sigma() == 0)
        if gained or not floor:
            return None
        since = self._full_since
        return Verdict(
            Status.CRITICAL, score=max(1.0, 2 * cut), since_step=since, signal=CUT, value=cut,
            threshold=self._s.dead_cut,
            reason=f"{cut:.0%} of the responses are cut at {quantity(self._longest, Unit.TOKENS)} since step {since} "
                   f"and the mean reward is {quantity(self._reward.level())}, its floor: no answer is ever complete.",
            evidence={"cut_ratio": cut, "reward": self._reward.level(), "longest": self._longest})

    # --- mean length

    def _judge_length(self, length: float) -> Verdict | None:
        track = self._length
        track.add(length)
        self._block.append(length)
        if len(self._block) == _BLOCK:
            self._blocks.append(median(self._block))
            self._block = []
            self._least, self._most = min(self._blocks), max(self._blocks)
        least, level = self._least, track.now
        if least != least or level != level:
            return None
        if level <= 1.25 * least:
            self._grown_left = None
        elif level > 1.4 * least and self._grown_left is None:
            self._grown_left = self._leave()
        most = min(self._most, 1.5 * track.first)
        if level >= 0.67 * most:
            self._shrunk_left = None
        elif level < 0.5 * most and self._shrunk_left is None:
            self._shrunk_left = self._leave()
        if level >= self._s.growth_falling * least and self._grown_left is not None:
            return self._judge_growth(level, least, self._grown_left)
        if level <= self._s.stub_ratio * most and self._shrunk_left is not None:
            return self._judge_stub(level, most, self._shrunk_left)
        return None

    def _judge_growth(self, level: float, least: float, left: _Left) -> Verdict | None:
        change, blur = self._change(left)
        # A slow climb is seen in many steps only, a fall must be told from few.
        steps = len(self._reward)
        paid = (change > 1.5 * blur
                or self._reward.level(steps) - left.reward > self._reward.blur(steps or 1, left.rewards or 1))
        limit = self._s.growth_paid if paid else self._s.growth_flat
        # A length that comes and goes has been as large before.
        if change < -4 * blur and level >= 1.15 * left.most:
            limit = self._s.growth_falling
        growth = level / least if least > 0 else math.inf
        if growth < limit:
            blocks = list(self._blocks)[-int(self._s.fast_steps) // _BLOCK:]
            recent = min(blocks)
            if level < self._s.growth_fast * recent or level < 1.15 * left.most or len(blocks) < _KNOWN_BLOCKS:
                return None
            # A length that is noisy from block to block reaches that by itself.
            if math.log(level / recent) < _NOISE_SIGMAS * noise([math.log(block) for block in blocks if block > 0]):
                return None
            limit, growth = self._s.growth_fast, level / recent
        if self._toy():
            return None
        since = min(left.step, self._step)
        meaning = "see whether longer answers are better, or only score better" if paid else \
            "the policy writes ever more and gains nothing"
        return Verdict(
            Status.WARNING, score=max(1.0, growth / limit), since_step=since,
            signal=LENGTH, value=level, threshold=limit * least,
            reason=f"Responses grew to {quantity(level, Unit.TOKENS)} on average, {growth:.2g} times their length "
                   f"before step {since}{_told(change)}: {meaning}.",
            evidence={"length": level, "length_before": least, "reward_change": change})

    def _judge_stub(self, level: float, most: float, left: _Left) -> Verdict | None:
        change, blur = self._change(left)
        if change > 1.5 * blur or most < self._s.toy_tokens / 2:
            return None
        since = min(left.step, self._step)
        return Verdict(
            Status.CRITICAL if change < -3 * blur else Status.WARNING, since_step=since,
            score=max(1.0, self._s.stub_ratio * most / max(level, 1e-9)), signal=LENGTH, value=level,
            threshold=self._s.stub_ratio * most,
            reason=f"Responses shrank from {quantity(most, Unit.TOKENS)} to {quantity(level, Unit.TOKENS)} on average "
                   f"since step {since}{_told(change)}: the policy answers with a stub.",
            evidence={"length": level, "length_before": most, "reward_change": change})

    def _leave(self) -> _Left:
        count = len(self._reward)
        return _Left(self._step, self._reward.level(count), count, self._most)

    def _change(self, left: _Left) -> tuple[float, float]:
        """Change of the reward since then, and one standard error of it; NaN without a reward."""
        return self._reward.level(_NOW) - left.reward, self._reward.blur(_NOW, left.rewards or 1)


def _told(change: float) -> str:
    return f", while the reward changed by {change:+.3g}" if change == change else ""
