"""Non-finite values: a loss, gradient, KL or value that is not a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from monitor.catalog import nonfinite_kind, verl_keys
from monitor.detectors.base import Detector, Settings, setting
from monitor.metric import NonFinite
from monitor.model import DetectorSpec, Observation, Severity, Status, Verdict

_FATAL_SERIES = ("policy_loss", "gradient_norm/actor", "critic_loss", "supervised_loss_nats/train")


@dataclass(frozen=True, kw_only=True)
class NonFiniteSettings(Settings):
    """Limits of ``non_finite``."""

    suspect_critical_steps: float = setting(
        3.0, "steps", "Consecutive steps for which rewards, returns or advantages may be undefined before it is "
                      "critical; once is a warning.")


SPEC = DetectorSpec(
    id="non_finite",
    title="Not a number",
    severity=Severity.CRITICAL,
    required=(_FATAL_SERIES,),
    optional=("kl_divergence/update", "kl_divergence/reference", "entropy_nats", "value/mean", "advantage/mean"),
    wake="actor/pg_loss and actor/grad_norm are logged by every trainer; if they are missing, the log is not verl's "
         "training log.",
    meaning="A loss, gradient norm, KL, entropy or value is NaN or infinite. When a gradient norm is not finite, verl "
            "skips the optimizer step and prints one line in a worker's log, nothing else.",
    impact="From this step on the model is either broken or no longer trained. Nothing crashes; the job goes on "
           "burning GPUs.",
    diagnosis=(
        "The reason names which metrics are affected: only critic/* means that the critic diverged and the actor may "
        "still be sound; only a gradient norm means that updates are being skipped.",
        "Look for 'WARN: grad_norm is not finite' in the workers' logs and for the first step it appears.",
        "Check the steps before: a gradient norm, value loss or advantage that grew for some steps names the cause.",
        "A batch whose samples were all aborted has undefined rewards and advantages: see response/aborted_ratio.",
    ),
    actions=(
        "stop the job and resume from the last checkpoint before the step named (trainer.resume_mode=resume_path, "
        "trainer.resume_from_path)",
        "lower actor_rollout_ref.actor.optim.lr, or critic.optim.lr when only the critic is affected, and check "
        "actor_rollout_ref.actor.grad_clip and critic.grad_clip",
        "bound the reward: a single unbounded or NaN score is enough",
        "compute in bfloat16 rather than float16 (actor_rollout_ref.actor.fsdp_config.model_dtype)",
    ),
    misses="Values that are large but finite, and NaN inside a worker that never reaches a logged metric.",
    source="verl's optimizer skips a step whose gradient norm is not finite and logs the norm as it is; its file log "
           "writes every non-finite number as null.",
    guide="3",
    panel=("policy_loss", "gradient_norm/actor", "critic_loss"),
    rise_steps=1,
    clear_steps=3,
)


_FINITE = Verdict(Status.OK, reason="Every loss, gradient norm, KL and value is a finite number.")


class NonFiniteDetector(Detector):
    """Critical at the very step at which a metric that must be a number is none; no warm-up, no confirmation.

    Only metrics whose NaN proves divergence count (the catalogue's ``FATAL``). Rewards, returns and advantages can be
    undefined for one broken batch: a warning, critical when it lasts. A diagnostic that is undefined, such as the
    correlation of constants, is counted by the engine and is no finding. A metric that the next rows do not hold is
    still taken as non-finite: only a finite value clears it. A false alarm here costs a stopped run, so nothing but
    NaN and infinity counts.

    >>> from monitor.model import NAN, Observation
    >>> NonFiniteDetector().update(Observation("run", 1, 0.0, {"policy_loss": NAN})).status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = NonFiniteSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(NonFiniteSettings, self._settings)
        self._since: dict[str, int] = {}
        self._suspect_steps = 0
        self._seen = False

    def update(self, observation: Observation) -> Verdict | None:
        """Judge every series of the row; those of the catalogue are few, so the state is bounded."""
        values = observation.values
        total = sum(values.values())
        if total == total and values and not self._since:  # one NaN makes the sum one: nothing to look for
            self._suspect_steps = 0
            return _FINITE
        judged = False
        suspect_now = False
        for series, value in values.items():
            if value == value:
                judged = True
                if self._since:
                    self._since.pop(series, None)
                continue
            kind = nonfinite_kind(series)
            if kind is not NonFinite.UNDEFINED:
                judged = True
                suspect_now = True
                self._since.setdefault(series, observation.step)
        if not judged:
            return None
        self._suspect_steps = self._suspect_steps + 1 if suspect_now else 0
        if not self._since:
            return _FINITE
        return self._finding(observation.step)

    def _finding(self, step: int) -> Verdict:
        # A restart may have set the step counter back behind the first sight.
        since = min(min(self._since.values()), step)
        fatal = [s for s in self._since if nonfinite_kind(s) is NonFinite.FATAL]
        lasting = self._suspect_steps >= self._s.suspect_critical_steps
        names = ", ".join(verl_keys(series)[0] for series in sorted(self._since, key=_importance)[:6])
        more = f" and {len(self._since) - 6} more" if len(self._since) > 6 else ""
        verb = "is" if len(self._since) == 1 else "are"
        return Verdict(
            Status.CRITICAL if fatal or lasting else Status.WARNING,
            score=float(1 + len(self._since)), since_step=since, hard=True,
            reason=f"{names}{more} {verb} not a finite number since step {since}: {_consequence(fatal)}.",
            signal=min(self._since, key=_importance),
            evidence={verl_keys(series)[0]: float(first) for series, first in self._since.items()})


def _importance(series: str) -> tuple[int, str]:
    order = ("policy_loss", "critic_loss", "gradient_norm/actor", "gradient_norm/critic")
    return (order.index(series) if series in order else len(order), series)


def _consequence(fatal: list[str]) -> str:
    if not fatal:
        return "the batch has no usable reward"
    if all(s.startswith(("critic_loss", "value", "gradient_norm/critic", "total_loss/critic")) for s in fatal):
        return "the critic has diverged, while the actor's own metrics are still finite"
    if all(s.startswith("gradient_norm") for s in fatal):
        return "verl skips the optimizer step, the weights no longer change"
    return "the policy has diverged"
