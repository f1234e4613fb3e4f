"""Critic loss oscillation: the value loss swings to and fro over decades and never settles."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import MAD_TO_SIGMA, Baseline
from monitor.units import quantity

LOSS, EXPLAINED = "critic_loss", "value_explained_variance"
_SCALE_SERIES = ("return/max", "return/min", "score/max", "score/min", "return/mean")


@dataclass(frozen=True, kw_only=True)
class CriticLossOscillationSettings(Settings):
    """Limits of ``critic_loss_oscillation``. A decade is a factor of ten of the value loss."""

    swing_decades_warning: float = setting(
        1.0, "decades", "Smallest swing of the value loss, from turn to turn, that counts.")
    swing_decades_noisy: float = setting(
        1.75, "decades", "Largest swing that must be reached to count, in a run whose loss is noisy from step to step.")
    noise_factor: float = setting(
        4.5, "ratio", "A swing counts from this many times the step-to-step noise of the loss on, between the two "
                      "limits above.")
    swing_decades_critical: float = setting(
        2.0, "decades", "Median size of the counted swings that is critical; a failing run of a 7B model swung over "
                        "five.")
    turns: float = setting(5.0, "turns", "Turns within the window that make an oscillation: two spikes have four.")
    turns_noisy: float = setting(7.0, "turns", "The same where the noise alone reaches the largest of the limits.")
    duty: float = setting(
        0.2, "ratio", "Share of the window that the loss must spend near either side; spikes do not.")
    window_steps: float = setting(24.0, "steps", "Window in which turns are counted.")
    material_ratio: float = setting(
        0.1, "ratio", "Value error at the peaks (root of twice the loss), as a share of the scale of returns, below "
                      "which swings do not matter.")


SPEC = DetectorSpec(
    id="critic_loss_oscillation",
    title="Critic loss oscillation",
    severity=Severity.CRITICAL,
    required=((LOSS,),),
    optional=(EXPLAINED, "return/max", "return/min"),
    wake="critic/vf_loss exists only in runs with a critic (algorithm.adv_estimator=gae). A run without a critic "
         "cannot have this failure.",
    meaning="The value loss swings up and down by decades, again and again: the critic follows a target that moves "
            "faster than it learns, or each of its updates overshoots.",
    impact="Advantages are computed from values that are wrong by the size of the swing, so the policy is pushed "
           "in random directions while its own curves look calm.",
    diagnosis=(
        "Compare critic/vf_loss with critic/returns/max and critic/score/max: if they swing together, the scale of "
        "the reward changes from batch to batch.",
        "critic/vf_explained_var near or below 0 throughout says that the critic never caught up.",
        "critic/grad_norm and critic/vf_clipfrac say whether single updates are too large.",
        "From the first step on: look at the initialisation of the value head.",
    ),
    actions=(
        "bound or normalise the reward, so that its scale is the same in every batch",
        "lower critic.optim.lr, and keep critic.cliprange_value at 0.2 to 0.5",
        "warm the critic up before the actor is trained (trainer.critic_warmup)",
        "start the value head small (weights of standard deviation 0.001, bias 0)",
    ),
    misses="Swings below one decade, and oscillation with a period above ten steps.",
    source="A failing run was seen to swing from 1e3 to 1e-2. Value loss of healthy runs stays within a third of a "
           "decade from step to step once past its first steps.",
    guide="3.2",
    panel=(LOSS, EXPLAINED),
    rise_steps=2,
    clear_steps=12,
    under=("non_finite",),
)


class CriticLossOscillation(Detector):
    """Turning points of log10 of the value loss.

    A turn is confirmed when the loss has come back by at least a decade from its last extreme (a zigzag filter; more
    where the loss is noisy from step to step), so noise has none and an isolated spike has two. Five turns within 24
    steps, with time spent on both sides, are an oscillation, if the value error
    at the peaks is material on the scale of the run's returns: a loss that wanders between 1e-6 and 1e-4 while
    returns are near 1 harms nobody. A false alarm sends someone to look at a critic that is well.

    >>> from monitor.model import Observation
    >>> detector = CriticLossOscillation()
    >>> for step in range(10):
    ...     verdict = detector.update(Observation("run", step, 0.0, {"critic_loss": 1e3 if step % 2 else 1e-2}))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = CriticLossOscillationSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(CriticLossOscillationSettings, self._settings)
        self._seen = 0
        self._direction = 0  # of the current leg: +1 up, -1 down, 0 not known yet
        self._extreme = (0, 0, NAN)  # index, step, level of the leg's extreme so far
        self._low = self._high = (0, 0, NAN)
        self._turns: deque[tuple[int, int, float, float]] = deque(maxlen=16)  # index, step seen at, level, size
        self._noise = Baseline(60)  # of the log10 loss, from step to step
        self._swing = self._s.swing_decades_warning  # decades that count now
        self._levels: deque[float] = deque(maxlen=int(self._s.window_steps))  # log10 of the loss
        self._scale: deque[float] = deque(maxlen=int(self._s.window_steps))

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the value loss of the row."""
        values = observation.values
        # The largest of several names of one thing; a row with only the mean is better than no scale at all.
        scale = max((abs(values[s]) for s in _SCALE_SERIES if s in values and values[s] == values[s]), default=NAN)
        if scale == scale:
            self._scale.append(scale)
        loss = values.get(LOSS, NAN)
        if loss != loss or loss <= 0.0:  # an exact zero has no logarithm; NaN is non_finite's business
            return None
        self._seen += 1
        level = math.log10(loss)
        if self._levels:
            self._noise.offer(abs(level - self._levels[-1]))
            sigma = MAD_TO_SIGMA * self._noise.median()
            self._swing = min(max(self._s.noise_factor * sigma, self._s.swing_decades_warning),
                              self._s.swing_decades_noisy)
        self._levels.append(level)
        self._zigzag(self._seen, observation.step, level)
        turns = [t for t in self._turns if t[0] > self._seen - self._s.window_steps and t[3] >= self._swing] \
            if self._turns else []
        noisy = self._swing >= self._s.swing_decades_noisy
        if len(turns) >= (self._s.turns_noisy if noisy else self._s.turns):
            finding = self._finding(turns, values.get(EXPLAINED, NAN))
            if finding is not None:
                return finding
        return Verdict(
            Status.OK if self._seen >= self._s.turns + 2 else Status.WARMING,
            score=min(0.99, len(turns) / self._s.turns), signal=LOSS, value=loss, threshold=self._threshold())

    def _zigzag(self, index: int, step: int, level: float) -> None:
        here = (index, step, level)
        if self._direction == 0:
            self._low = here if not self._low[2] <= level else self._low
            self._high = here if not self._high[2] >= level else self._high
            if level - self._low[2] >= self._swing:
                self._direction, self._extreme = 1, here
            elif self._high[2] - level >= self._swing:
                self._direction, self._extreme = -1, here
            return
        if self._direction * (level - self._extreme[2]) >= 0:
            self._extreme = here
        elif abs(level - self._extreme[2]) >= self._swing:
            extreme_index, _, extreme_level = self._extreme
            self._turns.append((extreme_index, step, extreme_level, abs(level - extreme_level)))
            self._direction, self._extreme = -self._direction, here

    def _threshold(self) -> float:
        """Loss one counting swing above the lowest of the window: where a turn would begin to count."""
        return float(10 ** min(min(self._levels) + self._swing, 308.0))

    def _finding(self, turns: list[tuple[int, int, float, float]], explained: float) -> Verdict | None:
        levels = [t[2] for t in turns]
        peak, trough = max(levels), min(levels)
        high = sum(level > (peak + trough) / 2 for level in self._levels) / len(self._levels)
        if not self._s.duty <= high <= 1 - self._s.duty:
            return None
        scale = max(self._scale, default=NAN)
        error = math.sqrt(2) * 10 ** (peak / 2)
        if scale == scale and error < self._s.material_ratio * scale:
            return None
        sizes = sorted([abs(b - a) for a, b in pairwise(levels)] + [turns[-1][3]])
        size = sizes[len(sizes) // 2]
        since = turns[0][1]
        scale_text = f" on returns of up to {quantity(scale)}" if scale == scale else ""
        explained_text = f", explained variance {explained:.2g}" if explained == explained else ""
        return Verdict(
            Status.CRITICAL if size >= self._s.swing_decades_critical else Status.WARNING,
            score=len(turns) / self._s.turns * size / self._s.swing_decades_warning, since_step=since,
            reason=f"Value loss swings between {_power(trough):.2g} and {_power(peak):.2g}, {len(turns)} turns of "
                   f"{size:.1f} decades since step {since}{scale_text}{explained_text}: the critic cannot follow its "
                   f"target.",
            signal=LOSS, value=_power(max(self._levels)), threshold=self._threshold(),
            evidence={"turns": float(len(turns)), "swing_decades": size, "peak": _power(peak), "trough": _power(trough),
                      "return_scale": scale, "explained_variance": explained})


def _power(level: float) -> float:
    """Back from the logarithm. The largest float is 10 to the 308.25, and rounding must not carry beyond it."""
    return float(10 ** min(level, 308.0))
