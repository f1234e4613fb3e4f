"""Which process holds a log open for writing: the only evidence that a run is over, as verl's file log has no end.

verl opens the log once and holds it open until the trainer ends. So a log that was held and is held no longer
belongs to a run that has ended, however it ended. Linux shows this in ``/proc/PID/fd``; a writer on another host,
in another pid namespace or of another user does not show, and its logs stay ``UNKNOWN``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

FileId = tuple[int, int]
"""Device and inode number."""

_SCAN_SHARE = 20  # a scan may take at most one part in this many of the time
_MISSES = 2  # scans without a holder before a log counts as released


class WriterState(str, Enum):
    """What is known about a log's writer. ``UNKNOWN`` is not ``RELEASED``: nobody was ever seen to hold it."""

    UNKNOWN = "unknown"
    HELD = "held"
    RELEASED = "released"


@dataclass(slots=True)
class _Entry:
    state: WriterState = WriterState.UNKNOWN
    holder: tuple[str, str] | None = None  # pid, descriptor
    since: float = 0.0  # when this holder was first seen
    misses: int = 0
    searched: bool = False


class WriterWatch:
    """Follows who holds logs open. Blocking: call ``check`` in a thread.

    Args:
        scan_seconds: least time between two scans of all processes. A scan that takes long is repeated less
            often still. A known holder is checked at each call, which costs microseconds.
        confirm_seconds: a holder must be seen at each check over this time before it counts. A writer that opens
            and closes the log for each row would otherwise look like a run that ends after each row.
        proc: where the process file system is mounted.
    """

    def __init__(self, *, scan_seconds: float = 2.0, confirm_seconds: float = 1.0, proc: str = "/proc") -> None:
        self._scan_seconds = scan_seconds
        self._confirm_seconds = confirm_seconds
        self._proc = proc
        self._entries: dict[FileId, _Entry] = {}
        self._next_scan = float("-inf")
        try:
            self._own = os.readlink(f"{proc}/self")
        except OSError:
            self._own = str(os.getpid())
        self.available = os.path.isdir(proc) and any(name.isdigit() for name in os.listdir(proc))
        """Whether this system shows open files at all."""

    def state(self, file: FileId) -> WriterState:
        """State of a log that was given to the last ``check``; others are unknown."""
        entry = self._entries.get(file)
        return entry.state if entry else WriterState.UNKNOWN

    def nobody(self, file: FileId) -> bool:
        """Whether a scan has looked for a holder of this log and none is known, or nothing can be known."""
        if not self.available:
            return True
        entry = self._entries.get(file)
        return entry is not None and entry.searched and entry.holder is None

    def forget(self, file: FileId) -> None:
        """What is known of this log's writer is no longer true: it was begun anew."""
        self._entries.pop(file, None)

    def check(self, files: Mapping[FileId, str], now: float) -> None:
        """Look again. ``files``: the logs that matter now, with the last part of their real path; all others are
        forgotten. ``now``: seconds on a clock that never goes back."""
        if not self.available:
            return
        self._entries = {file: self._entries.get(file) or _Entry() for file in files}
        for file, entry in self._entries.items():
            self._recheck(file, entry, now)
        wanted = {
            file: files[file]
            for file, entry in self._entries.items()
            if entry.holder is None and entry.state is not WriterState.RELEASED
        }
        if not wanted or now < self._next_scan:
            return
        started = time.monotonic()
        found = self._scan(wanted)
        duration = time.monotonic() - started
        self._next_scan = now + max(self._scan_seconds, _SCAN_SHARE * duration)
        for file in wanted:
            entry = self._entries[file]
            entry.searched = True
            if file in found:
                entry.holder, entry.since, entry.misses = found[file], now, 0
            elif entry.state is WriterState.HELD:
                entry.misses += 1
                if entry.misses >= _MISSES:
                    entry.state = WriterState.RELEASED

    def _recheck(self, file: FileId, entry: _Entry, now: float) -> None:
        if entry.holder is None:
            return
        holds = self._holds(*entry.holder, file)
        if not holds:
            entry.holder = None
            if holds is None:
                entry.state = WriterState.UNKNOWN
        elif entry.state is WriterState.UNKNOWN and now - entry.since >= self._confirm_seconds:
            entry.state = WriterState.HELD

    def _scan(self, wanted: Mapping[FileId, str]) -> dict[FileId, tuple[str, str]]:
        # The link's text is compared before anything is asked of the file behind it: that would ask every file
        # system that any process uses, and a dead network mount would then block the scan.
        names = set(wanted.values())
        found: dict[FileId, tuple[str, str]] = {}
        for pid in _listdir(self._proc):
            if not pid.isdigit() or pid == self._own:
                continue
            directory = f"{self._proc}/{pid}/fd"
            for descriptor in _listdir(directory):
                try:
                    target = os.readlink(f"{directory}/{descriptor}")
                    if target.rpartition("/")[2] not in names:
                        continue
                    status = os.stat(f"{directory}/{descriptor}")
                except OSError:
                    continue
                file = (status.st_dev, status.st_ino)
                if file in wanted and file not in found and self._writes(pid, descriptor):
                    found[file] = (pid, descriptor)
        return found

    def _holds(self, pid: str, descriptor: str, file: FileId) -> bool | None:
        """Whether the descriptor still writes to the file; None when that can no longer be seen."""
        try:
            status = os.stat(f"{self._proc}/{pid}/fd/{descriptor}")
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:
            # To other users a process that is dead but not yet collected looks like a forbidden one.
            return False if self._is_dead(pid) else None
        return (status.st_dev, status.st_ino) == file and self._writes(pid, descriptor)

    def _writes(self, pid: str, descriptor: str) -> bool:
        try:
            with open(f"{self._proc}/{pid}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as info:
                for line in info:
                    if line.startswith("flags:"):
                        return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
        except (OSError, ValueError, IndexError):
            pass
        return False

    def _is_dead(self, pid: str) -> bool:
        try:
            with open(f"{self._proc}/{pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
        except FileNotFoundError:
            return True
        except (OSError, IndexError):
            return False


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # gone, or of another user
        return []
