"""Checks of whether the run can be watched: a way in for the monitor, and detectors that would be blind."""

from __future__ import annotations

from monitor.detectors import DETECTORS
from monitor.preflight.check import Check, Result, good, warning
from monitor.preflight.setup import Setup

_READ = ("file", "console", "tensorboard", "wandb")
_CRITIC = ("critic_loss", "value/", "value_", "gradient_norm/critic", "return/")
_ROLLOUT = ("rollout_", "kl_divergence/rollout")


def _logger(setup: Setup) -> Result:
    value = setup.get("trainer.logger")
    loggers = [str(name).lower() for name in (value if isinstance(value, list) else [value] if value else [])]
    attached = [name for name in ("VERL_MONITOR_URL", "VERL_MONITOR_LISTEN") if setup.environment.get(name)]
    if attached:
        return good(f"{' and '.join(attached)} is set: the monitor is told by the trainer itself")
    found = [name for name in _READ if name in loggers]
    if not found:
        return warning(f"trainer.logger is {loggers or 'empty'}: nothing that the monitor reads",
                       "trainer.logger=[console,file] (file from verl 0.6.1 on), or VERL_MONITOR_URL in the job")
    if found == ["console"]:
        return good("trainer.logger has console alone: keep its output in a file (2>&1 | tee -a logs/run.log)")
    return good(f"the monitor reads {', '.join(found)}")


def unlogged(setup: Setup) -> dict[str, str]:
    """Beginnings of catalogue series that this configuration does not log, and the key that would wake them; empty
    where nothing can, since the algorithm has no such thing."""
    out: dict[str, str] = {}
    if not setup.critic:
        out |= dict.fromkeys(_CRITIC, "")
    if not setup.reference:
        out["kl_divergence/reference"] = "actor_rollout_ref.actor.use_kl_loss=True (only logged with kl_loss_coef=0)"
    probabilities = setup.get("actor_rollout_ref.rollout.calculate_log_probs")
    if probabilities is False or (probabilities is None and setup.version and setup.version < (0, 9)):
        out |= dict.fromkeys(_ROLLOUT, "actor_rollout_ref.rollout.calculate_log_probs=True")
    return out


def _blind(setup: Setup) -> Result:
    missing = unlogged(setup)
    blind: dict[str, str] = {}
    for detector in DETECTORS:
        for group in detector.spec.required:
            causes = [next((key for start, key in missing.items() if series.startswith(start)), None)
                      for series in group]
            if all(cause is not None for cause in causes):
                blind[detector.spec.id] = next((cause for cause in causes if cause), "")
    wakeable = {id_: key for id_, key in blind.items() if key}
    if wakeable:
        keys = ", ".join(dict.fromkeys(wakeable.values()))
        return warning(f"blind in this run: {', '.join(wakeable)}", keys)
    idle = f"; {', '.join(blind)} have nothing to watch without a critic" if blind else ""
    notes = []
    if "kl_divergence/reference" in missing:
        notes.append("kl_runaway sees the KL of updates but none to a reference")
    if (setup.number("trainer.test_freq") or -1) <= 0:
        notes.append("reward_hacking has no validation to compare with (trainer.test_freq)")
    return good(f"every detector that fits sees its metrics{idle}" + (f"; {'; '.join(notes)}" if notes else ""))


CHECKS = (
    Check(id="way_in", title="A way in for the monitor", guide="4.3", run=_logger,
          why="Without one the run is not watched.",
          applies="all; the guide's verl.metrics module exists in no release",
          source="verl's Tracking backends"),
    Check(id="blind_detectors", title="Detectors that would be blind", guide="4.3", run=_blind,
          why="A failure that nothing looks for is found by its cost.", applies="0.4 to 0.9.1",
          source="which keys verl logs under which settings"),
)
