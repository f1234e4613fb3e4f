"""Checkpoint incomplete: what the run has saved cannot be resumed from, or is getting old."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from monitor.catalog import TRAINING_SERIES
from monitor.detectors.base import Detector, Settings, setting
from monitor.facts import Checkpoint, CheckpointFacts, Facts
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.units import Unit, quantity
from monitor.verl_config import Value

LAST = "checkpoint_last_step"
_KEPT = 256


@dataclass(frozen=True, kw_only=True)
class CheckpointIncompleteSettings(Settings):
    """Limits of ``checkpoint_incomplete``."""

    writing_seconds: float = setting(
        600.0, "s", "Time since a checkpoint's last file for which it may still be being written, unless the tracker "
                    "names it.")
    overdue_saves: float = setting(2.5, "ratio", "Steps since the last complete checkpoint, over trainer.save_freq, "
                                                 "from which it is overdue.")
    disk_factor: float = setting(1.2, "ratio", "Free space that the next checkpoint needs, over the last one's size.")


SPEC = DetectorSpec(
    id="checkpoint_incomplete",
    title="Checkpoint incomplete",
    severity=Severity.WARNING,
    required=(),
    facts=("checkpoints",),
    wake="A checkpoint directory that the monitor sees: verl-monitor serve --checkpoint-dir, or a monitor that is "
         "attached or runs in the job's working directory.",
    meaning="The newest checkpoint lacks something that verl needs, the tracker is missing or points nowhere, the last "
            "complete one is long overdue, or the disk has no room for the next.",
    impact="Nothing is wrong until the job ends. Then it cannot be resumed, or it begins from scratch, or loses its "
           "place in the data, and verl says nothing of it.",
    diagnosis=(
        "The run's page and /machine list every checkpoint with what it lacks.",
        "ls -R of the newest global_step_N beside an older one that is complete.",
        "Look in the trainer's log around the save: a rank that died, a full or read-only file system.",
    ),
    actions=(
        "do not stop the job before it has saved a complete checkpoint",
        "make room: delete old global_step_N folders, or set trainer.max_actor_ckpt_to_keep and "
        "trainer.max_critic_ckpt_to_keep",
        "keep model, optimizer and extra in actor_rollout_ref.actor.checkpoint.save_contents and in "
        "critic.checkpoint.save_contents",
        "write the step of the last complete checkpoint into latest_checkpointed_iteration.txt where that is missing, "
        "or resume with trainer.resume_mode=resume_path and trainer.resume_from_path",
    ),
    misses="Files that are there but cut short or damaged; Megatron's shards, whose layout differs by version; a "
           "directory on a file system that the monitor does not see.",
    source="verl's own layout and loader, versions 0.4 to 0.9.1: it loads every rank's model, optimizer and extra "
           "state and fails without; a missing tracker or data.pt is passed over in silence.",
    guide="4.1",
    panel=(LAST,),
    rise_steps=2,
    clear_steps=1,
)


class CheckpointIncomplete(Detector):
    """What verl would find if it had to resume now.

    Judged is the checkpoint that the tracker names, and the newest when the run has come past its step and nobody has
    written to it for ten minutes. Older ones may have been thinned out on purpose. A false alarm would stop somebody
    who only waits for a save, so while one is being written nothing is said of it, nor of the one before: verl with
    ``max_actor_ckpt_to_keep`` 1 removes that one's actor before critic, data and tracker of the new one are there.

    >>> CheckpointIncomplete().probed(Facts(time_seconds=0.0)) is None
    True
    """

    spec = SPEC
    settings_type = CheckpointIncompleteSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(CheckpointIncompleteSettings, self._settings)
        self._step = 0
        self._first: int | None = None  # step at which this start was first seen
        self._save_freq = 0.0
        self._kept: dict[str, int] = {}  # how many verl keeps of this start, by role; without: all
        self._steps: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # when each of the last ones came

    def configured(self, config: Mapping[str, Value]) -> None:
        """Take in how often the run saves, and how much it keeps."""
        value = config.get("trainer.save_freq")
        self._save_freq = float(value) if isinstance(value, (int, float)) and value > 0 else 0.0
        limits = {role: config.get(f"trainer.max_{role}_ckpt_to_keep") for role in ("actor", "critic")}
        self._kept = {role: int(limit) for role, limit in limits.items()
                      if isinstance(limit, (int, float)) and limit >= 1}

    def restarted(self, time_seconds: float) -> None:
        """Steps are counted from the new start."""
        self._first = None

    def update(self, observation: Observation) -> Verdict | None:
        """Follow the run's step."""
        if not TRAINING_SERIES.isdisjoint(observation.values):
            self._step = observation.step
            self._steps.append((observation.time_seconds, observation.step))
            self._first = observation.step if self._first is None else self._first
        return None

    def probed(self, facts: Facts) -> Verdict | None:
        """Judge the directory."""
        seen = facts.checkpoints.get(facts.run)
        if seen is None or seen.problem:
            return None
        good = [checkpoint for checkpoint in seen.checkpoints if not checkpoint.missing]
        last = max((checkpoint.step for checkpoint in good), default=0)
        problems = [*self._broken(seen), *self._overdue(seen, good), *self._full(seen, good)]
        if not problems:
            if any(checkpoint.missing and checkpoint.step == seen.tracker_step for checkpoint in seen.checkpoints):
                return None  # the next is being written; what was found before stands until it is there
            return Verdict(Status.OK, signal=LAST, value=float(last) if good else NAN)
        end = (f" The last complete one is that of step {last}." if good else " There is no complete one.")
        return Verdict(
            Status.WARNING, score=float(len(problems)), signal=LAST, value=float(last),
            threshold=float(seen.tracker_step) if seen.tracker_step is not None else NAN, since_step=self._step,
            reason=f"{'; '.join(problems[:4])}.{end}",
            evidence={"last_complete_step": float(last), "step": float(self._step),
                      "problems": float(len(problems))})

    def _broken(self, seen: CheckpointFacts) -> list[str]:
        problems = [seen.tracker_problem] if seen.tracker_problem else []
        tracked = seen.tracker_step if seen.tracker_step is not None else -1
        newest = max((checkpoint.step for checkpoint in seen.checkpoints), default=-1)
        for checkpoint in seen.checkpoints:
            if not checkpoint.missing or checkpoint.step < tracked:
                continue
            # verl logs a step after its save. What lies beyond the run is a rest of the start before, and is replaced.
            left = checkpoint.step == newest and checkpoint.step <= self._step and not self._writing(seen, newest)
            held = checkpoint.step == tracked and not (newest > tracked and self._writing(seen, newest))
            if held or left:
                problems.append(f"global_step_{checkpoint.step}: " + ", ".join(checkpoint.missing[:4]))
        return problems

    def _writing(self, seen: CheckpointFacts, step: int) -> bool:
        """Whether a checkpoint may still be being written."""
        return any(checkpoint.step == step and seen.time_seconds - checkpoint.modified_seconds < self._s.writing_seconds
                   for checkpoint in seen.checkpoints)

    def _overdue(self, seen: CheckpointFacts, good: Sequence[Checkpoint]) -> list[str]:
        # Steps may be quick and the look at the directory some time ago.
        step = next((step for when, step in reversed(self._steps) if when <= seen.time_seconds), None)
        if step is None:
            return []
        # After a resume from an older step, those beyond it are of the start before.
        last = max((checkpoint.step for checkpoint in good if checkpoint.step <= step), default=0)
        since = step - max(last, (self._first or 1) - 1)
        if not self._save_freq or since <= self._s.overdue_saves * self._save_freq:
            return []
        return [f"no complete checkpoint for {since} steps, while trainer.save_freq is {self._save_freq:g}"]

    def _full(self, seen: CheckpointFacts, good: Sequence[Checkpoint]) -> list[str]:
        if not good or seen.free_bytes is None or not self._save_freq:
            return []
        needed, room = self._s.disk_factor * good[-1].bytes, seen.free_bytes
        # verl removes this start's oldest before it saves; a single one that it keeps, 0.9 removes after.
        own = [checkpoint for checkpoint in good if checkpoint.step >= (self._first or 1)]
        kept = [self._kept.get(role, 0) for role in (("actor", "critic") if good[-1].critic else ("actor",))]
        if min(kept) > 1 and max(kept) <= len(own):
            room += own[0].bytes
        if room >= needed:
            return []
        return [f"{quantity(float(seen.free_bytes), Unit.BYTES)} are free and the next checkpoint needs "
                f"{quantity(needed, Unit.BYTES)}"]
