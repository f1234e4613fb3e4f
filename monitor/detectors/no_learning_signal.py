"""No learning signal: all answers score the same, so there is nothing to learn from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from monitor.catalog import HAS_CRITIC_SERIES
from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import MAD_TO_SIGMA, median
from monitor.units import quantity

MEAN, LOW, HIGH = "score/mean", "score/min", "score/max"
ADVANTAGES = ("advantage/max", "advantage/min")
DEVIATION, TIED = "reward_deviation", "tied_groups_ratio"

_SAME = 1e-6  # relative difference of two scores that are equal but for their rounding
_NO_ADVANTAGE = 1e-4  # a group with one answer that differs has a normalised advantage above 0.1
_ADVANTAGE = 0.1  # above what rounding makes of a tie when it is divided by its own deviation
_RATE_MEMORY = 200


@dataclass(frozen=True, kw_only=True)
class NoLearningSignalSettings(Settings):
    """Limits of ``no_learning_signal``."""

    steps_warning: float = setting(
        5.0, "steps", "Consecutive steps without any difference that are a finding; critical at once in a run that had "
                      "a signal before.")
    steps_critical: float = setting(
        8.0, "steps", "The same that is critical in a run that never had a signal: a hard task and a small batch may "
                      "tie for some steps.")
    chance: float = setting(
        1e-6, "ratio", "In a run whose batches tie at times, a row of ties counts when its odds are below this.")
    near_top: float = setting(
        0.75, "ratio", "Place of the mean score between the lowest and the highest score ever seen from which on a tie "
                       "is success.")
    solved_score: float = setting(
        1.0, "score", "Score that is taken for success where it is the only one ever seen; at most a warning.")


SPEC = DetectorSpec(
    id="no_learning_signal",
    title="No learning signal",
    severity=Severity.CRITICAL,
    required=(("advantage/max", "score/max", TIED, DEVIATION),),
    optional=("advantage/min", LOW, MEAN, DEVIATION, TIED),
    wake="critic/advantages/max and critic/score/max are logged by every trainer; if they are missing, the log is not "
         "verl's training log.",
    meaning="The answers to a prompt all score the same, in every group and step after step. Advantages compare "
            "answers, so they are all zero.",
    impact="The policy gradient is zero: at best the run burns GPUs, at worst the KL or entropy term alone moves the "
           "model.",
    diagnosis=(
        "See whether the score is always the same number, always 0, or varies in the batch but not inside groups: the "
        "reason says which.",
        "Always the same number: call the reward function by hand with an answer that is right. A parser that finds "
        "no answer, a time-out and an unreachable reward service all return a constant.",
        "Always 0 with response_length/clip_ratio near 1: the answers are cut before they end.",
        "Ties only inside groups: the answers of a group are copies, or the reward depends on the prompt alone.",
    ),
    actions=(
        "repair the reward function (reward.custom_reward_function.path and .name) or the reward service that it calls",
        "give answers room to end (data.max_response_length)",
        "sample several different answers to a prompt: actor_rollout_ref.rollout.n of 4 or more, "
        "actor_rollout_ref.rollout.temperature at 1.0",
        "leave out prompts that are always or never solved (algorithm.filter_groups.enable=True with DAPO, or a data "
        "set of fitting difficulty in data.train_files)",
    ),
    misses="A tie at the top of the scores, which is success; a reward that varies without meaning anything; runs in "
           "which some batches tie, until a row of ties is too long for chance. Loss terms other than the reward, such "
           "as distillation, are not looked at: where they alone train, switch this detector off.",
    source="Five steps: runs reported in public were dead from their first step, and none recovered. Healthy runs near "
           "their ceiling tie on up to 40 % of their steps, at most four in a row.",
    guide="-",
    panel=ADVANTAGES,
    rise_steps=1,
    clear_steps=3,
    under=("non_finite",),
)


class NoLearningSignal(Detector):
    """Counts consecutive steps on which nothing told one answer from another.

    Advantages of zero are a tie; so is a batch in which every answer has the same score, even if a critic's whitened
    advantages are not zero. A run that ties at times, as near its ceiling, must tie for longer than chance explains.
    Ties are success when the mean score lies near the highest score ever seen and not below what was usual before. A
    false alarm stops a run that has learned its task or only waits for its first success.

    >>> from monitor.model import Observation
    >>> detector = NoLearningSignal()
    >>> for step in range(8):
    ...     verdict = detector.update(Observation("run", step, 0.0, {"score/max": -1.0, "score/min": -1.0}))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = NoLearningSignalSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(NoLearningSignalSettings, self._settings)
        self._critic = False
        self._streak, self._since = 0, 0
        self._tied_before = self._steps_before = 0  # before the present streak
        self._needed = self._s.steps_warning
        self._bottom = self._top = NAN  # lowest and highest score ever seen
        self._means: deque[float] = deque(maxlen=50)  # of steps with a signal

    def update(self, observation: Observation) -> Verdict | None:
        """Judge whether the row's answers differ."""
        values = observation.values
        self._critic = self._critic or not HAS_CRITIC_SERIES.isdisjoint(values)
        high, low = values.get(HIGH, NAN), values.get(LOW, NAN)
        if high == high and not self._top >= high:
            self._top = high
        if low == low and not self._bottom <= low:
            self._bottom = low
        tied = self._tied(values, high, low)
        if tied is None:
            return None
        mean = values.get(MEAN, NAN)
        if not tied:
            if mean == mean:
                self._means.append(mean)
            self._end_of_streak()
            return _WELL
        if self._streak == 0:
            self._since, self._needed = observation.step, self._enough()
        self._since = min(self._since, observation.step)
        self._streak += 1
        return self._judge(values, high, low, mean)

    def _tied(self, values: Mapping[str, float], high: float, low: float) -> bool | None:
        """Whether no answer differs from another; None when the row does not say."""
        spread = high - low
        constant = spread <= _SAME * max(abs(high), abs(low)) if spread == spread else None
        if self._critic:  # a whitened advantage is never zero, and a group may have one answer only
            return constant
        size = NAN
        for series in ADVANTAGES:
            value = abs(values.get(series, NAN))
            if value == value and not size >= value:
                size = value
        if size == size:
            if constant:
                return size < _ADVANTAGE
            return size <= _NO_ADVANTAGE * min(1.0, spread) if spread == spread else size <= _SAME
        ratio, deviation = values.get(TIED, NAN), values.get(DEVIATION, NAN)
        if ratio == ratio:
            return ratio >= 1.0 - _SAME
        if deviation == deviation:
            return deviation <= _SAME * max(1.0, abs(high), abs(low)) if spread == spread else deviation == 0.0
        return constant

    def _enough(self) -> float:
        """Ties in a row that this run's habits do not explain."""
        if self._steps_before == 0:
            return self._s.steps_warning
        rate = (self._tied_before + 1) / (self._steps_before + 2)
        return max(self._s.steps_warning, math.log(self._s.chance) / math.log(rate))

    def _end_of_streak(self) -> None:
        self._tied_before += self._streak
        self._steps_before += self._streak + 1
        self._streak = 0
        if self._steps_before > _RATE_MEMORY:
            self._tied_before, self._steps_before = self._tied_before // 2, self._steps_before // 2

    def _judge(self, values: Mapping[str, float], high: float, low: float, mean: float) -> Verdict:
        level = mean if mean == mean else high
        signal = _signal(values)
        had_signal = self._steps_before > 0
        if had_signal and self._is_success(level):
            return Verdict(Status.OK, signal=signal, value=values[signal],
                           reason=f"All answers score the same near the top ({quantity(level)}): the task is solved.")
        if self._streak < self._needed:
            return Verdict(Status.OK if had_signal else Status.WARMING, score=min(0.99, self._streak / self._needed),
                           signal=signal, value=values[signal],
                           reason=f"No answer differed from another for {self._streak} step(s).")
        constant = high - low <= _SAME * max(abs(high), abs(low))
        solved = constant and not had_signal and abs(level - self._s.solved_score) <= _SAME
        critical = not solved and (constant if had_signal else self._streak >= self._s.steps_critical)
        return Verdict(
            Status.CRITICAL if critical else Status.WARNING, score=max(1.0, self._streak / self._needed),
            since_step=self._since, signal=signal, value=values[signal],
            reason=f"{_what(constant, level, solved)}, {self._streak} steps in a row since step {self._since}: "
                   f"nothing tells a good answer from a bad one, so the policy learns nothing.",
            evidence={"steps": float(self._streak), "score_mean": mean, "score_max": high, "score_min": low,
                      "gradient_norm": values.get("gradient_norm/actor", NAN)})

    def _is_success(self, level: float) -> bool:
        """Whether answers tie where the run has learned to be: near the top, and not below what was usual."""
        reach = self._top - self._bottom
        if not reach > 0.0 or level - self._bottom < self._s.near_top * reach:
            return False
        usual = median(self._means)
        spread = MAD_TO_SIGMA * median([abs(mean - usual) for mean in self._means])
        return not level < usual - max(2 * spread, 0.05 * reach)


_WELL = Verdict(Status.OK, reason="Answers score differently; there is something to learn.")


def _signal(values: Mapping[str, float]) -> str:
    return next(s for s in (MEAN, HIGH, *ADVANTAGES, TIED, DEVIATION) if values.get(s, NAN) == values.get(s, NAN))


def _what(constant: bool, level: float, solved: bool) -> str:
    if not constant:
        where = f" (mean {quantity(level)})" if level == level else ""
        return f"Scores differ between prompts{where} but all answers to a prompt tie"
    if level == 0.0:
        return "The reward is 0 for every answer"
    return f"The reward is constant at {quantity(level)} for every answer" + (
        " (solved from the start, or not told apart)" if solved else "")
