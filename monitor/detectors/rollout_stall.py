"""Rollout stall: no step for longer than this run's own steps allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from monitor.catalog import TRAINING_SERIES
from monitor.detectors.base import Detector, Settings, setting
from monitor.detectors.stall_evidence import Seen, explain, look
from monitor.facts import Facts
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import Baseline
from monitor.units import Unit, quantity
from monitor.verl_config import Value

STEP, TESTING, SAVING = ("stage_duration_seconds/step", "stage_duration_seconds/testing",
                         "stage_duration_seconds/save_checkpoint")
_GAP_CAP = 20.0


@dataclass(frozen=True, kw_only=True)
class RolloutStallSettings(Settings):
    """Limits of ``rollout_stall``."""

    floor_seconds: float = setting(60.0, "s", "A silence shorter than this is never a stall.")
    median_factor: float = setting(5.0, "ratio", "Silence over the run's median step time that is a stall.")
    slowest_factor: float = setting(
        1.5, "ratio", "Silence over the slowest of the last 200 steps (validation and checkpoint included) below "
                      "which it is no stall.")
    young_factor: float = setting(
        15.0, "ratio", "In place of median_factor while the run has not shown its slow steps yet: fewer than 10 steps, "
                       "or no validation although it validated at the start. Only where a step takes a minute or more.")
    first_step_seconds: float = setting(
        7200.0, "s", "Silence before the first step (loading, compiling, first rollout) that is a stall.")
    burst_factor: float = setting(
        1.5, "ratio", "Silence over the span of the last bursts of a buffered log below which it is no stall.")


SPEC = DetectorSpec(
    id="rollout_stall",
    title="Rollout stall",
    severity=Severity.CRITICAL,
    required=(tuple(sorted(TRAINING_SERIES)),),
    optional=(STEP, TESTING, SAVING),
    wake="Any training row will do; timing_s/step makes the run's own step time exact.",
    meaning="No step has arrived for much longer than this run's own steps take, slow validation and checkpoint steps "
            "included. The processes may all be alive and the GPUs may show any utilisation.",
    impact="Every GPU of the job is reserved and does nothing. verl waits for ever: neither its rollout calls nor its "
           "placement groups have a time-out.",
    diagnosis=(
        "Which stage hangs: the trainer's log around the last step, and py-spy dump on the TaskRunner.",
        "Rollout: a rollout server that no longer answers shows running requests that never finish "
        "('pending: 0, running: N, finished: 0').",
        "Reward: one answer that makes a rule-based scorer spin, or a reward service that is down.",
        "Ray: dead actors, and placement groups of an earlier job that still hold the GPUs (ray status, "
        "ray list placement-groups --detail).",
        "GPU: full utilisation at idle power, or none at all with memory held, are both signs of a hang.",
    ),
    actions=(
        "note the stage, then stop the job and resume from its last checkpoint (trainer.resume_mode=auto)",
        "remove leaked placement groups before the restart, or the new job waits for ever too",
        "give the reward function a time-out of its own and check reward.num_workers",
        "lower actor_rollout_ref.rollout.gpu_memory_utilization and check rollout settings if the rollout engine hung",
    ),
    misses="A run that slows down step by step (that is throughput_regression), and a hang before the first step for "
           "two hours.",
    source="Five of the run's own median steps, at least 60 s: the run itself says what is slow. Rows of a buffered "
           "log arrive in bursts of up to some hundred, so the span of a burst counts as a step of that length.",
    guide="3.3",
    panel=(STEP,),
    rise_steps=1,
    clear_steps=1,
    under=("non_finite",),
    facts=("gpu", "ray"),
)


class RolloutStall(Detector):
    """Time since the last step against what this run's own steps take.

    The run's step time is the median of the durations it reports (``timing_s/step`` plus ``testing``, which verl
    leaves out of it) or, where it reports none, of the gaps between live rows. The first step (loading, compiling)
    does not count. The silence allowed is the largest of: 60 s, five medians, one and a half times the slowest recent
    step, one and a half times the span of the last bursts if the log arrives in bursts. What the probes see explains
    a stall and never decides it. A false alarm pages somebody at night, so a slow step seen once is allowed for the
    next 200 steps.

    >>> from monitor.model import Observation
    >>> detector = RolloutStall()
    >>> for step in range(20):
    ...     _ = detector.update(Observation("run", step, 20.0 * step, {"stage_duration_seconds/step": 20.0}))
    >>> detector.tick(20.0 * 19 + 90).status.name, detector.tick(20.0 * 19 + 101).status.name
    ('OK', 'CRITICAL')
    """

    spec = SPEC
    settings_type = RolloutStallSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(RolloutStallSettings, self._settings)
        self._durations = Baseline(200)
        self._steps = 0  # since the log was begun
        self._last_step: int | None = None
        self._last_time: float | None = None
        self._first_duration = NAN
        self._validation_pending = False
        self._phase, self._phase_since = "", 0.0
        self._job = ""
        self._facts: Facts | None = None  # the latest, until they are needed
        self._seen: Seen | None = None  # what of them bears on a stall
        # Rows that arrived together, and the seconds of training they stand for.
        self._batch_rows, self._batch_span = 0, 0.0
        self._bursts: deque[float] = deque(maxlen=3)

    def restarted(self, time_seconds: float) -> None:
        """A first step is due again, and it may be long; what is known of the run's speed stays."""
        self._steps = 0
        self._batch_rows, self._batch_span = 0, 0.0
        self._last_time = time_seconds

    def entered(self, phase: str, time_seconds: float) -> None:
        """Remember the stage, to say where the run hangs. It ends no silence: a hang is entered too."""
        self._phase, self._phase_since = phase, time_seconds

    def configured(self, config: Mapping[str, Value]) -> None:
        """Remember the run's Ray job, where its trainer tells it."""
        self._job = str(config.get("verl_monitor.ray_job") or "")

    def probed(self, facts: Facts) -> None:
        """Remember what the probes see, to say why the run hangs. It never makes or vetoes a stall."""
        self._facts = facts  # looked through in a stall alone: a cluster may have ten thousand actors

    def update(self, observation: Observation) -> Verdict | None:
        """Take in a row: it ends any silence."""
        values, now = observation.values, observation.time_seconds
        # Only a run that may still validate for the first time is searched for it: a row has a hundred series.
        validated = TESTING in values or ((self._steps == 0 or self._validation_pending) and any(
            series.startswith("validation_score") for series in values))
        if TRAINING_SERIES.isdisjoint(values):
            # Validation before training: no step, but a sign of life, and it tells of slow steps to come.
            self._validation_pending = self._validation_pending or (validated and self._steps == 0)
            self._last_time = max(now, self._last_time or now)
            return None
        self._validation_pending = self._validation_pending and not validated
        reported = sum(values[s] for s in (STEP, TESTING) if s in values and values[s] == values[s])
        gap = now - self._last_time if self._last_time is not None and self._batch_rows == 1 else NAN
        if observation.step != self._last_step or self._steps == 0:
            self._learn(reported, gap if observation.live and gap > 0 else NAN)
        self._count_arrival(now, reported, live=observation.live)
        self._last_step = observation.step
        self._last_time = max(now, self._last_time or now)
        allowed = self.allowed_seconds()
        return Verdict(
            Status.OK if len(self._durations) else Status.WARMING, signal=STEP, value=0.0, threshold=allowed,
            evidence={"expected_step_seconds": self.expected_seconds()})

    def _learn(self, reported: float, gap: float) -> None:
        """Duration of a step: what it reports, or the gap before it where that is longer (a checkpoint that the
        version does not count in) but no longer than the monitor itself may have slept."""
        known = reported if reported > 0 else self.expected_seconds()
        duration = max(reported, min(gap, _GAP_CAP * known) if known == known else gap) if gap == gap else reported
        if self._steps == 0:
            self._first_duration = reported if reported > 0 else NAN
        elif duration > 0:
            self._durations.offer(duration)
        self._steps += 1

    def _count_arrival(self, now: float, reported: float, *, live: bool) -> None:
        span = reported if reported > 0 else self.expected_seconds()
        if self._batch_rows and self._last_time is not None and now <= self._last_time:
            self._batch_rows += live
            self._batch_span += span if span == span else 0.0
            return
        if self._batch_rows:
            self._bursts.append(self._batch_span if self._batch_rows > 1 else 0.0)
        self._batch_rows, self._batch_span = 1, span if span == span else 0.0

    def expected_seconds(self) -> float:
        """Median duration of a step; the first step's where there is no other; NaN before it."""
        return self._durations.median() if len(self._durations) else self._first_duration

    def allowed_seconds(self) -> float:
        """Silence after the last row that is still allowed."""
        expected = self.expected_seconds()
        if self._steps == 0 or expected != expected:
            return self._s.first_step_seconds
        young = len(self._durations) < 10 or self._validation_pending
        factor = self._s.young_factor if young and expected >= self._s.floor_seconds else self._s.median_factor
        burst = max(self._bursts, default=0.0)
        if self._batch_rows > 1:
            burst = max(burst, self._batch_span)
        return max(self._s.floor_seconds, factor * expected, self._s.burst_factor * burst,
                   self._s.slowest_factor * (self._durations.quantile(1.0) if len(self._durations) else 0.0))

    def tick(self, now: float) -> Verdict | None:
        """Judge the silence at time ``now``."""
        if self._last_time is None:
            return None
        silence, allowed = now - self._last_time, self.allowed_seconds()
        expected = self.expected_seconds()
        if silence < allowed:
            return Verdict(
                Status.OK if expected == expected else Status.WARMING, score=min(0.99, max(0.0, silence / allowed)),
                signal=STEP, value=max(0.0, silence), threshold=allowed, since_step=self._last_step,
                reason=f"Last step {quantity(max(0.0, silence), Unit.SECONDS)} ago, allowed "
                       f"{quantity(allowed, Unit.SECONDS)}.",
                evidence={"expected_step_seconds": expected})
        where = (f" in the stage {self._phase} for {quantity(max(0.0, now - self._phase_since), Unit.SECONDS)}"
                 if self._phase else "")
        after = f"after step {self._last_step}" if self._steps else "since its log was begun"
        usual = (f"this run's steps take {quantity(expected, Unit.SECONDS)}" if expected == expected else
                 "no step has been completed")
        if self._facts is not None:
            self._seen, self._facts = look(self._facts, self._job), None
        why, numbers = explain(self._seen, self._phase, silence, now) if self._seen else ("", {})
        why = f" {why}" if why else ""
        return Verdict(
            Status.CRITICAL, score=silence / allowed, signal=STEP, value=silence, threshold=allowed, hard=True,
            since_step=self._last_step,
            reason=f"No step for {quantity(silence, Unit.SECONDS)} {after}, while {usual} and "
                   f"{quantity(allowed, Unit.SECONDS)} of silence would be allowed: the run hangs{where}.{why}",
            evidence=numbers | {"silence_seconds": silence, "expected_step_seconds": expected,
                                "slowest_step_seconds": self._durations.quantile(1.0)})
