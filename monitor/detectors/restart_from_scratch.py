"""Restart from scratch: the job came back, but at its first step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from monitor.catalog import TRAINING_SERIES
from monitor.detectors.base import Detector, Settings, setting
from monitor.facts import Facts, Sibling
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.verl_config import Value

STEP, RESUMED = "global_step", "resumed_from_step"
_SERIAL = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class RestartFromScratchSettings(Settings):
    """Limits of ``restart_from_scratch``."""

    lost_steps: float = setting(
        10.0, "steps", "Steps of the run before, below which starting anew loses nothing that matters.")
    told_steps: float = setting(30.0, "steps", "Steps of the new start for which the finding is told.")
    sibling_steps: float = setting(
        200.0, "steps", "Steps of a run within which another experiment's checkpoint may show that it should have been "
                        "resumed.")
    sibling_seconds: float = setting(
        86400.0, "s", "Age of that checkpoint beyond which nobody meant to go on from it.")
    sibling_silence_seconds: float = setting(
        60.0, "s", "Least time without a new checkpoint after which that experiment is over; and three times the time "
                   "between its last two.")


SPEC = DetectorSpec(
    id="restart_from_scratch",
    title="Restart from scratch",
    severity=Severity.WARNING,
    required=(tuple(sorted(TRAINING_SERIES)),),
    optional=(STEP, RESUMED),
    facts=("checkpoints",),
    wake="Any training row will do.",
    meaning="The run was started again and counts from its first step, although it had come much further before: it "
            "did not resume from a checkpoint.",
    impact="All training so far is lost or done twice, and nothing says so: verl starts from scratch in silence when "
           "it finds no checkpoint where it looks.",
    diagnosis=(
        "Look for latest_checkpointed_iteration.txt in trainer.default_local_dir; the path is relative to the job's "
        "working directory, which another launcher may have changed.",
        "Compare trainer.project_name and trainer.experiment_name of both starts: they are part of the default path.",
        "The console says 'Setting global step to N' when a checkpoint was found.",
        "No checkpoint at all: trainer.save_freq is -1 unless set.",
    ),
    actions=(
        "stop the job if it was meant to go on",
        "set trainer.default_local_dir to an absolute path on storage that all nodes see",
        "set trainer.resume_mode=resume_path and trainer.resume_from_path to the last global_step_N folder, and start "
        "again",
        "set trainer.save_freq, so that there is something to resume from",
    ),
    misses="A start from scratch under a name that differs by more than its digits, which is another run; a step "
           "counter that was loaded while the weights were not; a new start that is meant, which looks the same unless "
           "the configuration says trainer.resume_mode=disable.",
    source="verl's first step is 1 (0 in 0.1); a resumed run goes on after the step of its checkpoint.",
    guide="4.2",
    panel=(STEP,),
    rise_steps=1,
    clear_steps=1,
    under=("non_finite",),
)


class RestartFromScratch(Detector):
    """A first training step of 0 or 1 after the run had been further on.

    A step counter that goes back a little is a resume, and what a run repeats after it is expected. A false alarm
    would doubt a job that was begun anew on purpose, so it is a warning, and told for some steps only.

    >>> from monitor.model import Observation
    >>> detector = RestartFromScratch()
    >>> for step in [*range(1, 36), 1]:
    ...     verdict = detector.update(Observation("run", step, 0.0, {"policy_loss": 0.1}))
    >>> verdict.status.name
    'WARNING'
    """

    spec = SPEC
    settings_type = RestartFromScratchSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(RestartFromScratchSettings, self._settings)
        self._last: int | None = None
        self._reached = 0  # highest step of the start before
        self._high = 0  # of this start
        self._lost: int | None = None  # step that was reached before a start from scratch
        self._meant = False
        self._total = NAN  # steps that the configuration asks for
        self._scratch = False  # this start began at its first step
        self._told: Verdict | None = None  # of checkpoints, and until which step it holds
        self._until = 0
        self._resumed = self._loaded = NAN  # checkpoint that the console told of: for the next start, of this one

    def configured(self, config: Mapping[str, Value]) -> None:
        """A run that is told not to resume starts anew because it was told to."""
        self._meant = str(config.get("trainer.resume_mode", "")).lower() == "disable"
        total = config.get("trainer.total_training_steps")
        self._total = float(total) if isinstance(total, (int, float)) else NAN

    def probed(self, facts: Facts) -> Verdict | None:
        """Judge what checkpoints there are that this start did not go on from."""
        seen = facts.checkpoints.get(facts.run)
        if seen is None or self._last is None or not self._scratch or self._meant:
            return None
        if self._told is not None and self._last <= self._until:
            return self._told
        verdict = None
        # A tracker that points nowhere may name any step; then what is really there counts.
        complete = max((checkpoint.step for checkpoint in seen.checkpoints if not checkpoint.missing), default=0)
        held = complete if seen.tracker_step is None or seen.tracker_problem else seen.tracker_step
        if held - self._last >= self._s.lost_steps and self._last <= self._s.told_steps:
            verdict = self._found(held, f"although {seen.directory} holds a checkpoint of step {held}")
        elif self._last <= self._s.sibling_steps:
            for other in seen.siblings:
                if self._left_by(other, Path(seen.directory).name, seen.time_seconds):
                    verdict = self._found(other.step, f"while the experiment {other.name} of the same project stopped "
                                          f"at a checkpoint of step {other.step}: the name is part of the path where "
                                          "verl looks")
        if verdict is not None:
            self._told, self._until = verdict, self._last + int(self._s.told_steps)
        elif self._told is not None:
            self._told = None
            return Verdict(Status.OK, signal=STEP, value=float(self._last))
        return verdict

    def _left_by(self, other: Sibling, own: str, now: float) -> bool:
        """Whether this run should have gone on from another experiment's checkpoint: the names differ by digits alone,
        and that one has stopped before its end and not long ago. One that still saves is a run beside this one."""
        quiet = now - other.modified_seconds
        unfinished = other.step < self._total if self._total == self._total else False
        return (_SERIAL.sub("#", other.name) == _SERIAL.sub("#", own) and other.name != own and unfinished
                and other.step >= self._s.lost_steps and quiet <= self._s.sibling_seconds
                and other.interval_seconds > 0
                and quiet >= max(self._s.sibling_silence_seconds, 3 * other.interval_seconds))

    def _found(self, lost: int, how: str) -> Verdict:
        return Verdict(
            Status.WARNING, score=1.0 + lost / 100, since_step=1, signal=STEP, value=float(self._last or 0),
            reason=f"The run began at its first step {how}: the training of {lost} steps is lost or done twice.",
            evidence={"reached_step": float(lost), "step": float(self._last or 0)})

    def restarted(self, time_seconds: float) -> None:
        """The next training row is the first of a new start."""
        self._begin()

    def _begin(self) -> None:
        self._reached = max(self._reached, self._high)
        self._last, self._high, self._lost = None, 0, None
        self._scratch, self._told = False, None

    def update(self, observation: Observation) -> Verdict | None:
        """Judge where the row's step lies."""
        values, step = observation.values, observation.step
        self._resumed = values.get(RESUMED, self._resumed)
        if TRAINING_SERIES.isdisjoint(values):
            return None
        if self._last is not None and step < self._last:
            self._begin()
        if self._last is None:
            self._scratch = step <= 1
            if step <= 1 and self._reached >= self._s.lost_steps and not self._meant:
                self._lost = self._reached
            self._loaded, self._resumed = self._resumed, NAN
        self._last, self._high = step, max(self._high, step)
        if self._told is not None and step <= self._until:
            return self._told
        lost = self._lost
        if lost is None or step > min(self._s.told_steps, lost):
            return Verdict(Status.OK, signal=STEP, value=float(step))
        how = (f"although the checkpoint of step {self._loaded:.0f} was loaded" if self._loaded >= 1 else
               "without resuming from a checkpoint")
        return Verdict(
            Status.WARNING, score=1.0 + lost / 100, since_step=min(step, 1), signal=STEP, value=float(step),
            reason=f"The run was started again at step {min(step, 1)} after it had reached step {lost}, {how}: "
                   f"the training of {lost} steps is lost or done twice.",
            evidence={"reached_step": float(lost), "step": float(step)})
