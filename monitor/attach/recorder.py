"""Recorders, one for each Tracking, and the targets they write to. The trainer's thread runs this: nothing here waits,
except ``finish`` and the process's end, which give the targets two seconds between them to deliver; one that is scraped
takes longer, to be seen once more.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from monitor.attach.rows import Snapshots, counts, plain, step_number
from monitor.attach.settings import Settings, clock, fault, read, say

FLUSH_SECONDS = 2.0
MAX_PHASE = 100
LOSSES = frozenset({"row", "queue", "large", "refused", "spool"})
"""Reasons, among the counts, for which a whole row was lost."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which run, and which of its starts."""

    run: str
    project: str
    incarnation: str


class Event(NamedTuple):
    """What happened to a run. ``kind``: ``config`` (always the first), ``steps`` or ``finish``; ``when``: Unix seconds;
    ``seq``: the row's number within its incarnation, since a trainer may log a step in several rows."""

    who: Identity
    kind: str
    when: float
    values: dict[str, Any]
    step: int = 0
    seq: int = 0


class Target(Protocol):
    """Where events go. Its thread begins with the first event."""

    def put(self, event: Event) -> None:
        """Take an event, at once."""

    def flush(self, seconds: float) -> bool:
        """Deliver what is there; whether all was within the time."""

    def drop(self) -> None:
        """After a fork, in the child: forget everything, own nothing."""


class Recorder:
    """One run's rows into the targets. Takes whatever it is given, and raises nothing."""

    def __init__(self, who: Identity, targets: tuple[Target, ...]) -> None:
        self.who = who
        self.phase_now: tuple[str | None, float] = (None, clock())
        self.over = False
        self._targets = targets
        self._rows = 0
        self._snapshots = Snapshots()
        self._settled = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()  # it hangs on a Tracking, and must not keep that from being copied or pickled

    def log(self, data: Any, step: Any) -> None:
        """Take a row. The values are looked at here, and sent by another thread."""
        if not self._targets:
            return
        try:
            event = Event(self.who, "steps", clock(), self._snapshots.take(data),
                          step if type(step) is int else step_number(step), self._rows)
            self._rows += 1
            for target in self._targets:
                target.put(event)
        except Exception as error:  # noqa: BLE001 - a trainer must not end for its monitor's sake
            counts["row"] += 1
            fault("taking a row", error)

    def phase(self, name: str | None) -> _Phase:
        """What the trainer does from now on. As a context manager it goes back to the phase before at its end."""
        before = self.phase_now[0]
        self.phase_now = (name[:MAX_PHASE] if isinstance(name, str) else None, clock())
        return _Phase(self, before)

    def finish(self, exit_code: int = 0, *, wait: bool = True) -> None:
        """The run is over; 0 is success. Gives the targets up to two seconds to deliver it."""
        if self.over:
            return
        self.over = True
        try:
            code = exit_code if type(exit_code) is int else int(bool(exit_code))
            self.phase_now = (None, clock())
            for target in self._targets:
                target.put(Event(self.who, "finish", clock(), {"exit_code": code}))
        except Exception as error:  # noqa: BLE001 - as above
            fault("finishing", error)
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait for the delivery of a run's end, and say what was lost. Only the first call does."""
        if not self.over or self._settled:
            return
        self._settled = True
        try:
            process.flush(self._targets)
            lost = {reason: count for reason, count in counts.items() if reason in LOSSES}
            if lost and self._targets:
                say(f"rows lost on the way: {lost}")
        except Exception as error:  # noqa: BLE001 - as above
            fault("the last delivery", error)

    def drop(self) -> None:
        """After a fork, in the child."""
        self.over, self._targets = True, ()


class _Phase:
    """``with recorder.phase("gen"):``."""

    def __init__(self, recorder: Recorder, before: str | None) -> None:
        self._recorder, self._before = recorder, before

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._recorder.phase(self._before)


class Process:
    """What this process holds: targets by address, recorders that are not over."""

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}
        self.recorders: list[Recorder] = []
        self.ended_badly: Callable[[], bool] = lambda: False
        self._flush_left = FLUSH_SECONDS
        self._begun = False

    def begin(self) -> None:
        """Look after forks and the process's end, from the first recorder on."""
        self._flush_left = FLUSH_SECONDS
        if not self._begun:
            self._begun = True
            os.register_at_fork(after_in_child=self._forked)
            atexit.register(self._exit)

    def flush(self, targets: tuple[Target, ...]) -> None:
        """Wait for delivery, two seconds for a run however often it is asked."""
        for target in targets:
            start = time.monotonic()
            target.flush(max(0.0, self._flush_left))
            self._flush_left -= time.monotonic() - start

    def guess_exit_code(self) -> int:
        """For a trainer that does not say how it ended: did it leave by an exception, or from the midst of a stage?"""
        uncaught = getattr(sys, "last_value", None) is not None
        return int(uncaught or self.ended_badly())

    def _exit(self) -> None:
        try:
            recorders = list(self.recorders)
            for recorder in recorders:
                recorder.finish(self.guess_exit_code(), wait=False)
            for recorder in recorders:
                recorder.settle()
            self.flush(tuple(self.targets.values()))
        except Exception as error:  # noqa: BLE001 - the process ends with its own word, not with ours
            fault("the last delivery", error)
        except KeyboardInterrupt:  # whoever does not want to wait; the process ends now, and as it would have
            return

    def _forked(self) -> None:
        """A child has none of the threads, and its parent's rows are its parent's."""
        try:
            for recorder in self.recorders:
                recorder.drop()
            for target in self.targets.values():
                target.drop()
            counts.clear()
        finally:
            self.recorders, self.targets, self._flush_left = [], {}, FLUSH_SECONDS


process = Process()


def _targets(settings: Settings) -> tuple[Target, ...]:
    """One target for each address, whatever the number of recorders. Imported when needed, and each on its own: one
    that cannot begin does not cost the other."""
    found: list[Target] = []
    for key in filter(None, (settings.url and f"url {settings.url}", settings.listen and f"at {settings.listen}")):
        try:
            if key not in process.targets:
                if key.startswith("url "):
                    from monitor.attach.push import Push

                    process.targets[key] = Push(settings)
                else:
                    from monitor.attach.listen import Listen

                    process.targets[key] = Listen(settings, lambda: process.recorders)
            found.append(process.targets[key])
        except Exception as error:  # noqa: BLE001 - a wrong address is told and costs itself
            fault(f"{key}:", error)
    return tuple(found)


def begin(project: Any, experiment: Any, config: Any, *, url: str = "", listen: str = "") -> Recorder:
    """A recorder for a run that begins now. Never raises: at worst it does nothing."""
    who = Identity(str(experiment or "run"), str(project or ""), uuid.uuid4().hex)
    try:
        process.begin()
        recorder = Recorder(who, _targets(read(url, listen)))
        process.recorders = [known for known in process.recorders if not known.over] + [recorder]
        try:
            values = plain(config) if config is not None else {}
            if isinstance(values, dict):
                # Where relative paths of the configuration begin, and which of a cluster's jobs this is.
                values["verl_monitor"] = {"cwd": os.getcwd(), "ray_job": os.environ.get("RAY_JOB_ID", "")}
        except Exception as error:  # noqa: BLE001 - a configuration that cannot be read is not worth a run
            values = {}
            fault("reading the configuration", error)
        event = Event(who, "config", clock(), values if isinstance(values, dict) else {})
        for target in recorder._targets:
            target.put(event)
        return recorder
    except Exception as error:  # noqa: BLE001 - as said above
        fault("attaching", error)
        return Recorder(who, ())
