"""Target VERL_MONITOR_URL: a thread that sends what is queued, in order, until the service has it."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import deque
from itertools import takewhile

from monitor.attach.client import MAX_BYTES, MAX_ROWS, Client, Item, body_of, from_event, from_line, path_of
from monitor.attach.recorder import Event, process
from monitor.attach.rows import counts
from monitor.attach.settings import Seldom, Settings, clock, fault, say
from monitor.attach.spool import Mark, Spool

TURN_SECONDS = 1.0
BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
HURRY_SECONDS = 0.25
PHASE_AGAIN_SECONDS = 60.0
RETRIED = frozenset({408, 425, 429})


class Push:
    """A bounded queue and the thread that empties it.

    ``put`` wakes nobody for a row: the thread looks once a second, which spares the trainer a lock and is soon enough.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = Client(settings.url, settings.token)
        self._spool = Spool(settings.spool, settings.spool_bytes) if settings.spool else None
        self._queue: deque[Event] = deque(maxlen=settings.queue_rows)
        self._held: list[Item] = []  # encoded, not yet delivered; at most one batch
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._lock = threading.Lock()  # held, spool
        self._wake = threading.Event()
        self._drained = threading.Event()
        self._hurry = False
        self._dropped = False
        self._failures = 0
        self._state = Seldom()
        self._refusal = Seldom()
        self._told: dict[str, tuple[tuple[str | None, float], float]] = {}  # incarnation -> phase told, when

    # --- the trainer's side

    def put(self, event: Event) -> None:
        """Queue an event; when the queue is full the oldest is lost and counted."""
        if self._dropped:
            return
        if len(self._queue) >= self._settings.queue_rows:
            counts["queue"] += 1
        self._queue.append(event)
        if self._thread is None:
            self._start(event)
        if event.kind != "steps":
            self._wake.set()

    def _start(self, event: Event) -> None:
        with self._starting:
            if self._thread is None:
                say(f"sending run {event.who.run} to {self._settings.url}")
                self._thread = threading.Thread(target=self._run, name="verl-monitor-push", daemon=True)
                self._thread.start()

    def flush(self, seconds: float) -> bool:
        """Wait until all is delivered, or safe in the spool."""
        if self._dropped or self._thread is None:
            return True
        self._drained.clear()
        self._hurry = True
        self._wake.set()
        done = self._drained.wait(seconds)
        self._hurry = False
        if not done and self._lock.acquire(timeout=0.1):  # the thread waits for an answer; its batch is still held
            try:
                done = self._stow()
            finally:
                self._lock.release()
        return done

    def drop(self) -> None:
        """After a fork, in the child."""
        self._dropped = True
        self._queue.clear()
        self._client.close()
        if self._spool is not None:
            self._spool.drop()

    # --- the thread

    def _run(self) -> None:
        if self._spool is not None:
            with self._lock:
                self._spool.adopt()
        while not self._dropped:
            try:
                well = self._turn()
            except Exception as error:  # noqa: BLE001 - the thread must outlive any error
                fault("sending", error)
                well = False
            if well and self._failures:
                self._state.good(f"{self._settings.url} takes steps again")
            self._failures = 0 if well else self._failures + 1
            if not self._queue and not self._held:
                self._drained.set()
            self._rest(self._pause())
        self._client.close()

    def _rest(self, seconds: float) -> None:
        """Until it is time, or someone is in a hurry. Rows do not wait in memory for a service that is away."""
        end = clock() + seconds
        while not self._wake.wait(min(TURN_SECONDS, max(0.0, end - clock()))) and clock() < end:
            if self._failures and not self._dropped:
                with self._lock:
                    self._stow()
        self._wake.clear()

    def _pause(self) -> float:
        if not self._failures:
            return TURN_SECONDS
        if self._hurry:
            return HURRY_SECONDS
        pause = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** min(self._failures, 10))
        return pause * random.uniform(0.5, 1.0)

    def _turn(self) -> bool:
        """Send everything there is; false when the service does not take it now."""
        while True:
            with self._lock:
                batch, mark = self._next()
            if not batch:
                return self._tell_phases()
            well = self._deliver(batch)
            with self._lock:
                if not well:
                    self._stow()
                    return False
                if mark is not None and self._spool is not None:
                    self._spool.advance(mark)
                else:  # unless flush has stowed them meanwhile, in which case they are sent once more
                    sent = set(map(id, batch))
                    self._held = [item for item in self._held if id(item) not in sent]

    def _next(self) -> tuple[list[Item], Mark | None]:
        """The oldest items of one run and kind, and where in the spool they end."""
        if self._spool is not None and not self._spool.empty:
            self._stow()  # behind the older ones
            items: list[tuple[Item, Mark]] = []
            mark: Mark | None = None
            for line, mark in self._spool.peek(MAX_ROWS):
                try:
                    items.append((from_line(line), mark))
                except (ValueError, KeyError, TypeError):  # a process was killed, or the disk was full, amid a line
                    counts["spool"] += 1
            if items:
                batch = _alike([item for item, _ in items])
                return batch, items[len(batch) - 1][1]
            if mark is not None:
                self._spool.advance(mark)
                return self._next()
        self._encode(MAX_ROWS - len(self._held))
        return _alike(self._held), None

    def _encode(self, rows: int) -> None:
        """Move rows from the queue to those held."""
        for _ in range(rows):
            try:
                event = self._queue.popleft()
            except IndexError:
                return
            try:
                item = from_event(event)
            except Exception as error:  # noqa: BLE001 - a row that cannot be told costs itself
                counts["row"] += 1
                fault("encoding a row", error)
                continue
            if len(item.values) <= MAX_BYTES:
                self._held.append(item)
            else:
                counts["large"] += 1

    def _stow(self) -> bool:
        """Put everything on disk, if there is a spool; true when nothing is left in memory."""
        if self._spool is None:
            return False
        while True:
            self._encode(MAX_ROWS - len(self._held))
            if not self._held:
                return True
            self._spool.append([item.line() for item in self._held])
            self._held = []

    def _deliver(self, batch: list[Item]) -> bool:
        """Send a batch; true when it is done with, taken or refused."""
        status = self._post(path_of(batch[0].who, batch[0].kind), body_of(batch))
        if status == 413 and len(batch) > 1:
            half = len(batch) // 2
            return self._deliver(batch[:half]) and self._deliver(batch[half:])
        if 400 <= status < 500 and status not in RETRIED:
            counts["refused"] += len(batch) if batch[0].kind == "steps" else 0
            self._refused(status)
            return True
        return 200 <= status < 300

    def _refused(self, status: int) -> None:
        why = "VERL_MONITOR_TOKEN is missing or wrong" if status in (401, 403) else "these rows are lost"
        self._refusal.bad(f"{self._settings.url} refuses with status {status}: {why}")

    def _post(self, path: str, body: bytes) -> int:
        """A status; 0 when there was no answer."""
        try:
            status = self._client.post(path, body)
            why = f"status {status}"
        except (OSError, http.client.HTTPException) as error:
            status, why = 0, repr(error)[:200]
        if status < 200 or status in RETRIED or not (status < 300 or 400 <= status < 500):
            kept = "kept on disk" if self._spool is not None else f"kept in memory up to {self._queue.maxlen}"
            self._state.bad(f"{self._settings.url} takes no steps ({why}); training goes on, rows are {kept}")
        return status

    def _tell_phases(self) -> bool:
        """Of each run, what the trainer does now: when that changed, and once a minute in case the service is new."""
        for recorder in list(process.recorders):
            who, now = recorder.who, recorder.phase_now
            known, told = self._told.get(who.incarnation, (None, 0.0))
            if recorder.over or (now[0] is None and known is None):
                continue
            if known is now and clock() - told < PHASE_AGAIN_SECONDS:  # the object: the same stage may have come again
                continue
            phase, since = now
            body = {"incarnation": who.incarnation, "phase": phase, "age_seconds": round(max(0.0, clock() - since), 3)}
            status = self._post(path_of(who, "phase"), json.dumps(body).encode())
            if not (200 <= status < 300 or (400 <= status < 500 and status not in RETRIED)):
                return False
            self._told = {**dict(list(self._told.items())[-100:]), who.incarnation: (now, clock())}
        return True


def _alike(items: list[Item]) -> list[Item]:
    """The first items that fit into one request."""
    if not items or items[0].kind != "steps":
        return items[:1]
    first, size = items[0], 0

    def fits(item: Item) -> bool:
        nonlocal size
        size += len(item.values) + 100
        return item.kind == "steps" and item.who == first.who and (size <= MAX_BYTES or item is first)

    return list(takewhile(fits, items[:MAX_ROWS]))
