"""Steps that are sent to the service: what `POST /api/v1/runs/{run}/...` takes in.

A sender repeats what it is not sure has arrived, so every row is taken once: it is known by its ``seq`` (number of the
row within the incarnation) or, from a sender that gives none, by its step. A new ``incarnation`` is a new start of the
run. Bad items cost themselves only: the good ones of the same request are kept, and the answer names the bad ones.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from monitor.model import RawStep, RunConfig, RunEnded, RunPhase, RunStarted, RunState, SourceEvent
from monitor.sources import SourceStats, clean_name

REASONS = ("bad_step", "bad_data", "bad_body", "full")
MAX_PENDING = 20_000
"""Events that wait for the engine; beyond it a request is refused with 503, and its sender tries again."""

_SEEN = 4096  # rows remembered per run, beyond which older ones count as seen
_RUNS = 2000
_LARGEST_STEP = 2**53


class BadRequestError(Exception):
    """A request of which nothing could be used; the message says what was expected."""


class BusyError(Exception):
    """More is waiting than the engine has taken in; to be tried again."""


@dataclass(slots=True)
class _Sender:
    """What is known of a run's sender."""

    incarnation: str
    seen: OrderedDict[int, None] = field(default_factory=OrderedDict)
    seen_below: int = -1
    old: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    def is_new(self, key: int) -> bool:
        """Whether a row was not taken before; remembers it."""
        if key <= self.seen_below or key in self.seen:
            return False
        self.seen[key] = None
        if len(self.seen) > _SEEN:
            self.seen_below = max(self.seen_below, self.seen.popitem(last=False)[0])
        return True


class PushSource:
    """Checks what is sent and hands it on. All methods run in the event loop's thread."""

    def __init__(self, clock: Callable[[], float], name: str = "push") -> None:
        self.stats = SourceStats(name, up=True, last_read_seconds=clock(), rejected=dict.fromkeys(REASONS, 0))
        self._clock = clock
        self._senders: OrderedDict[str, _Sender] = OrderedDict()
        self._events: deque[SourceEvent] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[SourceEvent]:
        self.stats.up = True
        while not self._closed:
            while self._events:
                yield self._events.popleft()
            self._wake.clear()
            if not self._events:
                await self._wake.wait()

    async def aclose(self) -> None:
        """Hand on no more."""
        self._closed = True
        self._wake.set()

    def alive(self) -> None:
        """Waiting is all that a source does that is sent to, so it is read whenever the service lives."""
        self.stats.last_read_seconds = self._clock()

    def steps(self, run: str, body: object) -> dict[str, Any]:
        """Take in rows; counts of what was accepted and repeated, and the errors by item.

        Raises:
            BadRequestError: the body is no request of this kind.
            BusyError: too much is waiting.
        """
        request = self._request(body)
        items = request.get("steps")
        if not isinstance(items, list):
            raise self._bad('expected "steps": [{"step": N, "values": {...}}, ...]')
        if len(self._events) + len(items) > MAX_PENDING:
            self.stats.reject("full")
            raise BusyError
        run, project, sender = self._sender(run, request)
        accepted = repeated = 0
        errors: list[dict[str, Any]] = []
        now = self._clock()
        for index, item in enumerate(items):
            error = _wrong(item)
            if error:
                self.stats.reject("bad_step" if "step" in error else "bad_data")
                errors.append({"item": index, "error": error})
                continue
            step = int(item["step"])
            if sender is None or not sender.is_new(item.get("seq", step)):
                repeated += 1
                continue
            age = item.get("time", 0.0)
            age = float(age) if isinstance(age, (int, float)) and 0 <= age < 1e9 else 0.0
            self._put(RawStep(run, step, now - age, item["values"], project, live=True))
            accepted += 1
        self.stats.records += accepted
        if accepted:
            self.stats.last_record_seconds = now
        return {"accepted": accepted, "repeated": repeated, "errors": errors}

    def phase(self, run: str, body: object) -> None:
        """The run entered a stage, or left it (null).

        Raises:
            BadRequestError: the body is no request of this kind.
        """
        request = self._request(body)
        phase, age = request.get("phase"), request.get("age_seconds", 0.0)
        if phase is not None and not isinstance(phase, str):
            raise self._bad('expected "phase": "gen", or null between stages')
        if isinstance(age, bool) or not isinstance(age, (int, float)) or not 0 <= age < 1e9:
            raise self._bad('expected "age_seconds": seconds since the stage was entered, from 0 on')
        run, _, sender = self._sender(run, request)
        if sender is not None:
            self._put(RunPhase(run, self._clock() - age, clean_name(phase) if phase else ""))

    def config(self, run: str, body: object) -> None:
        """The run begins with this configuration.

        Raises:
            BadRequestError: the body is no request of this kind.
        """
        request = self._request(body)
        if not isinstance(request.get("config"), Mapping):
            raise self._bad('expected "config": {...}, the resolved configuration')
        run, project, sender = self._sender(run, request)
        if sender is not None:
            self._put(RunConfig(run, self._clock(), request["config"], project))

    def finish(self, run: str, body: object) -> None:
        """The run is over.

        Raises:
            BadRequestError: the body is no request of this kind.
        """
        request = self._request(body)
        code = request.get("exit_code", 0)
        if isinstance(code, bool) or not isinstance(code, int):
            raise self._bad('expected "exit_code": 0, or another integer for a failure')
        run, _, sender = self._sender(run, request)
        if sender is not None:
            state = RunState.FAILED if code else RunState.FINISHED
            reason = f"the trainer ended with exit code {code}" if code else "the trainer finished"
            self._put(RunEnded(run, self._clock(), state, reason))

    def _request(self, body: object) -> Mapping[str, Any]:
        self.alive()
        if not isinstance(body, Mapping):
            raise self._bad("expected a JSON object")
        incarnation = body.get("incarnation", "")
        if not isinstance(incarnation, str) or len(incarnation) > 200:
            raise self._bad('expected "incarnation": a string that is new at each start of the run')
        if not isinstance(body.get("project", ""), str):
            raise self._bad('expected "project": a string')
        return body

    def _bad(self, message: str) -> BadRequestError:
        self.stats.reject("bad_body")
        return BadRequestError(message)

    def _sender(self, run: str, request: Mapping[str, Any]) -> tuple[str, str, _Sender | None]:
        """Names as they are kept, and the run's sender; None for what comes late from an earlier incarnation."""
        run, project = clean_name(run), clean_name(request["project"]) if request.get("project") else ""
        incarnation = request.get("incarnation", "")
        known = self._senders.get(run)
        if known is None or known.incarnation != incarnation:
            if known is not None and incarnation in known.old:
                return run, project, None
            sender = _Sender(incarnation)
            if known is not None:
                sender.old.extend([*known.old, known.incarnation])
                self.stats.restarts += 1
            self._senders[run] = sender
            self._put(RunStarted(run, self._clock(), project, restarted=known is not None))
            if len(self._senders) > _RUNS:
                self._senders.popitem(last=False)
        return run, project, self._senders[run]

    def _put(self, event: SourceEvent) -> None:
        self._events.append(event)
        self.stats.files = len(self._senders)
        self._wake.set()


def _wrong(item: object) -> str:
    """What is wrong with a row; empty for a good one. Its values are the catalogue's to judge."""
    if not isinstance(item, Mapping):
        return 'expected {"step": N, "values": {...}}'
    step, seq = item.get("step"), item.get("seq", 0)
    if isinstance(step, bool) or not isinstance(step, int) or abs(step) > _LARGEST_STEP:
        return f'expected "step": an integer, got {step!r:.60}'
    if isinstance(seq, bool) or not isinstance(seq, int):
        return f'expected "seq": an integer, got {seq!r:.60} (it may be left out)'
    if not isinstance(item.get("values"), Mapping):
        return 'expected "values": {key: number}'
    return ""
