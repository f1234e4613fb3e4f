"""The values that flow through the monitor. All are immutable; none knows where it came from.

``RawStep`` (a source's words) -> ``Observation`` (catalogue names, base units) -> ``Verdict`` (a detector's
judgement of one step) -> ``Incident`` (a verdict that was confirmed, with its beginning and end).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from typing import NamedTuple

NAN = math.nan

Log = tuple[str, str]
"""Which of its source's logs an event comes from: the kind of log, and its path. A run may be told of by several."""


@dataclass(frozen=True, slots=True)
class RawStep:
    """One row as a source read it: verl's own keys, values untouched.

    ``time_seconds``: when the row reached the monitor, on the engine's clock (seconds, never going back);
    verl's own logs carry no time. ``live``: false for rows that already lay in the log when the monitor first
    opened it, whose arrival time says nothing about the speed of training. ``log``: what it was read from.
    """

    run: str
    step: int
    time_seconds: float
    values: Mapping[str, object]
    project: str = ""
    live: bool = True
    log: Log = ("", "")


@dataclass(frozen=True, slots=True)
class Observation:
    """One row in catalogue series names and base units.

    ``values`` holds only what the row held: absent stays absent, non-finite is NaN.
    ``unknown`` holds finite or NaN numbers under keys the catalogue does not know.
    ``rejected`` holds ``(key, reason)`` of values that are no number.
    """

    run: str
    step: int
    time_seconds: float
    values: Mapping[str, float]
    live: bool = True
    unknown: Mapping[str, float] = field(default_factory=dict)
    rejected: tuple[tuple[str, str], ...] = ()


class Status(IntEnum):
    """What a detector says of a run. Ordered by urgency; only the last two are findings."""

    NO_DATA = 0
    WARMING = 1
    OK = 2
    WARNING = 3
    CRITICAL = 4

    @property
    def health(self) -> int:
        """Value on /metrics: 0 well (or not yet judged), 1 warning, 2 critical."""
        return max(0, self.value - Status.OK.value)


class Severity(str, Enum):
    """Severity of a finding, and of an alert."""

    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def status(self) -> Status:
        """The status a finding of this severity has."""
        return Status.CRITICAL if self is Severity.CRITICAL else Status.WARNING


_NOTHING: Mapping[str, float] = {}


class Verdict(NamedTuple):  # a tenth of the cost of a frozen dataclass, of which each step would make a dozen
    """A detector's judgement after one observation.

    ``score``: 1.0 at the warning threshold, above it worse. ``reason``: one sentence with numbers and units; a verdict
    that finds nothing may do without, since its value and threshold say it.
    ``signal``: the catalogue series that decided; ``value`` and ``threshold``: its level and its limit, in the
    series' unit (NaN when there is none). ``since_step``: first step at which it was visible.
    ``hard``: certain at once, needs no confirmation (a loss that is not a number).
    """

    status: Status
    score: float = 0.0
    reason: str = ""
    evidence: Mapping[str, float] = _NOTHING
    since_step: int | None = None
    signal: str = ""
    value: float = NAN
    threshold: float = NAN
    hard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorSpec:
    """Everything people are told about a detector. Rule, runbook, panel, documentation and page come from it.

    ``required``: groups of catalogue series; one series of each group is needed, else the detector is blind.
    ``optional``: series that sharpen it. ``wake``: how to make verl log what is required.
    ``facts``: kinds of probes that it judges by (``gpu``, ``ray``, ``checkpoints``); it may then require no series.
    ``machine``: it judges the machine or cluster and no run.
    ``rise_steps`` and ``clear_steps``: consecutive judged steps before a finding is raised and dropped.
    ``under``: ids of detectors whose finding makes this one's a mere consequence.
    ``actions``: what to do, in order, with verl's configuration keys; ``misses``: what it cannot see;
    ``source``: where the thresholds come from; ``guide``: section of the pitfall guide, or ``-``.
    """

    id: str
    title: str
    severity: Severity
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()
    wake: str
    meaning: str
    impact: str
    diagnosis: tuple[str, ...]
    actions: tuple[str, ...]
    misses: str
    source: str
    guide: str
    panel: tuple[str, ...]
    rise_steps: int = 2
    clear_steps: int = 5
    under: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    machine: bool = False

    def __post_init__(self) -> None:
        may_be_empty = {"optional", "under", "facts", "machine"} | ({"required"} if self.facts else set())
        empty = [f.name for f in fields(self) if not getattr(self, f.name) and f.name not in may_be_empty]
        if empty:
            raise ValueError(f"detector spec {self.id!r}: empty field(s) {', '.join(empty)}")

    @property
    def alert(self) -> str:
        """CamelCase name of the alert: ``kl_runaway`` -> ``VerlKlRunaway``."""
        return "Verl" + "".join(word.capitalize() for word in self.id.split("_"))


class RunState(str, Enum):
    """Life of a run. ``finished``: its writer closed the log; ``gone``: nothing heard for very long."""

    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    FINISHED = "finished"
    FAILED = "failed"
    GONE = "gone"

    @property
    def active(self) -> bool:
        """Whether steps are still expected."""
        return self in (RunState.STARTING, RunState.RUNNING, RunState.STALLED)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A source met a run's log, before or without a row. ``restarted``: the log was begun anew."""

    run: str
    time_seconds: float
    project: str = ""
    restarted: bool = False
    log: Log = ("", "")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run's resolved configuration, nested as verl has it."""

    run: str
    time_seconds: float
    values: Mapping[str, object]
    project: str = ""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A source saw a run end. ``state`` is one that is not active."""

    run: str
    time_seconds: float
    state: RunState
    reason: str


@dataclass(frozen=True, slots=True)
class RunPhase:
    """The stage that a run is in now, as its trainer calls it (``gen``, ``update_actor``); empty: between stages."""

    run: str
    time_seconds: float
    phase: str


SourceEvent = RawStep | RunStarted | RunConfig | RunEnded | RunPhase


@dataclass(frozen=True, slots=True)
class Incident:
    """A confirmed finding. ``first_step``: where it was first visible; ``last_step``: the last step judged so;
    ``raised_step``: the step at which it was first confirmed; ``critical_step``: at which it was confirmed as
    critical. ``reason``, ``evidence``, ``score``: those of its worst verdict. ``ended``: why it is over, empty while
    it lasts."""

    detector: str
    severity: Severity
    first_step: int
    last_step: int
    raised_step: int
    raised_seconds: float
    reason: str
    evidence: Mapping[str, float]
    score: float
    critical_step: int | None = None
    ended: str = ""
