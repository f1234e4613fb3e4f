"""Reads a log that is piped in: ``python -m verl.trainer.main_ppo ... 2>&1 | verl-monitor serve -``."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

from monitor.model import RunState, SourceEvent
from monitor.sources import SourceStats, clean_name
from monitor.sources.events import EventReader
from monitor.sources.formats import CONSOLE, HEAD, detect
from monitor.sources.records import REASONS

logger = logging.getLogger(__name__)

_CHUNK = 64 * 1024
_CHUNKS_WAITING = 64
"""Chunks read ahead of the engine. Beyond them the pipe fills, and with it the trainer's standard output waits: tee the
log into a file and follow that where this must never be."""


class StdinSource:
    """Events of one log on a stream; its end is the end of the run.

    The format is told by content, from the first 64 kB at most. The stream is read in a thread of its own that nobody
    waits for, because a read of a pipe cannot be broken off.
    """

    def __init__(self, stream: BinaryIO, clock: Callable[[], float], run: str = "stdin", project: str = "") -> None:
        self.stats = SourceStats("stdin", up=True, last_read_seconds=clock(), files=1,
                                 rejected=dict.fromkeys(REASONS, 0))
        self._stream, self._clock = stream, clock
        self._run, self._project = clean_name(run), clean_name(project) if project else ""
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue(_CHUNKS_WAITING)
        self._closed = asyncio.Event()
        self._head = b""
        self._thread: threading.Thread | None = None
        self._reader: EventReader | None = None

    def alive(self) -> None:
        """A pipe that is silent is read all the same."""
        self.stats.last_read_seconds = self._clock()

    async def __aiter__(self) -> AsyncIterator[SourceEvent]:
        self.stats.up = True
        if self._thread is None:  # an iteration that is taken up again after an error goes on with the same one
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._pump, args=(loop,), name="stdin", daemon=True)
            self._thread.start()
        out: list[SourceEvent] = []
        while not self._closed.is_set():
            data = await self._chunks.get()
            self._take(data, out)
            for event in out:
                yield event
            out.clear()
            if not data:
                await self._closed.wait()

    async def aclose(self) -> None:
        """Hand on no more."""
        self._closed.set()

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        data = b"-"
        while data and not self._closed.is_set():
            try:
                # Not through the buffered stream: its lock, held by a waiting read, would abort the interpreter's end.
                data = os.read(self._stream.fileno(), _CHUNK)
            except (OSError, ValueError) as error:
                logger.warning("standard input cannot be read (%s)", error)
                data = b""
            try:
                asyncio.run_coroutine_threadsafe(self._chunks.put(data), loop).result()
            except Exception:  # noqa: BLE001 - the loop has ended, and the service with it
                return

    def _take(self, data: bytes, out: list[SourceEvent]) -> None:
        now, ended = self._clock(), not data
        self.stats.bytes += len(data)
        if self._reader is None:
            self._head += data
            kind = detect(self._head)
            if kind is None and not ended and len(self._head) < HEAD:
                return
            kind = kind or CONSOLE
            logger.info("standard input is read as %s: %s", kind.name, kind.why)
            self._reader = EventReader(self._run, self._project, lambda: kind.make(self._reject))
            data, self._head = self._head, b""
            self._reader.announce(now, now, out)
        rows = self._reader.feed(data, now, True, out)
        if ended:
            rows += self._reader.finish(now, True, out)
            self._reader.end(now, RunState.FINISHED, "its output ended", out)
        self.stats.records += rows
        if rows:
            self.stats.last_record_seconds = now

    def _reject(self, reason: str, count: int, detail: str) -> None:
        self.stats.reject(reason, count)
        if detail:
            logger.debug("standard input, %s", detail)
