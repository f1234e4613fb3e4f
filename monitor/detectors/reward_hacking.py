"""Reward hacking: the training reward rises while what it stands for falls."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from monitor.catalog import label_map
from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import MAD_TO_SIGMA, median
from monitor.units import quantity

_REWARDS = ("score/mean", "reward/mean")
_VALIDATION, _COMPONENT = "validation_score/", "reward_component/"
_OBJECTIVE = re.compile(r"(^|[^a-z])(acc|accuracy|correct|correctness)($|[^a-z])", re.IGNORECASE)
_BLOCK = 5  # steps whose mean makes one point of a reward component
_SHAPES = 16  # kinds of rows that are remembered
_MOST = 8  # validation sources, and reward components, that are looked at


@dataclass(frozen=True, kw_only=True)
class RewardHackingSettings(Settings):
    """Limits of ``reward_hacking``."""

    points: float = setting(
        5.0, "points", "Points from the best one on that are needed: validations, or means of five steps.")
    fall_z: float = setting(
        3.0, "sigmas", "Mann-Kendall statistic of the fall; of few points, 85 % of the largest that they can have.")
    rise_z: float = setting(1.6, "sigmas", "The same of the rise of the training reward.")
    fall_share: float = setting(
        0.1, "ratio", "Share of the largest score that must be lost: a slight fall is overfitting.")
    rise_share: float = setting(
        0.05, "ratio", "Share of its own largest value that the training reward, or a component, must gain.")
    noise_factor: float = setting(3.0, "ratio", "Fall and rise must be this many times the noise about their trend.")
    own_noise_factor: float = setting(
        4.5, "ratio", "The fall must be this many times the noise of all points: the best of many is high by chance.")
    scale_critical: float = setting(0.3, "ratio", "Share of the largest score that must be lost to be critical.")
    lost_critical: float = setting(
        0.5, "ratio", "Share of its gain (of its best level, where it gained little) that is lost, critical.")


SPEC = DetectorSpec(
    id="reward_hacking",
    title="Reward hacking",
    severity=Severity.WARNING,
    required=(_REWARDS,),
    optional=(),
    wake="Validation is off unless trainer.test_freq is above 0 and data.val_files is set; a reward function shows its "
         "components by returning them (reward/accuracy, reward/format). With neither there is nothing to compare "
         "with, and this detector says nothing.",
    meaning="The reward that the policy is trained on rises, while the validation score or the accuracy component of "
            "the reward falls: the policy has found a way to score that is not the task, or it overfits.",
    impact="Newer checkpoints look better and are worse.",
    diagnosis=(
        "Read answers of the last validation (trainer.log_val_generations) and of the rollout with the highest score.",
        "See which component of the reward rises: a format or length bonus that pays more than being right is the "
        "usual cause.",
        "Compare with response_length: hacks of learned reward models tend to make answers longer.",
        "If validation falls with no change of style, the policy overfits a small data set.",
    ),
    actions=(
        "stop paying for what is not the task: lower or cap the bonus in the reward function "
        "(reward.custom_reward_function.path)",
        "resume from the checkpoint with the best validation score (trainer.resume_mode=resume_path, "
        "trainer.resume_from_path)",
        "hold the policy near the reference: actor_rollout_ref.actor.use_kl_loss=True, or a larger "
        "actor_rollout_ref.actor.kl_loss_coef",
        "more or fresher prompts (data.train_files) and fewer epochs (trainer.total_epochs)",
    ),
    misses="A hack that the validation's own score rewards as well, runs with fewer than five validations, a fall of "
           "less than a tenth, and components whose names do not say which one is the task.",
    source="Mann-Kendall's and Theil-Sen's rank statistics. Validation scores of healthy runs vary by two points or "
           "so; hacks reported in public lost half of their accuracy.",
    guide="-",
    panel=_REWARDS,
    rise_steps=1,
    clear_steps=2,
    under=("non_finite", "reward_collapse"),
)


class _Series(NamedTuple):
    """What a row holds of interest."""

    validation: tuple[str, ...]
    components: tuple[str, ...]  # the one that is the task, then the others


class _Point(NamedTuple):
    step: int
    objective: float
    proxies: tuple[float, ...]  # validation: the training reward; components: the total, then the other components


class RewardHacking(Detector):
    """Two trends over the same steps, from the best point of the objective on.

    The objective is the validation score (mean over the test sets; core mean@N where logged), compared with the
    median training reward since the validation before; or the accuracy component of the reward, compared with the
    other components in means of five steps. Both trends must be monotone by rank and stand out of their own noise.
    A false alarm would send someone to look for a hack where a validation set is noisy.

    >>> from monitor.model import Observation
    >>> detector = RewardHacking()
    >>> for i in range(6):
    ...     values = {"score/mean": 0.4 + i / 10, "validation_score/task|acc|mean@1|core": 0.8 - i / 10}
    ...     verdict = detector.update(Observation("run", i, 0.0, values))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = RewardHackingSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(RewardHackingSettings, self._settings)
        self._shapes: dict[tuple[int, str], _Series] = {}  # rows that were looked through
        self._rewards: deque[float] = deque(maxlen=50)  # since the validation before
        self._judged: tuple[str, ...] = ()  # validation series that the points are made of
        self._points: deque[_Point] = deque(maxlen=16)
        self._block: list[tuple[float, ...]] = []
        self._named: tuple[str, ...] = ()  # components that the blocks are made of
        self._blocks: deque[_Point] = deque(maxlen=20)
        self._verdicts: dict[str, Verdict] = {}

    def update(self, observation: Observation) -> Verdict | None:
        """Take in the row; judge when it completes a point."""
        values = observation.values
        reward = values.get(_REWARDS[0], NAN)
        if reward != reward:
            reward = values.get(_REWARDS[1], NAN)
        if reward == reward:
            self._rewards.append(reward)
        shape = (len(values), next(reversed(cast(dict[str, float], values)), ""))
        series = self._shapes.get(shape)
        if series is None:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            series = self._shapes[shape] = _look_through(values)
        new = False
        if series.validation:
            new = self._validated(observation.step, values, series.validation)
        if series.components and reward == reward:
            new |= self._add_components(observation.step, values, series.components, reward)
        if new:
            return max(self._verdicts.values(), key=lambda v: (v.status, v.score))
        return None if self._verdicts or reward != reward else _NOTHING_YET

    def _validated(self, step: int, values: Mapping[str, float], series: tuple[str, ...]) -> bool:
        scores = [values.get(s, NAN) for s in series]
        objective = sum(scores) / len(scores)
        if objective != objective or not self._rewards:
            return False
        if series != self._judged:  # other test sets are another scale
            self._judged = series
            self._points.clear()
        _back_to(self._points, step)
        self._points.append(_Point(step, objective, (median(tuple(self._rewards)),)))
        self._rewards.clear()
        self._verdicts["validation"] = self._judge(self._points, self._judged[0], _REWARDS[:1])
        return True

    def _add_components(self, step: int, values: Mapping[str, float], names: tuple[str, ...], reward: float) -> bool:
        row = (*(values.get(s, NAN) for s in names), reward)
        if any(v != v for v in row):
            return False
        if names != self._named:
            self._named = names
            self._block.clear()
            self._blocks.clear()
        self._block.append(row)
        if len(self._block) < _BLOCK:
            return False
        objective, *others, total = (sum(column) / _BLOCK for column in zip(*self._block, strict=True))
        self._block.clear()
        _back_to(self._blocks, step)
        self._blocks.append(_Point(step, objective, (total, *others)))
        self._verdicts["components"] = self._judge(self._blocks, self._named[0], (_REWARDS[0], *self._named[1:]))
        return True

    def _judge(self, points: Sequence[_Point], series: str, proxies: tuple[str, ...]) -> Verdict:
        best = max(range(len(points)), key=lambda i: (points[i].objective, i))
        window = list(points)[best:]
        objective = points[-1].objective
        calm = Verdict(Status.OK if len(points) >= self._s.points else Status.WARMING, signal=series, value=objective,
                       reason=f"{_name(series)} is {quantity(objective)}, best {quantity(points[best].objective)}.")
        if len(window) < self._s.points:
            return calm
        scale = max(abs(p.objective) for p in points)
        if window[0].objective - max(window[-1].objective, window[-2].objective) < 0.5 * self._s.fall_share * scale:
            return calm  # for certain, and without the cost
        steps = [p.step for p in window]
        fall = _Trend(steps, [-p.objective for p in window])
        if not (fall.z >= min(self._s.fall_z, 0.85 * fall.largest_z) and fall.change >= self._s.fall_share * scale
                and fall.change >= self._s.noise_factor * fall.noise):
            return calm
        if fall.change < self._s.own_noise_factor * _bends([p.objective for p in points]):
            return calm
        trends = [_Trend(steps, [p.proxies[i] for p in window]) for i in range(len(proxies))]
        if trends[0].z < -1.0:  # all falls: a collapse, not a hack
            return calm
        rising = [i for i, t in enumerate(trends) if t.z >= self._s.rise_z and (i > 0 or len(proxies) == 1)
                  and t.change >= max(self._s.noise_factor * t.noise,
                                      self._s.rise_share * max(abs(p.proxies[i]) for p in window))]
        if not rising:
            return calm
        i = max(rising, key=lambda i: trends[i].z)
        gain = points[best].objective - min(p.objective for p in list(points)[:best + 1])
        whole = gain if gain >= 2 * self._s.fall_share * scale else scale
        lost = fall.change / whole
        return Verdict(
            Status.CRITICAL if lost >= self._s.lost_critical and fall.change >= self._s.scale_critical * scale else
            Status.WARNING,
            score=max(1.0, fall.change / (self._s.fall_share * scale)), since_step=steps[0],
            reason=f"{_name(series)} fell from {quantity(window[0].objective)} to {quantity(objective)} over "
                   f"{len(window)} points since step {steps[0]}, while {_name(proxies[i])} rose from "
                   f"{quantity(window[0].proxies[i])} to {quantity(window[-1].proxies[i])}: what is rewarded is no "
                   f"longer what is wanted.",
            signal=series, value=objective, threshold=points[best].objective - self._s.fall_share * scale,
            evidence={"fall": fall.change, "fall_z": fall.z, "rise": trends[i].change, "rise_z": trends[i].z,
                      "points": float(len(window))})


def _bends(values: Sequence[float]) -> float:
    """Noise of a series from its second differences, which no steady trend has; 0 of fewer than three values."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return MAD_TO_SIGMA * median(bends) / math.sqrt(6) if bends else 0.0


class _Trend:
    """Rank statistics of a rise: Mann-Kendall's z, Theil-Sen's change over the window, noise about its line."""

    __slots__ = ("change", "largest_z", "noise", "z")

    def __init__(self, steps: Sequence[int], values: Sequence[float]) -> None:
        n = len(values)
        slopes: list[float] = []
        s = 0
        for i in range(n):
            for j in range(i + 1, n):
                difference = values[j] - values[i]
                s += (difference > 0.0) - (difference < 0.0)
                slopes.append(difference / (steps[j] - steps[i]))
        slope = median(slopes)
        sigma = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
        self.z = math.copysign(max(0, abs(s) - 1), s) / sigma
        self.largest_z = (len(slopes) - 1) / sigma
        self.change = slope * (steps[-1] - steps[0])
        rest = [v - slope * x for x, v in zip(steps, values, strict=True)]
        middle = median(rest)
        self.noise = MAD_TO_SIGMA * median([abs(r - middle) for r in rest])


_NOTHING_YET = Verdict(Status.WARMING, reason="No validation score and no reward component yet.")


def _look_through(values: Mapping[str, float]) -> _Series:
    """Find a row's validation scores, one for each test set, and reward components."""
    best: dict[str, tuple[int, str]] = {}
    for series in values:
        if series.startswith(_VALIDATION):
            rank, source = _rank(series)
            if rank and (source in best or len(best) < _MOST):
                best[source] = max(best.get(source, (0, "")), (rank, series))
    names = sorted(s for s in values if s.startswith(_COMPONENT))
    aims = [s for s in names if _OBJECTIVE.search(s)]
    others = [s for s in names if s not in aims]
    return _Series(tuple(sorted(series for _, series in best.values())),
                   (aims[0], *others[:_MOST]) if aims and others else ())


def _back_to(points: deque[_Point], step: int) -> None:
    """Forget points from ``step`` on: the run was resumed before them, or tells of the step again."""
    while points and points[-1].step >= step:
        points.pop()


def _rank(series: str) -> tuple[int, str]:
    """How well a validation series stands for the task, 0 for not at all; and its test set."""
    labels = dict(label_map(series))
    aggregate = labels["aggregate"]
    if "std" in aggregate:
        return 0, labels["source"]
    variable = labels["variable"]
    return (1 + 8 * (labels["tier"] == "core") + 4 * aggregate.startswith("mean")
            + 2 * (_OBJECTIVE.search(variable) is not None) + (variable in ("reward", "score"))), labels["source"]


def _name(series: str) -> str:
    if series.startswith(_VALIDATION):
        return f"Validation score ({dict(label_map(series))['source']})"
    if series.startswith(_COMPONENT):
        return f"reward component {series.removeprefix(_COMPONENT)}"
    return "the training reward"
