"""Optimizer idle: answers are told apart, but the gradient is exactly zero and the weights never move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from monitor.catalog import HAS_CRITIC_SERIES
from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.units import quantity

GRADIENT, REFERENCE_KL, RATE = "gradient_norm/actor", "kl_divergence/reference", "learning_rate/actor"

_MARKED = 0.1  # an advantage or a share of the batch's scores that rounding does not make
_SAME = 1e-6


@dataclass(frozen=True, kw_only=True)
class OptimizerIdleSettings(Settings):
    """Limits of ``optimizer_idle``."""

    steps: float = setting(
        5.0, "steps", "Consecutive steps with a signal and a gradient norm of exactly 0 that are critical.")


SPEC = DetectorSpec(
    id="optimizer_idle",
    title="Optimizer idle",
    severity=Severity.CRITICAL,
    required=((GRADIENT,), ("advantage/max", "advantage/min", "reward_deviation", "tied_groups_ratio")),
    optional=("advantage/max", "advantage/min", "score/max", "score/min", REFERENCE_KL, RATE),
    wake="actor/grad_norm and critic/advantages/max are logged by every trainer. A console log of an old version "
         "rounds to three decimals; its zeros are not taken for zeros.",
    meaning="The rewards tell good answers from bad ones, yet the gradient of the policy is exactly 0 at every step: "
            "between the advantages and the weights something is cut.",
    impact="The model that comes out is the model that went in.",
    diagnosis=(
        "Compare actor/pg_loss: 0 as well says that the loss mask or the log-probabilities are at fault, another "
        "value says that the gradient is lost on its way back.",
        "Print the number of parameters that require a gradient; with LoRA the adapter must be among them.",
        "In half precision look for a gradient that underflows; with several nodes compare with one node.",
        "actor/lr tells a schedule that has ended.",
    ),
    actions=(
        "with LoRA, set actor_rollout_ref.model.lora_rank and .target_modules so that they match the model's layers",
        "compute in bfloat16 rather than float16 (actor_rollout_ref.actor.fsdp_config.model_dtype)",
        "run the same configuration on one node (trainer.nnodes=1), then with another actor_rollout_ref.actor.strategy",
        "check the response mask of the rollout (actor_rollout_ref.rollout.multi_turn, custom agent loops): tokens "
        "that are all masked have no gradient",
    ),
    misses="A gradient that reaches only some layers, one that is tiny but not 0, and steps that the optimizer skips "
           "(see non_finite). The update KL is not asked: it is 0 in any on-policy run, and numerical noise in others.",
    source="A gradient norm of exactly 0 beside advantages that are not was seen in public reports of runs whose "
           "weights never moved; in no healthy run of the corpus on a single step.",
    guide="-",
    panel=(GRADIENT, "advantage/max", "kl_divergence/update"),
    rise_steps=1,
    clear_steps=2,
    under=("non_finite", "no_learning_signal"),
)


class OptimizerIdle(Detector):
    """Counts consecutive steps that have a signal and a gradient norm of exactly zero.

    A step without a signal says nothing about the optimizer and is passed over; so is one without the actor's
    metrics, as in the critic's warm-up. A batch in which every answer scores the same has no signal, whatever a
    critic's whitened advantages say. A false alarm would send someone to hunt a bug in the trainer, so nothing but an
    exact zero counts.

    >>> from monitor.model import Observation
    >>> detector = OptimizerIdle()
    >>> for step in range(5):
    ...     verdict = detector.update(Observation("run", step, 0.0, {"gradient_norm/actor": 0.0, "advantage/max": 1.5}))
    >>> verdict.status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = OptimizerIdleSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(OptimizerIdleSettings, self._settings)
        self._critic = False
        self._streak, self._since = 0, 0

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the gradient of a step that has a signal."""
        values = observation.values
        gradient = values.get(GRADIENT, NAN)
        if gradient != gradient:
            return None
        if gradient != 0.0:
            self._streak = 0
            return _WELL
        self._critic = self._critic or not HAS_CRITIC_SERIES.isdisjoint(values)
        if not _has_signal(values, critic=self._critic):
            return None
        self._since = observation.step if self._streak == 0 else min(self._since, observation.step)
        self._streak += 1
        idle = self._streak >= self._s.steps
        score = self._streak / self._s.steps
        kl, rate = values.get(REFERENCE_KL, NAN), values.get(RATE, NAN)
        kl_text = f", KL to the reference {quantity(kl)} nats" if kl == kl else ""
        return Verdict(
            Status.CRITICAL if idle else Status.OK, score=score if idle else min(0.99, score),
            since_step=self._since, signal=GRADIENT, value=0.0,
            reason=f"The gradient norm is exactly 0 while answers score differently{kl_text}, {self._streak} step(s) "
                   f"with a signal since step {self._since}: the weights do not move.",
            evidence={"steps": float(self._streak), "advantage_max": values.get("advantage/max", NAN),
                      "reference_kl": kl, "learning_rate": rate})


_WELL = Verdict(Status.OK, reason="The gradient is not 0: the policy is updated.")


def _has_signal(values: Mapping[str, float], *, critic: bool) -> bool:
    """Whether the row shows for certain that answers to one prompt were told apart."""
    high, low = values.get("score/max", NAN), values.get("score/min", NAN)
    if high - low <= _SAME * max(abs(high), abs(low)):
        return False
    size = max((abs(v) for s in ("advantage/max", "advantage/min") if (v := values.get(s, NAN)) == v), default=NAN)
    if size == size:
        # Advantages that are not normalised are on the scale of the scores, and rounding is far below it.
        return size > _MARKED * min(1.0, high - low if high == high and low == low else 1.0)
    if critic:
        return False
    return values.get("tied_groups_ratio", 1.0) < 1.0 - _SAME or values.get("reward_deviation", 0.0) > _SAME
