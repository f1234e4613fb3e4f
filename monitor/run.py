"""One run: its life, its incarnations, its detectors' confirmed findings. Used by the engine only."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from monitor.catalog import HAS_CRITIC_SERIES, TRAINING_SERIES, verl_keys
from monitor.detectors import Detector
from monitor.detectors.rollout_stall import RolloutStall
from monitor.hysteresis import Level
from monitor.model import (
    DetectorSpec,
    Incident,
    Observation,
    RunState,
    Severity,
    Status,
    Verdict,
)
from monitor.verl_config import Value, algorithm_of, flatten

log = logging.getLogger("monitor.run")
_T = TypeVar("_T")

BLIND_AFTER_ROWS = 5
BLIND_AGAIN_ROWS = 50
BROKEN_AFTER_ERRORS = 20
MAX_INCIDENTS = 200
MAX_PHASE_LENGTH = 60
HANDOVER_SECONDS = 600.0

Origin = tuple[str, str, str]
"""Where an event comes from: source, kind of log, path. The first two are one channel: each start of a run may bring a
new path, but no new channel."""
NOWHERE: Origin = ("", "", "")


@dataclass(slots=True, kw_only=True)
class Limits:
    """Caps per run. What is cut is counted, never dropped in silence."""

    series: int = 600
    unknown_keys: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorView:
    """What a snapshot says of one detector on one run."""

    spec: DetectorSpec
    verdict: Verdict
    severity: Severity | None
    suppressed_by: str
    missing: tuple[str, ...]
    broken: bool
    findings: Mapping[Severity, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """An immutable picture of one run."""

    run: str
    project: str
    source: str
    state: RunState
    state_reason: str
    algorithm: str
    steps: int
    last_step: int | None
    last_step_seconds: float
    restarts: int
    expected_step_seconds: float
    allowed_silence_seconds: float
    values: Mapping[str, float]
    unknown: Mapping[str, float]
    nonfinite: Mapping[str, int]
    detectors: tuple[DetectorView, ...]
    incidents: tuple[Incident, ...]
    ended_seconds: float | None
    phase: str = ""
    phase_since_seconds: float = 0.0

    @property
    def severity(self) -> Severity | None:
        """Worst confirmed finding that is not suppressed."""
        found = [d.severity for d in self.detectors if d.severity and not d.suppressed_by]
        return Severity.CRITICAL if Severity.CRITICAL in found else Severity.WARNING if found else None


@dataclass(slots=True)
class Watch:
    """One detector on one run, with its confirmed level and its bookkeeping."""

    detector: Detector
    level: Level
    verdict: Verdict = field(default_factory=lambda: Verdict(Status.NO_DATA, reason="No row yet."))
    suppressed_by: str = ""
    incident: int | None = None  # serial number of the open incident
    findings: dict[Severity, int] = field(default_factory=lambda: dict.fromkeys(Severity, 0))
    last_needed: dict[int, int] = field(default_factory=dict)  # required group -> training row that last had it
    errors: int = 0
    broken: bool = False

    @property
    def spec(self) -> DetectorSpec:
        return self.detector.spec


@dataclass(slots=True)
class DetectorCost:
    """Errors and time of one kind of detector over all runs."""

    errors: int = 0
    seconds: float = 0.0


class Run:
    """State of one run. Bounded: the number of steps does not matter."""

    def __init__(self, name: str, project: str, source: str, now: float, detectors: Sequence[Detector],
                 costs: Mapping[str, DetectorCost], limits: Limits) -> None:
        self.name, self.project, self.source = name, project, source
        self.state, self.state_reason = RunState.STARTING, ""
        self.ended_seconds: float | None = None
        self.last_heard = now
        self.phase, self.phase_since = "", now
        self.dropped_series = self.repeated_rows = 0
        self._leader: Origin | None = None
        self._owner: dict[str, Origin] = {}  # series or key -> who brought it last while leading
        self._channels: set[tuple[str, str]] = set()  # that have told of the present incarnation
        self._config: Mapping[str, Value] = {}
        self._steps = self._rows = self._restarts = 0
        self._last_step: int | None = None
        self._last_step_seconds = now
        self._limits, self._costs = limits, costs
        self._values: dict[str, float] = {}
        self._unknown: dict[str, float] = {}
        self._nonfinite: dict[str, int] = {}
        self._has_critic = False
        self._watches = [Watch(d, Level(d.spec.rise_steps, d.spec.clear_steps)) for d in detectors]
        self._by_id = {watch.spec.id: watch for watch in self._watches}
        self._incidents: deque[tuple[int, Incident]] = deque(maxlen=MAX_INCIDENTS)
        self._serial = 0

    # --- what happens to a run

    def begin(self, now: float, origin: Origin = NOWHERE, *, restarted: bool) -> None:
        """Its log was met, or begun anew."""
        self.last_heard = now
        channel = origin[:2]
        known = bool(self._channels) and channel not in self._channels  # another one has told this start already
        self._channels.add(channel)
        # Another log of a run that goes on, or that is over: only a new step of it would bring that back.
        if self._rows and (self.state.active or (known and not restarted)) and (known or not restarted):
            return
        if restarted:
            self._channels = {channel}
            if self._rows and self._last_step is not None:
                self._restarts += 1
        self._last_step = None if restarted else self._last_step
        self.state, self.state_reason, self.ended_seconds = RunState.STARTING, "", None
        for watch in self._watches:
            watch.detector.restarted(now)

    def end(self, now: float, state: RunState, reason: str) -> None:
        """It is over. A stall is over with it; other findings keep their last word until the retention is over."""
        self.state, self.state_reason, self.ended_seconds, self.last_heard = state, reason, now, now
        self.phase = ""
        for watch in self._watches:
            if isinstance(watch.detector, RolloutStall) and watch.level.clear():
                watch.verdict = Verdict(Status.OK, reason=f"The run is over: {reason}.")
                self._close(watch, "the run ended")

    def enter(self, phase: str, now: float) -> None:
        """It is in this stage since ``now``; empty: between stages. A stage is a sign of life, but no step."""
        self.phase, self.phase_since = phase[:MAX_PHASE_LENGTH], now
        for watch in self._watches:
            watch.detector.entered(self.phase, now)

    def configure(self, values: Mapping[str, object]) -> None:
        """It has this configuration, nested as verl has it."""
        self._config = flatten(values)
        for watch in self._watches:
            self._guard(watch, partial(watch.detector.configured, self._config))

    def observe(self, observation: Observation, origin: Origin = NOWHERE) -> None:
        """Take in a row and judge it.

        A run may be seen through several logs and sources. Whichever brings a step first leads; what another one brings
        of steps that are known already is the same step again, and neither a restart nor a sign of life. Of such a
        row only what no other one brings is taken: two event files of one run may hold different metrics.
        """
        training = not TRAINING_SERIES.isdisjoint(observation.values)
        if self._leader not in (None, origin):
            if self._is_late(observation, origin):
                self.repeated_rows += 1
                return
            if self._last_step is not None and observation.step <= self._last_step:
                self._add(observation, origin)
                return
        self._leader = origin
        self._own(observation, origin)
        if self._last_step is not None and training and observation.step < self._last_step:
            self._restarts += 1
            for watch in self._watches:
                watch.detector.restarted(observation.time_seconds)
            self._last_step = None
        if not self.state.active:
            self.state_reason, self.ended_seconds = "", None
        self.state = RunState.RUNNING if training or self._steps else RunState.STARTING
        self.last_heard = observation.time_seconds
        if training:
            self._rows += 1
            if observation.step != self._last_step:
                self._steps += 1
            self._last_step, self._last_step_seconds = observation.step, observation.time_seconds
        self._take(observation)

    def _own(self, observation: Observation, origin: Origin) -> None:
        owned = dict.fromkeys((*observation.values, *observation.unknown), origin)
        if len(self._owner) > self._limits.series + self._limits.unknown_keys:  # what is cut there needs no owner
            owned = {name: origin for name in owned if name in self._owner}
        self._owner.update(owned)

    def _is_late(self, observation: Observation, origin: Origin) -> bool:
        """Whether a row is of the incarnation before: its channel has not told the start that another one has."""
        return (self._restarts > 0 and origin[:2] not in self._channels
                and observation.time_seconds - self.last_heard < HANDOVER_SECONDS)

    def _add(self, observation: Observation, origin: Origin) -> None:
        """Take of a row that is known already what nobody else brings."""
        values = {s: value for s, value in observation.values.items() if self._owner.get(s, origin) == origin}
        unknown = {key: value for key, value in observation.unknown.items() if self._owner.get(key, origin) == origin}
        if values or unknown:
            self._take(replace(observation, values=values, unknown=unknown))
        else:
            self.repeated_rows += 1

    def _take(self, observation: Observation) -> None:
        self._keep(observation)
        for watch in self._watches:
            self._judge(watch, observation)
        self._suppress(observation.step)

    def tick(self, now: float) -> bool:
        """Judge the passing of time; true when something changed."""
        if not self.state.active:
            return False
        changed = False
        for watch in self._watches:
            verdict = self._guard(watch, partial(watch.detector.tick, now))
            if verdict is not None:
                changed |= verdict.status >= Status.WARNING or watch.verdict.status != verdict.status
                self._apply(watch, verdict, self._last_step or 0)
        stalled = any(w.level.current and isinstance(w.detector, RolloutStall) for w in self._watches)
        if stalled and self.state is not RunState.STALLED:
            self.state, changed = RunState.STALLED, True
        if changed:
            self._suppress(self._last_step or 0)
        return changed

    # --- keeping

    def _keep(self, observation: Observation) -> None:
        for series, value in observation.values.items():
            if series in self._values or len(self._values) < self._limits.series:
                self._values[series] = value
            else:
                self.dropped_series += 1
            if value != value:
                self._nonfinite[series] = self._nonfinite.get(series, 0) + 1
        for key, value in observation.unknown.items():
            if key in self._unknown or len(self._unknown) < self._limits.unknown_keys:
                self._unknown[key] = value
            else:
                self.dropped_series += 1
        if not self._has_critic:
            self._has_critic = not HAS_CRITIC_SERIES.isdisjoint(observation.values)

    # --- judging

    def _guard(self, watch: Watch, call: Callable[[], _T]) -> _T | None:
        """Call a detector; what it raises is counted and stays with it."""
        if watch.broken:
            return None
        cost = self._costs[watch.spec.id]
        start = time.perf_counter()
        try:
            verdict = call()
        except Exception as error:  # noqa: BLE001 - isolation of a faulty detector is the point
            cost.errors += 1
            watch.errors += 1
            if watch.errors == 1:
                log.warning("detector %s raised on run %s: %r", watch.spec.id, self.name, error)
            if watch.errors >= BROKEN_AFTER_ERRORS:
                watch.broken = True
                log.error("detector %s is out for run %s after %d errors", watch.spec.id, self.name, watch.errors)
                if watch.level.clear():
                    self._close(watch, "the detector failed")
            return None
        finally:
            cost.seconds += time.perf_counter() - start
        watch.errors = 0
        return verdict

    def _judge(self, watch: Watch, observation: Observation) -> None:
        for group, series in enumerate(watch.spec.required):
            if not observation.values.keys().isdisjoint(series):
                watch.last_needed[group] = self._rows
        verdict = self._guard(watch, partial(watch.detector.update, observation))
        if verdict is not None:
            self._apply(watch, verdict, observation.step)

    def _apply(self, watch: Watch, verdict: Verdict, step: int) -> None:
        watch.verdict = verdict
        changed = watch.level.update(verdict)
        if changed and watch.level.current is None:
            self._close(watch, "it cleared")
        elif changed or (watch.incident is not None and verdict.status >= Status.WARNING):
            self._record(watch, step, changed=changed)

    def _record(self, watch: Watch, step: int, *, changed: bool) -> None:
        """Open, worsen or prolong the incident of a confirmed finding."""
        severity, verdict = watch.level.current, watch.verdict
        if severity is None or watch.suppressed_by:
            return
        if changed and watch.incident is None:
            cause = self._cause(watch)
            if cause:
                watch.suppressed_by = cause
                return
        known = self._open(watch)
        if known is None:
            self._serial += 1
            watch.incident = self._serial
            watch.findings[severity] += 1
            since = verdict.since_step if verdict.since_step is not None else step
            self._incidents.append((self._serial, Incident(
                watch.spec.id, severity, since, step, step, self.last_heard, verdict.reason, verdict.evidence,
                verdict.score, step if severity is Severity.CRITICAL else None)))
            return
        place, incident = known
        if severity is Severity.CRITICAL and incident.severity is Severity.WARNING:
            watch.findings[severity] += 1
            incident = replace(incident, severity=severity, critical_step=step)
        if verdict.score >= incident.score:
            incident = replace(incident, reason=verdict.reason, evidence=verdict.evidence, score=verdict.score)
        first = incident.first_step if verdict.since_step is None else min(incident.first_step, verdict.since_step)
        self._incidents[place] = (watch.incident or 0, replace(incident, last_step=step, first_step=first))

    def _open(self, watch: Watch) -> tuple[int, Incident] | None:
        for place in range(len(self._incidents) - 1, -1, -1):
            if watch.incident is not None and self._incidents[place][0] == watch.incident:
                return place, self._incidents[place][1]
        return None

    def _close(self, watch: Watch, why: str) -> None:
        known = self._open(watch)
        if known is not None:
            self._incidents[known[0]] = (watch.incident or 0, replace(known[1], ended=why))
        watch.incident, watch.suppressed_by = None, ""

    def _cause(self, watch: Watch) -> str:
        for cause in watch.spec.under:
            other = self._by_id.get(cause)
            if other is not None and other.level.current is not None and not other.suppressed_by:
                return cause
        return ""

    def _suppress(self, step: int) -> None:
        """Hold back what a cause explains, and let go what no cause explains any more."""
        for watch in self._watches:
            if watch.level.current is None:
                watch.suppressed_by = ""
            elif watch.suppressed_by and not self._cause(watch):
                watch.suppressed_by = ""
                self._record(watch, step, changed=True)

    # --- telling

    def missing(self, watch: Watch) -> tuple[str, ...]:
        """verl keys whose absence makes a detector blind; empty when it sees."""
        if watch.broken:
            return ("the detector failed and is out for this run",)
        missing: list[str] = []
        for group, series in enumerate(watch.spec.required):
            last = watch.last_needed.get(group)
            allowed = BLIND_AFTER_ROWS if last is None else BLIND_AGAIN_ROWS
            if self._rows - (last or 0) >= allowed:
                missing.extend(verl_keys(s)[0] for s in series)
        return tuple(missing)

    def _algorithm(self) -> str:
        if told := algorithm_of(self._config):
            return told
        if self._has_critic:
            return "ppo"
        if "supervised_loss_nats/train" in self._values:
            return "supervised"
        return "critic-free" if self._steps >= BLIND_AFTER_ROWS else "unknown"

    def view(self) -> RunView:
        """An immutable picture, made of copies."""
        stall = next((w.detector for w in self._watches if isinstance(w.detector, RolloutStall)), None)
        nan = float("nan")
        return RunView(
            run=self.name, project=self.project, source=self.source, state=self.state, state_reason=self.state_reason,
            algorithm=self._algorithm(), steps=self._steps, last_step=self._last_step,
            last_step_seconds=self._last_step_seconds, restarts=self._restarts,
            expected_step_seconds=stall.expected_seconds() if stall else nan,
            allowed_silence_seconds=stall.allowed_seconds() if stall else nan,
            values=dict(self._values), unknown=dict(self._unknown), nonfinite=dict(self._nonfinite),
            detectors=tuple(
                DetectorView(spec=w.spec, verdict=w.verdict, severity=w.level.current, suppressed_by=w.suppressed_by,
                             missing=self.missing(w), broken=w.broken, findings=dict(w.findings))
                for w in self._watches),
            incidents=tuple(incident for _, incident in self._incidents), ended_seconds=self.ended_seconds,
            phase=self.phase, phase_since_seconds=self.phase_since)

