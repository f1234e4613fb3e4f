"""One run: its life, its incarnations, its detectors' confirmed findings. Used by the engine only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from monitor.catalog import HAS_CRITIC_SERIES, TRAINING_SERIES
from monitor.detectors import Detector
from monitor.detectors.rollout_stall import RolloutStall
from monitor.facts import Facts
from monitor.model import (
    Incident,
    Observation,
    RunState,
    Severity,
)
from monitor.verl_config import Value, algorithm_of, flatten
from monitor.watches import BLIND_AFTER_ROWS, DetectorCost, DetectorView, Watches, worst

MAX_PHASE_LENGTH = 60
MAX_LOGS = 4
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
        return worst(self.detectors)


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
        self.config: Mapping[str, Value] = {}
        self.logs: tuple[str, ...] = ()  # paths of the logs that tell of it, the last few
        self._steps = self._rows = self._restarts = 0
        self._last_step: int | None = None
        self._last_step_seconds = now
        self._limits = limits
        self._values: dict[str, float] = {}
        self._unknown: dict[str, float] = {}
        self._nonfinite: dict[str, int] = {}
        self._has_critic = False
        self.watches = Watches(f"run {name}", detectors, costs, now)

    # --- what happens to a run

    def begin(self, now: float, origin: Origin = NOWHERE, *, restarted: bool) -> None:
        """Its log was met, or begun anew."""
        self.last_heard = now
        self._note_log(origin[2])
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
        for watch in self.watches.items:
            watch.detector.restarted(now)

    def _note_log(self, path: str) -> None:
        if path and path not in self.logs:
            self.logs = (*self.logs, path)[-MAX_LOGS:]

    def end(self, now: float, state: RunState, reason: str) -> None:
        """It is over. A stall is over with it; other findings keep their last word until the retention is over."""
        self.state, self.state_reason, self.ended_seconds, self.last_heard = state, reason, now, now
        self.phase = ""
        self.watches.drop(RolloutStall, f"The run is over: {reason}.", "the run ended")

    def enter(self, phase: str, now: float) -> None:
        """It is in this stage since ``now``; empty: between stages. A stage is a sign of life, but no step."""
        self.phase, self.phase_since = phase[:MAX_PHASE_LENGTH], now
        for watch in self.watches.items:
            watch.detector.entered(self.phase, now)

    def configure(self, values: Mapping[str, object]) -> None:
        """It has this configuration, nested as verl has it."""
        self.config = flatten(values)
        for watch in self.watches.items:
            self.watches.call(watch, partial(watch.detector.configured, self.config))

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
            for watch in self.watches.items:
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
        self.watches.heard = self.last_heard
        self.watches.judge(observation, self._rows)

    def tick(self, now: float) -> bool:
        """Judge the passing of time; true when something changed."""
        if not self.state.active:
            return False
        self.watches.heard = self.last_heard
        changed = self.watches.tick(now, self._last_step or 0)
        if self.watches.found(RolloutStall) and self.state is not RunState.STALLED:
            self.state, changed = RunState.STALLED, True
        return changed

    def probe(self, facts: Facts) -> bool:
        """Judge what the probes see; true when something changed."""
        if not self.state.active:
            return False
        facts = replace(facts, run=self.name)
        kinds = facts.kinds if self.name in facts.checkpoints else facts.kinds - {"checkpoints"}
        return self.watches.probe(facts, kinds, self._last_step or 0)

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

    @property
    def quiet(self) -> bool:
        """Whether it is half way to a stall, or further: time to look for the reason."""
        return any(watch.verdict.score >= 0.5 for watch in self.watches.items
                   if isinstance(watch.detector, RolloutStall))

    @property
    def steps(self) -> int:
        """Training steps seen."""
        return self._steps

    # --- telling

    def _algorithm(self) -> str:
        if told := algorithm_of(self.config):
            return told
        if self._has_critic:
            return "ppo"
        if "supervised_loss_nats/train" in self._values:
            return "supervised"
        return "critic-free" if self._steps >= BLIND_AFTER_ROWS else "unknown"

    def view(self) -> RunView:
        """An immutable picture, made of copies."""
        stall = next((w.detector for w in self.watches.items if isinstance(w.detector, RolloutStall)), None)
        nan = float("nan")
        return RunView(
            run=self.name, project=self.project, source=self.source, state=self.state, state_reason=self.state_reason,
            algorithm=self._algorithm(), steps=self._steps, last_step=self._last_step,
            last_step_seconds=self._last_step_seconds, restarts=self._restarts,
            expected_step_seconds=stall.expected_seconds() if stall else nan,
            allowed_silence_seconds=stall.allowed_seconds() if stall else nan,
            values=dict(self._values), unknown=dict(self._unknown), nonfinite=dict(self._nonfinite),
            detectors=self.watches.views(self._rows), incidents=self.watches.incidents,
            ended_seconds=self.ended_seconds,
            phase=self.phase, phase_since_seconds=self.phase_since)

