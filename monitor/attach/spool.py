"""Rows on disk for as long as the service is away: a first-in first-out of small files, bounded, oldest lost first.

One process owns a family of files by an advisory lock; when it is gone, the next process with the same directory
adopts them. Every error of the disk is counted, none is raised.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from monitor.attach.rows import counts
from monitor.attach.settings import fault

SEGMENT_BYTES = 8_000_000
READ_BYTES = 2_200_000
"""More than the longest row, so that each read holds a whole line."""

Mark = tuple[Path, int]


class Spool:
    """Lines, to be appended by the one who cannot send them and read by the one who can. Not thread-safe."""

    def __init__(self, folder: str, limit: int) -> None:
        self._folder = Path(folder)
        self._limit, self._segment_bytes = limit, max(1, min(SEGMENT_BYTES, limit // 4))
        self._segments: deque[Path] = deque()
        self._sizes: dict[Path, int] = {}
        self._offset = 0
        self._out: FileIO | None = None
        self._locks: dict[Path, int] = {}
        self._stem = ""
        self._serial = 0

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._segments

    def adopt(self) -> None:
        """Take over what processes that are gone have left."""
        with contextlib.suppress(OSError):  # a directory that is not there has nothing to adopt
            for lock in sorted(self._folder.glob("verl-monitor-*.lock"), key=lambda path: path.stat().st_mtime):
                if lock not in self._locks and self._lock(lock, 0):
                    for path in sorted(self._folder.glob(f"{lock.stem}-*.jsonl")):
                        self._segments.append(path)
                        self._sizes[path] = path.stat().st_size
            self._tidy()

    def append(self, lines: Sequence[bytes]) -> bool:
        """Keep lines. False, and counted, when the disk does not take them."""
        try:
            for line in lines:  # unbuffered, so that a fork at any moment copies nothing that is still to be written
                if self._writable(len(line)).write(line) != len(line):
                    raise OSError("a line was cut short")
        except OSError as error:
            counts["spool"] += len(lines)  # at most
            fault(f"writing to {self._folder}", error)
            self._close()
            return False
        return True

    def peek(self, rows: int) -> list[tuple[bytes, Mark]]:
        """The oldest lines and where each ends; they stay until ``advance``."""
        while self._segments:
            path = self._segments[0]
            try:
                with path.open("rb") as file:
                    file.seek(self._offset)
                    chunk = file.read(READ_BYTES)
            except OSError as error:
                fault(f"reading {path}", error)
                chunk = b""
            lines, end = [], self._offset
            for line in chunk.split(b"\n")[:-1][:rows]:
                end += len(line) + 1
                lines.append((line, (path, end)))
            if lines:
                return lines
            self._remove_first()  # all read, or only a torn last line is left
        return []

    def advance(self, mark: Mark) -> None:
        """Everything up to the mark is delivered."""
        path, end = mark
        if self._segments and self._segments[0] == path:
            self._offset = end
            if end >= self._sizes.get(path, 0):
                self._remove_first()

    def drop(self) -> None:
        """In a forked child: the files are the parent's."""
        for lock in self._locks.values():
            with contextlib.suppress(OSError):
                os.close(lock)  # the lock itself is held by the parent's own descriptor
        self._close()
        self._locks, self._segments = {}, deque()

    def _lock(self, path: Path, flags: int) -> bool:
        import fcntl

        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._locks[path] = descriptor
        return True

    def _writable(self, size: int) -> FileIO:
        last = self._segments[-1] if self._segments else None
        if self._out is not None and last is not None and self._sizes[last] + size > self._segment_bytes:
            self._close()
        if self._out is None:
            if not self._stem:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._stem = f"verl-monitor-{uuid.uuid4().hex}"
                if not self._lock(self._folder / f"{self._stem}.lock", os.O_CREAT | os.O_EXCL):
                    self._stem = ""
                    raise OSError("the spool's lock could not be taken")
            self._serial += 1
            path = self._folder / f"{self._stem}-{self._serial:08d}.jsonl"
            self._out = path.open("wb", buffering=0)
            self._segments.append(path)
            self._sizes[path] = 0
        self._sizes[self._segments[-1]] += size
        while sum(self._sizes.values()) > self._limit and len(self._segments) > 1:
            with contextlib.suppress(OSError):
                counts["spool"] += self._segments[0].read_bytes()[self._offset:].count(b"\n")
            self._remove_first()
        return self._out

    def _close(self) -> None:
        if self._out is not None:
            with contextlib.suppress(OSError):
                self._out.close()
            self._out = None

    def _remove_first(self) -> None:
        path = self._segments.popleft()
        self._sizes.pop(path, None)
        self._offset = 0
        if not self._segments:
            self._close()
        with contextlib.suppress(OSError):
            path.unlink()
        self._tidy()

    def _tidy(self) -> None:
        """Give back the locks of families that are empty."""
        if self._segments:
            return
        for path, lock in self._locks.items():
            with contextlib.suppress(OSError):
                path.unlink()
                os.close(lock)
        self._locks, self._stem = {}, ""
