"""Detectors at work on one subject, a run or a machine: isolation, confirmation, suppression, incidents."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from monitor.catalog import verl_keys
from monitor.detectors import Detector
from monitor.facts import Facts
from monitor.hysteresis import Level
from monitor.model import DetectorSpec, Incident, Observation, Severity, Status, Verdict

log = logging.getLogger("monitor.watches")
_T = TypeVar("_T")

BLIND_AFTER_ROWS = 5
BLIND_AGAIN_ROWS = 50
BROKEN_AFTER_ERRORS = 20
MAX_INCIDENTS = 200

_WAKE = {
    "gpu": "a GPU that the monitor can ask (verl-monitor serve or node on its machine, or --ray-address)",
    "ray": "the Ray dashboard's address (--ray-address)",
    "checkpoints": "a checkpoint directory that this monitor sees (--checkpoint-dir)",
}


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


def worst(detectors: Sequence[DetectorView]) -> Severity | None:
    """Worst confirmed finding that is not suppressed."""
    found = [d.severity for d in detectors if d.severity and not d.suppressed_by]
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


class Watches:
    """The detectors of a subject. ``heard``: when it was last heard of, the time of what is raised now."""

    def __init__(self, subject: str, detectors: Sequence[Detector], costs: Mapping[str, DetectorCost],
                 now: float) -> None:
        self.subject, self.heard = subject, now
        self.items = [Watch(d, Level(d.spec.rise_steps, d.spec.clear_steps)) for d in detectors]
        self._costs = costs
        self._by_id = {watch.spec.id: watch for watch in self.items}
        self._incidents: deque[tuple[int, Incident]] = deque(maxlen=MAX_INCIDENTS)
        self._serial = 0
        self._facts: frozenset[str] | None = None  # kinds that the probes have; None: nothing is probed

    def judge(self, observation: Observation, rows: int) -> None:
        """Have a row judged, the subject's ``rows``-th."""
        for watch in self.items:
            for group, series in enumerate(watch.spec.required):
                if not observation.values.keys().isdisjoint(series):
                    watch.last_needed[group] = rows
            verdict = self.call(watch, partial(watch.detector.update, observation))
            if verdict is not None:
                self._apply(watch, verdict, observation.step)
        self._suppress(observation.step)

    def tick(self, now: float, step: int) -> bool:
        """Have the passing of time judged; true when something changed."""
        return self._each(step, lambda detector: detector.tick(now))

    def probe(self, facts: Facts, kinds: frozenset[str], step: int) -> bool:
        """Have what the probes see judged; true when something changed. ``kinds``: what there are facts of."""
        changed = kinds != self._facts
        self._facts = kinds
        return self._each(step, lambda detector: detector.probed(facts) if detector.spec.facts else None) or changed

    def _each(self, step: int, ask: Callable[[Detector], Verdict | None]) -> bool:
        changed = False
        for watch in self.items:
            verdict = self.call(watch, partial(ask, watch.detector))
            if verdict is not None:
                changed |= verdict.status >= Status.WARNING or watch.verdict.status != verdict.status
                self._apply(watch, verdict, step)
        if changed:
            self._suppress(step)
        return changed

    def found(self, kind: type[Detector]) -> bool:
        """Whether a detector of this kind has a confirmed finding."""
        return any(watch.level.current and isinstance(watch.detector, kind) for watch in self.items)

    def drop(self, kind: type[Detector], reason: str, why: str) -> None:
        """End the finding of a detector of this kind."""
        for watch in self.items:
            if isinstance(watch.detector, kind) and watch.level.clear():
                watch.verdict = Verdict(Status.OK, reason=reason)
                self._close(watch, why)

    def views(self, rows: int) -> tuple[DetectorView, ...]:
        """An immutable picture of each."""
        return tuple(
            DetectorView(spec=w.spec, verdict=w.verdict, severity=w.level.current, suppressed_by=w.suppressed_by,
                         missing=self.missing(w, rows), broken=w.broken, findings=dict(w.findings))
            for w in self.items)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Confirmed findings, oldest first."""
        return tuple(incident for _, incident in self._incidents)

    def call(self, watch: Watch, ask: Callable[[], _T]) -> _T | None:
        """Call a detector; what it raises is counted and stays with it: None."""
        if watch.broken:
            return None
        cost = self._costs[watch.spec.id]
        start = time.perf_counter()
        try:
            verdict = ask()
        except Exception as error:  # noqa: BLE001 - isolation of a faulty detector is the point
            cost.errors += 1
            watch.errors += 1
            if watch.errors == 1:
                log.warning("detector %s raised on %s: %r", watch.spec.id, self.subject, error)
            if watch.errors >= BROKEN_AFTER_ERRORS:
                watch.broken = True
                log.error("detector %s is out for %s after %d errors", watch.spec.id, self.subject, watch.errors)
                if watch.level.clear():
                    self._close(watch, "the detector failed")
            return None
        finally:
            cost.seconds += time.perf_counter() - start
        watch.errors = 0
        return verdict

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
                watch.spec.id, severity, since, step, step, self.heard, verdict.reason, verdict.evidence,
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
        for watch in self.items:
            if watch.level.current is None:
                watch.suppressed_by = ""
            elif watch.suppressed_by and not self._cause(watch):
                watch.suppressed_by = ""
                self._record(watch, step, changed=True)

    def missing(self, watch: Watch, rows: int) -> tuple[str, ...]:
        """What a detector is blind for the lack of: verl's keys, or facts; empty when it sees."""
        if watch.broken:
            return ("the detector failed and is out for this run",)
        missing: list[str] = []
        if not watch.spec.required and self._facts is not None and (rows >= BLIND_AFTER_ROWS or watch.spec.machine):
            missing.extend(_WAKE[kind] for kind in watch.spec.facts if kind not in self._facts)
        for group, series in enumerate(watch.spec.required):
            last = watch.last_needed.get(group)
            allowed = BLIND_AFTER_ROWS if last is None else BLIND_AGAIN_ROWS
            if rows - (last or 0) >= allowed:
                missing.extend(verl_keys(s)[0] for s in series)
        return tuple(missing)
