"""The engine: events of all sources in, one immutable snapshot out.

Not thread-safe: one thread (the event loop) feeds it. A snapshot is made of copies and may go anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from monitor.catalog import parse
from monitor.detectors import DETECTORS, MACHINE_DETECTORS, Detector
from monitor.facts import Facts
from monitor.machine import Machine, MachineView
from monitor.model import RawStep, RunConfig, RunEnded, RunStarted, RunState, SourceEvent
from monitor.run import Limits, Run, RunView
from monitor.watches import DetectorCost


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Caps and times of the engine.

    ``max_runs``: runs kept at once; beyond it the run that ended longest ago goes, and while none has ended new
    runs are dropped (counted). ``retain_ended_seconds``: how long an ended run stays. ``gone_after_seconds``: silence
    after which an active run is taken for gone.
    """

    max_runs: int = 500
    max_series: int = 600
    max_unknown_keys: int = 100
    retain_ended_seconds: float = 900.0
    gone_after_seconds: float = 7 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An immutable picture of everything the engine knows."""

    version: int
    runs: tuple[RunView, ...]
    dropped_runs: int
    dropped_series: int
    rejected_values: int
    repeated_rows: int
    costs: Mapping[str, tuple[int, float]]
    machine: MachineView | None = None

    def find(self, name: str) -> RunView | None:
        """The run of that name."""
        return next((view for view in self.runs if view.run == name), None)


class Engine:
    """Runs and their detectors.

    ``make_detectors`` builds the detectors of a new run from its name; by default every one of ``DETECTORS``;
    ``make_machine_detectors`` those of the machine room, by default every one of ``MACHINE_DETECTORS``.
    ``rename`` puts an event under the names that a user gave; by default the source's names stay.
    """

    def __init__(self, settings: EngineSettings | None = None,
                 make_detectors: Callable[[str], Sequence[Detector]] | None = None,
                 rename: Callable[[SourceEvent], SourceEvent] | None = None,
                 make_machine_detectors: Callable[[str], Sequence[Detector]] | None = None) -> None:
        self.settings = settings or EngineSettings()
        self._make = make_detectors or (lambda _: [detector() for detector in DETECTORS])
        self._make_machine = make_machine_detectors or (lambda _: [detector() for detector in MACHINE_DETECTORS])
        self._rename = rename
        self._machine: Machine | None = None
        self._runs: dict[str, Run] = {}
        self._views: dict[str, RunView] = {}
        self._costs: dict[str, DetectorCost] = {}
        self._dropped_runs = 0
        self._dropped_series = 0
        self._rejected_values = 0
        self._repeated_rows = 0
        self.version = 0
        """Grows with every change; two snapshots of one version are equal."""

    def handle(self, event: SourceEvent, source: str = "") -> None:
        """Take in one event of a source."""
        if self._rename is not None:
            event = self._rename(event)
        if isinstance(event, (RawStep, RunStarted, RunConfig)):
            run = self._run(event.run, event.project, source, event.time_seconds)
            if run is None:
                return
            if isinstance(event, RawStep):
                observation = parse(event)
                self._rejected_values += len(observation.rejected)
                run.observe(observation, (source, *event.log))
            elif isinstance(event, RunStarted):
                run.begin(event.time_seconds, (source, *event.log), restarted=event.restarted)
            else:
                run.configure(event.values)
            self._changed(run)
        elif event.run in self._runs:
            run = self._runs[event.run]
            if isinstance(event, RunEnded):
                run.end(event.time_seconds, event.state, event.reason)
            else:
                run.enter(event.phase, event.time_seconds)
            self._changed(run)

    def tick(self, now: float) -> None:
        """Judge the passing of time; to be called about once a second."""
        for name, run in list(self._runs.items()):
            if run.tick(now):
                self._changed(run)
            if run.state.active and now - run.last_heard > self.settings.gone_after_seconds:
                run.end(now, RunState.GONE, "nothing was heard of it for very long")
                self._changed(run)
            if run.ended_seconds is not None and now - run.ended_seconds > self.settings.retain_ended_seconds:
                self._forget(name)

    def probe(self, facts: Facts, name: str) -> None:
        """Take in what the probes see now. ``name``: what the machine room is called."""
        active = self.active_runs()
        facts = replace(facts, active_runs=len(active), stepping=any(run.steps for run in active))
        if self._machine is None:
            detectors = self._make_machine(name)
            for detector in detectors:
                self._costs.setdefault(detector.spec.id, DetectorCost())
            self._machine = Machine(name, facts, detectors, self._costs)
            self.version += 1
        if self._machine.probe(facts):
            self.version += 1
        for run in self._runs.values():
            if run.probe(facts):
                self._changed(run)

    def active_runs(self) -> list[Run]:
        """Runs of which steps are still expected."""
        return [run for run in self._runs.values() if run.state.active]

    def snapshot(self) -> Snapshot:
        """A picture of now. Runs that did not change since the last one are not copied again."""
        for name, run in self._runs.items():
            if name not in self._views:
                self._views[name] = run.view()
        return Snapshot(
            version=self.version, runs=tuple(self._views[name] for name in self._runs),
            dropped_runs=self._dropped_runs,
            dropped_series=self._dropped_series + sum(run.dropped_series for run in self._runs.values()),
            rejected_values=self._rejected_values,
            repeated_rows=self._repeated_rows + sum(run.repeated_rows for run in self._runs.values()),
            costs={name: (cost.errors, cost.seconds) for name, cost in self._costs.items()},
            machine=self._machine.view() if self._machine else None)

    def _run(self, name: str, project: str, source: str, now: float) -> Run | None:
        run = self._runs.get(name)
        if run is not None:
            return run
        if len(self._runs) >= self.settings.max_runs and not self._make_room():
            self._dropped_runs += 1
            self.version += 1
            return None
        detectors = self._make(name)
        for detector in detectors:
            self._costs.setdefault(detector.spec.id, DetectorCost())
        limits = Limits(series=self.settings.max_series, unknown_keys=self.settings.max_unknown_keys)
        run = Run(name, project, source, now, detectors, self._costs, limits)
        self._runs[name] = run
        return run

    def _make_room(self) -> bool:
        ended = [(run.ended_seconds, name) for name, run in self._runs.items() if run.ended_seconds is not None]
        if not ended:
            return False
        self._forget(min(ended)[1])
        return True

    def _forget(self, name: str) -> None:
        run = self._runs.pop(name)
        self._dropped_series += run.dropped_series
        self._repeated_rows += run.repeated_rows
        self._views.pop(name, None)
        self.version += 1

    def _changed(self, run: Run) -> None:
        self._views.pop(run.name, None)
        self.version += 1
