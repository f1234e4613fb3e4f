"""One log that is being followed: where it was read to, and whether it is still the same log.

verl truncates its file log at every start. A log goes on if its first bytes and the bytes before the reading position
are still there, whatever its inode (a mirror such as rsync replaces the file at each copy); otherwise it was begun anew
and is read from its start, as a new incarnation.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable
from functools import partial

from monitor.model import RunState, SourceEvent
from monitor.sources import SourceStats
from monitor.sources.events import EventReader, Names
from monitor.sources.formats import Format
from monitor.sources.writer import FileId, WriterState

logger = logging.getLogger("monitor.sources.file")

CHUNK = 4 * 2**20  # bytes read of one file in one poll, so that a huge file does not hold up the others
_DRAIN_CHUNKS = 16  # chunks read of a log after it was renamed
_HEAD = 4096  # bytes at a log's start that tell it from another: about a row
_LAST = 256  # bytes before the reading position, likewise
_QUIET_SECONDS = 5.0  # a log in which nothing comes for so long: what came last is taken for whole
_SETTLE_SECONDS = 2.0  # a file changed this recently is compared again: its time stamp may be too coarse to tell
_GRACE_POLLS = 4  # polls for which a file may be absent, as in a rotation, before its runs are gone
_RETRY_SECONDS = 30.0  # longest pause before a file that failed is tried again
BAD_LINE = "%s, %s; skipped. Further bad lines of this file are only counted."


class Tail:
    """One log: how far it was read, by what it is recognised, and whether it is over."""

    def __init__(self, path: str, names: Names, counts: SourceStats, status: os.stat_result, kind: Format, *,
                 rename: Callable[[Tail, str, str], Names] | None, met: Callable[[Tail, str], bool]) -> None:
        self.path, self.id, self.kind, self.born = path, (status.st_dev, status.st_ino), kind, status.st_mtime
        self.real_name = os.path.basename(os.path.realpath(path))
        self.events = EventReader(*names, lambda: kind.make(self._reject), announced=kind.announced,
                                  rename=partial(rename, self) if rename else None, met=partial(met, self),
                                  log=(kind.name, path))
        self.superseded = False  # a later log tells of its runs' starts and ends
        self.after: Tail | None = None  # a log that is to be read before this one
        self.lag = 0
        self.behind = True  # there is, or may be, something to read at once
        self.ended = False
        self.gone_at: float | None = None
        self.missing = 0  # polls since the file was last there
        self.old_hours: float | None = None  # how long it lay untouched when first seen, if that was very long
        self.writer = WriterState.UNKNOWN
        self.retry_at = float("-inf")
        self.failures = 0
        self.rotated: dict[str, FileId] = {}  # files that this log was renamed to
        self._counts = counts
        self._offset = self._seen = 0  # what is taken, and how far the file was read
        self._idle = True  # what came last has been told
        # Content that lay there at first sight: rows up to this offset came at that time and are not live.
        self._backlog_end, self._backlog_seconds = -1, 0.0
        self._head_size, self._head_digest, self._last = 0, b"", b""
        self._signature: tuple[int, ...] = ()
        self._changed_at = 0.0
        self._warned: set[str] = set()

    def set_backlog(self, size: int, seconds: float) -> None:
        """The first ``size`` bytes lay there already, written at about ``seconds`` on the monitor's clock."""
        self._backlog_end, self._backlog_seconds = size, seconds

    @property
    def active(self) -> bool:
        return not self.ended and self.gone_at is None

    @property
    def _live(self) -> bool:
        return self._offset > self._backlog_end

    def poll(self, clock: Callable[[], float], may_read: bool, out: list[SourceEvent]) -> int:
        """Look at the file and read at most one chunk; the number of bytes read.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            self._absent(clock(), out)
            return 0
        self.missing = 0
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
            self.behind = False
            return 0
        signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        now = time.monotonic()
        if signature != self._signature:
            self._changed_at = now
        elif not self.behind and now - self._changed_at > _SETTLE_SECONDS:
            if now - self._changed_at > _QUIET_SECONDS:
                self.flush(clock(), out)
            return 0
        self.behind = True
        if not may_read:
            return 0
        with open(self.path, "rb", buffering=0) as file:
            count = self._read(file.fileno(), clock(), out)
        self._signature = signature
        return count

    def _read(self, descriptor: int, now: float, out: list[SourceEvent]) -> int:
        status = os.fstat(descriptor)
        file = (status.st_dev, status.st_ino)
        if not self._continues(descriptor):
            if file != self.id:
                self._drain_renamed(now, out)
            self._restart(now, out)
        if file != self.id:
            self.id, self.real_name = file, os.path.basename(os.path.realpath(self.path))
        # A chunk is wholly backlog or wholly live.
        limit = min(CHUNK, self._backlog_end - self._offset) if self._offset < self._backlog_end else CHUNK
        data = os.pread(descriptor, limit, self._offset)
        if self._offset + len(data) >= status.st_size and not self.events.reader.binary:
            # On a network file system a hole at the end may be data that has not arrived yet.
            data = data.rstrip(b"\0")
        if self.gone_at is not None or (self.ended and self._offset + len(data) > self._seen):
            self._revive(now, False, out)
        taken = self._take(descriptor, data, now, out)
        self.lag = max(0, status.st_size - self._offset)
        self.behind = taken > 0 and self.lag > 0
        if not self.behind:
            self.events.announce(self._seconds(now), now, out)
        return len(data)

    def _take(self, descriptor: int, data: bytes, now: float, out: list[SourceEvent]) -> int:
        """Read on; how many bytes were of use."""
        # The position moves first: whatever a chunk does to the parser, it is never taken twice.
        self._offset += len(data)
        if self._offset > self._seen:
            if self._live:
                self.old_hours = None
            self._seen = self._offset
        unread = 0
        try:
            self._tell(partial(self.events.feed, data), now, out)
            unread = self.events.reader.unread
        finally:
            taken = len(data) - unread
            self._idle = self._idle and taken <= 0
            if self._offset - len(data) < self._backlog_end <= self._offset:
                self._backlog_end = self._offset - unread  # what is not whole is completed live
            self._offset -= unread
            self._last = (self._last + data[:taken])[-_LAST:]
            if self._head_size < min(_HEAD, self._offset):
                head = os.pread(descriptor, min(_HEAD, self._offset), 0)
                self._head_size, self._head_digest = len(head), digest(head)
            self._counts.bytes += taken
        return taken

    def flush(self, now: float, out: list[SourceEvent]) -> None:
        """Tell what there is of the last row."""
        if not self._idle:
            self._idle = True
            self._tell(self.events.idle, now, out)

    def _finish(self, now: float, out: list[SourceEvent]) -> None:
        self._tell(self.events.finish, now, out)

    def _tell(self, read: Callable[[float, bool, list[SourceEvent]], int], now: float, out: list[SourceEvent]) -> None:
        seconds, events = self._seconds(now), list[SourceEvent]()
        rows = read(seconds, self._live, events)
        # What lay there of a run whose later log was read already: it would look like the run's present.
        if not (self.superseded and not self._live):
            count_rows(self._counts, rows, seconds)
            out.extend(events)

    def _seconds(self, now: float) -> float:
        return now if self._live else self._backlog_seconds

    def _continues(self, descriptor: int) -> bool:
        """Whether an open file still holds, in its place, what was read of this log."""
        if not self._offset:
            return True
        last = os.pread(descriptor, len(self._last), self._offset - len(self._last))
        return last == self._last and digest(os.pread(descriptor, self._head_size, 0)) == self._head_digest

    def drain(self, path: str, now: float, out: list[SourceEvent]) -> bool:
        """Read the rest of this log under the name it was renamed to; False if that file is another one."""
        with open(path, "rb", buffering=0) as file:
            if not self._offset or not self._continues(file.fileno()):
                return False
            for _ in range(_DRAIN_CHUNKS):
                data = os.pread(file.fileno(), CHUNK, self._offset)
                if data and not self.active:
                    self._revive(now, False, out)
                if not self._take(file.fileno(), data, now, out):
                    break
            else:
                logger.warning("%s was renamed to %s before it was read to its end; rows are lost", self.path, path)
        self.rotated[path] = self.id
        return True

    def _drain_renamed(self, now: float, out: list[SourceEvent]) -> None:
        # Rows written between the last poll and a rename are in the renamed file, most likely beside this one.
        with contextlib.suppress(OSError), os.scandir(os.path.dirname(self.path) or ".") as entries:
            for entry in entries:
                if entry.inode() == self.id[1] and entry.is_file() and entry.stat().st_dev == self.id[0]:
                    self.drain(entry.path, now, out)
                    return

    def _restart(self, now: float, out: list[SourceEvent]) -> None:
        if not self.ended:
            self._finish(now, out)
        self._counts.restarts += 1
        self._offset = self._seen = self._head_size = 0
        self._head_digest = self._last = b""
        self._backlog_end = -1
        self._revive(now, True, out)

    def _revive(self, now: float, restarted: bool, out: list[SourceEvent]) -> None:
        self.ended, self.gone_at, self.old_hours = False, None, None
        if restarted:
            self.superseded = False
        self.events.revive(now, restarted, out)

    def end(self, now: float, state: RunState, reason: str, out: list[SourceEvent]) -> None:
        """The log is over: read its last line even without a newline, and tell the end of its runs."""
        self._finish(now, out)
        if not self.superseded:
            self.events.end(now, state, reason, out)
        self.ended = True

    def _absent(self, now: float, out: list[SourceEvent]) -> None:
        self.behind, self.lag = False, 0
        self.missing += 1
        if self.missing < _GRACE_POLLS or self.gone_at is not None:
            return
        if not self.ended:
            self.end(now, RunState.GONE, "its log was removed", out)
        self.gone_at = time.monotonic()
        self._signature = ()

    def fail(self, poll_seconds: float, reason: str, message: str, error: Exception) -> None:
        """Count a failure, tell of the first of its kind, and leave the file alone for a while."""
        self._counts.reject(reason)
        self.failures += 1
        self.behind = True
        self.retry_at = time.monotonic() + min(_RETRY_SECONDS, poll_seconds * 2.0 ** min(self.failures, 10))
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("%s %s (%s); trying again", self.path, message, error,
                           exc_info=None if isinstance(error, OSError) else error)

    def _reject(self, reason: str, count: int, detail: str) -> None:
        self._counts.reject(reason, count)
        if detail and "line" not in self._warned:
            self._warned.add("line")
            logger.warning(BAD_LINE, self.path, detail)


def count_rows(counts: SourceStats, rows: int, seconds: float) -> None:
    """Count rows handed on."""
    counts.records += rows
    if rows:
        counts.last_record_seconds = max(seconds, counts.last_record_seconds or seconds)


def digest(data: bytes) -> bytes:
    """A short fingerprint."""
    return hashlib.blake2b(data, digest_size=16).digest()
