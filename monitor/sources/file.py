"""Follows logs on disk, one or all below a directory, by polling: verl's own, TensorBoard's and W&B's.

Polling ``os.stat`` sees what other hosts write to a network file system; inotify does not. All file access runs in
a worker thread, so that a file system that hangs stops this source only, and shows in its ``up``.

**Names.** A run is called by its file's stem and belongs to the project of its parent directory, as verl writes
``{root}/{project}/{experiment}.jsonl``; TensorBoard's event files stand for the directory that they lie in. Below a
directory a run is called by its path from there without the suffix (``project/experiment``) if it lies more than one
level down or if the stem is taken. All files that a scan finds are named together, so files that are there at the start
get the same names in any order; one that comes later never renames a run that is being followed. A log that says itself
what its run is called (a row's own ``run``, the configuration on the console, W&B's file) goes before all this. Logs of
different formats with one project and one name are of one run.

**Starts.** Where each start of a run writes a new log beside the old ones, they are one run, begun anew each time: the
latest tells of its start and end. What lay in the older ones is read before it if they come first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice

from monitor.model import RunState, SourceEvent
from monitor.sources import SourceStats, clean_name
from monitor.sources.events import Names
from monitor.sources.formats import HEAD, JSONL, PATTERNS, TENSORBOARD, Format, detect
from monitor.sources.records import REASONS
from monitor.sources.tail import Tail, digest
from monitor.sources.walk import Found, walk
from monitor.sources.writer import FileId, WriterState, WriterWatch

logger = logging.getLogger(__name__)

_POLL_BYTES = 16 * 2**20  # bytes read in one poll altogether: it bounds the rows in memory
_FORGET_SECONDS = 3600.0  # how long a removed file's position is kept, should it come back
_WALK_ENTRIES = 5000  # directory entries looked at in one poll
_WALK_SHARE = 20  # walks may take at most one part in this many of the time
_STUCK_SECONDS = 15.0  # a poll that takes longer makes the source count as down
_BREATH = 32  # events handed out before other tasks get a turn


class FileSource:
    """Events of one log, or of all logs below a directory. The path may come into being later.

    Args:
        path: a log, or a directory that is searched at all depths.
        clock: seconds on a clock that never goes back. All event times come from it. It is called in a thread.
        run, project: names to use instead of those from the path; ``run`` for a single file only.
        poll_seconds: pause between two looks.
        patterns: file names to follow in a directory; hidden and packed files are never followed. A file that is not
            called ``*.jsonl`` is followed if its content is a log.
        ended_after_seconds: a log that was untouched for this long when it was first seen, and that no process
            holds open, is read as that of a finished run.
        max_files: logs followed at once; beyond that the least recently written are left out.
        watch: how writers are found; by default in ``/proc``.
        name: name of the source on /metrics; by default ``file:`` and the last part of the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float],
        run: str | None = None,
        project: str | None = None,
        poll_seconds: float = 0.5,
        patterns: tuple[str, ...] = PATTERNS,
        ended_after_seconds: float = 3600.0,
        max_files: int = 5000,
        watch: WriterWatch | None = None,
        name: str = "",
    ) -> None:
        self._path = os.path.abspath(path)
        self._clock = clock
        self._run, self._project = run, project
        self._poll_seconds = poll_seconds
        self._patterns = patterns
        self._formats: dict[str, tuple[tuple[int, int], Format | None]] = {}  # path -> state when looked at, format
        self._ended_after_seconds = ended_after_seconds
        self._max_files = max_files
        self._watch = watch or WriterWatch()
        # A label value: short, and without the path of a machine.
        self.stats = SourceStats(name or f"file:{os.path.basename(self._path)}", rejected=dict.fromkeys(REASONS, 0))
        # The worker thread counts here; the event loop copies it to ``stats`` between two polls.
        self._counts = SourceStats(self.stats.name, rejected=dict.fromkeys(REASONS, 0))
        self._tails: dict[str, Tail] = {}
        self._renamed: dict[str, FileId] = {}  # files that hold what was read under another name
        self._at_start = True  # nothing has been seen yet, so what is found was there before us
        self._walking: Iterator[tuple[str, bool, os.stat_result] | None] | None = None
        self._found: Found = {}
        self._next_walk = float("-inf")
        self._walk_seconds = 0.0
        self._turn = 0
        self._more = False
        self._warned: set[str] = set()
        self._told: set[str] = set()
        self._events: deque[SourceEvent] = deque()
        self._closed = asyncio.Event()
        self._handed = 0
        self._pause = 0.0
        # A poll outlives the wait for it: a cancelled ``__anext__`` loses no events.
        self._task: asyncio.Task[list[SourceEvent]] | None = None

    def __aiter__(self) -> FileSource:
        return self

    async def __anext__(self) -> SourceEvent:
        self._handed += 1
        if not self._handed % _BREATH:  # a backlog must not keep the event loop to itself
            await asyncio.sleep(0)
        while not self._events:
            if self._closed.is_set():
                raise StopAsyncIteration
            await self._next_poll()
        return self._events.popleft()

    def alive(self) -> None:
        """Its polls say whether it is."""

    async def aclose(self) -> None:
        """Stop following. A poll that hangs in the file system is left to itself."""
        self._closed.set()
        self._events.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _next_poll(self) -> None:
        if self._task is None:
            if self._pause:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), self._pause)
                    return
            self._task = asyncio.create_task(asyncio.to_thread(self._poll))
        done, _ = await asyncio.wait({self._task}, timeout=_STUCK_SECONDS)
        if not done:
            self.stats.up = False
            self.stats.detail = f"no answer from the file system for more than {_STUCK_SECONDS:.0f} s"
            return
        task, self._task = self._task, None
        if self._closed.is_set():
            return
        self._pause = 0.0 if self._more else self._poll_seconds
        try:
            self._events.extend(task.result())
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, the next poll may work again
            self._down("internal", error)
            self._pause = max(self._pause, self._poll_seconds)
        self.stats.copy_from(self._counts)

    def _poll(self) -> list[SourceEvent]:
        """One look at everything. Runs in a worker thread, one at a time; all other state belongs to it."""
        out: list[SourceEvent] = []
        self._more = False
        try:
            self._discover(out)
        except OSError as error:
            self._down("unreadable", error)
            return out
        self._watch.check({t.id: t.real_name for t in self._tails.values() if t.active}, time.monotonic())
        tails = list(self._tails.values())
        first, budget, denied = self._turn, _POLL_BYTES, None
        for position in range(first, first + len(tails)):
            if self._closed.is_set():
                break
            if budget <= 0 and denied is None:
                denied = position
            tail = tails[position % len(tails)]
            if tail.after is not None:
                if tail.after.behind and not tail.after.failures:
                    continue
                tail.after.flush(self._clock(), out)
                tail.after = None
            budget -= self._visit(tail, budget > 0, out)
        self._turn = denied % len(tails) if denied is not None else 0
        for tail in tails:
            self._renamed.update(tail.rotated)
            tail.rotated.clear()
            if tail.gone_at is not None and time.monotonic() - tail.gone_at > _FORGET_SECONDS:
                del self._tails[tail.path]
        self._more = self._more or any(tail.behind and not tail.failures for tail in tails)
        self._tally()
        return out

    def _visit(self, tail: Tail, may_read: bool, out: list[SourceEvent]) -> int:
        if time.monotonic() < tail.retry_at:
            return 0
        restarts = self._counts.restarts
        try:
            count = tail.poll(self._clock, may_read, out)
            if self._counts.restarts != restarts:
                self._watch.forget(tail.id)  # what was seen of the writer was about the log before
            self._end_if_over(tail, out)
        except OSError as error:
            tail.fail(self._poll_seconds, "unreadable", "cannot be read", error)
        except Exception as error:  # noqa: BLE001 - one file's trouble must not stop the others
            tail.fail(self._poll_seconds, "internal", "met an error of the monitor itself", error)
        else:
            tail.failures = 0
            return count
        return 0

    def _end_if_over(self, tail: Tail, out: list[SourceEvent]) -> None:
        if not tail.active or tail.behind or tail.missing:
            return
        tail.writer = self._watch.state(tail.id)
        if tail.writer is WriterState.RELEASED:
            tail.end(self._clock(), RunState.FINISHED, "its writer closed the log", out)
        elif tail.old_hours is not None and self._watch.nobody(tail.id):
            seen = " and no process holds it open" if self._watch.available else ""
            reason = f"log untouched for {tail.old_hours:.1f} h when the monitor started{seen}"
            tail.end(self._clock(), RunState.FINISHED, reason, out)

    def _tally(self) -> None:
        counts = self._counts
        counts.up = True
        counts.detail = "" if self._tails else f"waiting for logs at {self._path}"
        counts.last_read_seconds = self._clock()
        counts.files = sum(tail.gone_at is None for tail in self._tails.values())
        counts.lag_bytes = sum(tail.lag for tail in self._tails.values())
        counts.writers = {run: tail.writer.value for tail in self._tails.values() if not tail.superseded
                          for run in tail.events.runs}

    def _down(self, reason: str, error: Exception) -> None:
        self._counts.reject(reason)
        self._counts.up = False
        self._counts.detail = f"cannot read {self._path}: {error}"
        self._warn_once(reason, f"{self._path} cannot be read; trying again", error)

    def _warn_once(self, kind: str, message: str, error: Exception | None = None) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s%s", message, f" ({error})" if error else "",
                           exc_info=error if error and not isinstance(error, OSError) else None)

    def _discover(self, out: list[SourceEvent]) -> None:
        try:
            status = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._at_start = False  # what comes now comes while we look
            return
        if not stat.S_ISDIR(status.st_mode):
            if self._path not in self._tails:
                self._adopt({self._path: (False, status)}, False, out)
            return
        started = time.monotonic()
        if self._walking is None:
            if started < self._next_walk:
                return
            self._walking, self._found, self._walk_seconds = self._walk_root(), {}, 0.0
        looked = 0
        try:
            for entry in islice(self._walking, _WALK_ENTRIES):
                looked += 1
                if entry is not None:
                    self._found[entry[0]] = entry[1:]
        except OSError:
            self._walking = None
            raise
        now = time.monotonic()
        self._walk_seconds += now - started
        if looked == _WALK_ENTRIES:
            self._more = True
            return
        self._walking = None
        self._next_walk = now + max(4 * self._poll_seconds, _WALK_SHARE * self._walk_seconds)
        self._adopt(self._found, True, out)

    def _walk_root(self) -> Iterator[tuple[str, bool, os.stat_result] | None]:
        return walk(self._path, self._patterns, self._entry_failed)

    def _entry_failed(self, path: str, error: OSError) -> None:
        self._counts.reject("unreadable")
        self._warn_once(path, f"{path} cannot be read; trying again", error)

    def _adopt(self, found: Found, below: bool, out: list[SourceEvent]) -> None:
        """Begin to follow what was found. ``below``: found in a directory, all that is there now."""
        at_start, self._at_start = self._at_start, False
        if below:
            found = self._cut(found, out)
            self._renamed = {path: file for path, file in self._renamed.items() if path in found}
        owners = {tail.id: tail for tail in self._tails.values()}
        new: dict[str, os.stat_result] = {}
        seen: set[FileId] = set()
        # Real files first: a link to one of them is the same log again.
        for path, (_, status) in sorted(found.items(), key=lambda item: (item[1][0], item[0])):
            file = (status.st_dev, status.st_ino)
            if path in self._tails or file in seen or self._renamed.get(path) == file:
                continue
            if file in owners and self._is_known(owners[file], path, found, out):
                continue
            seen.add(file)
            new[path] = status
        # Of a file that was named, only an empty one is waited for: what else it holds is refused by the line.
        new = {path: status for path, status in new.items()
               if self._format(path, status) is not None or (status.st_size and not below)}
        before = {(tail.kind, (tail.events.run, tail.events.project)): tail for tail in self._tails.values()
                  if tail.kind is TENSORBOARD}
        for path, names in self._names(new, below).items():
            status = new[path]
            age = max(0.0, time.time() - status.st_mtime)
            kind = self._format(path, status) or JSONL
            if path not in self._told:
                self._told.add(path)
                logger.info("%s is read as %s: %s", path, kind.name, kind.why)
            tail = Tail(path, names, self._counts, status, kind, met=self._met,
                        rename=None if self._run is not None else self._rename)
            # Event files of one directory, in the order of the times in their names.
            tail.after = before.get((kind, names))
            if kind is TENSORBOARD:
                before[kind, names] = tail
            if at_start or age > self._ended_after_seconds:
                tail.set_backlog(status.st_size, self._clock() - age)
            if age > self._ended_after_seconds:
                tail.old_hours = age / 3600.0
            self._tails[path] = tail

    def _format(self, path: str, status: os.stat_result) -> Format | None:
        """Format of a file, by its content, which is looked at again only when the file has changed."""
        if path.endswith(".jsonl"):  # verl's own name, so that it is known before its first row
            return JSONL
        signature = (status.st_ino, status.st_size)
        known = self._formats.get(path)
        if known is None or (known[1] is None and known[0] != signature):
            try:
                with open(path, "rb", buffering=0) as file:
                    known = (signature, detect(file.read(HEAD)))
            except OSError as error:
                self._entry_failed(path, error)
                return None
            self._formats[path] = known
        return known[1]

    def _cut(self, found: Found, out: list[SourceEvent]) -> Found:
        newest = sorted(found, key=lambda path: (-found[path][1].st_mtime_ns, path))
        kept, cut = newest[: self._max_files], newest[self._max_files :]
        self._counts.files_cut = len(cut)
        for path in cut:
            tail = self._tails.pop(path, None)
            if tail is not None and tail.active:
                reason = f"more than {self._max_files} logs, and this was not written for the longest time"
                tail.end(self._clock(), RunState.GONE, reason, out)
        return {path: found[path] for path in kept}

    def _is_known(self, owner: Tail, path: str, found: Found, out: list[SourceEvent]) -> bool:
        """Whether a new path leads to a log that is followed, or was, under another path."""
        if owner.path in found:
            # Another link to the same file; or the log was renamed and begun anew, which its next poll sees.
            return True
        try:
            if not owner.drain(path, self._clock(), out):
                return False  # an inode number that was used again
        except OSError:
            return True  # not known yet
        return True

    def _names(self, paths: dict[str, os.stat_result], below: bool) -> dict[str, Names]:
        """Run and project of new files; see the module's head."""
        if self._run is not None and below:
            self._warn_once("run", f"the run name {self._run!r} is not used: {self._path} is a directory")
        kinds = {tail.path: tail.kind for tail in self._tails.values()} | {path: self._kind(path) for path in paths}
        # Logs of several formats under one project and name are one run; of one format they are different ones.
        at: dict[tuple[str, str], set[tuple[Format, str]]] = {}
        for path, kind in kinds.items():
            at.setdefault(_ending(kind.place(path)), set()).add((kind, kind.unit(path)))
        keys: dict[str, tuple[str, ...]] = {}
        for path, kind in kinds.items():
            ending = _ending(kind.place(path))
            who = at[ending]
            keys[path] = ending if len({other for other, _ in who}) == len(who) else (kind.unit(path), ending[1])
        stems = Counter(key[1] for key in {keys[path] for path in paths})
        taken = {tail.events.run: keys[tail.path] for tail in self._tails.values()}
        named = {key: run for run, key in taken.items()}
        named |= {(project, run): run for tail in self._tails.values() for run, project in tail.events.titles}
        names: dict[str, Names] = {}
        for path in sorted(paths):
            place, key = kinds[path].place(path), keys[path]
            base, folder = os.path.basename(place), os.path.dirname(place)
            project = os.path.basename(folder) if self._project is None else self._project
            run = base if below or self._run is None else self._run
            if below and place != self._path:
                branch = os.path.relpath(folder, self._path).removeprefix("tensorboard_log/")  # verl's default
                nested = branch != os.curdir
                if branch.count(os.sep) > 0 or stems[base] > 1 or taken.get(clean_name(base), key) != key:
                    run = f"{branch if nested else os.path.basename(self._path)}/{base}"
            run = named.get(key, clean_name(run))
            if taken.get(run, key) != key:  # two suffixes, or a directory called like the root
                run = clean_name(f"{run}~{digest(os.fsencode(path)).hex()[:10]}")
            taken[run], named[key] = key, run
            names[path] = (run, clean_name(project) if project else "")
        return names

    def _kind(self, path: str) -> Format:
        return self._formats[path][1] or JSONL if path in self._formats else JSONL

    def _rename(self, tail: Tail, project: str, experiment: str) -> Names:
        """Names of a run whose log says itself what it is called."""
        run, project = clean_name(experiment), clean_name(project) if project else tail.events.project
        others = [other for other in self._tails.values() if other is not tail]
        for other in others:  # the same run as another format has it
            if _ending(other.kind.place(other.path)) == (project, experiment) and not other.events.titles:
                return other.events.run, other.events.project
        if self._project is not None:
            project = self._project
        known = (names for other in others
                 for names in other.events.titles or [(other.events.run, other.events.project)])
        if any(name == run and owner != project for name, owner in known):
            run = clean_name(f"{project}/{experiment}")
        return run, project

    def _met(self, tail: Tail, run: str) -> bool:
        """Whether the first row of a run in a log is a new start of a run that another log was of."""
        if not tail.kind.chained:
            return False
        again = False
        for other in self._tails.values():
            if other is not tail and other.kind is tail.kind and run in other.events.runs:
                if other.born > tail.born:
                    tail.superseded = True
                else:
                    other.superseded = again = True
        return again and not tail.superseded


def _ending(place: str) -> tuple[str, str]:
    return os.path.basename(os.path.dirname(place)), os.path.basename(place)
