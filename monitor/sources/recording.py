"""Reads a recorded log whole, through the very parser that follows a live one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from monitor.model import SourceEvent
from monitor.sources import SourceStats, clean_name
from monitor.sources.events import EventReader, Names
from monitor.sources.formats import HEAD, JSONL, Format, detect
from monitor.sources.tail import BAD_LINE, CHUNK, count_rows

logger = logging.getLogger("monitor.sources.file")


def format_of(path: str | os.PathLike[str]) -> Format | None:
    """Format of a recorded log, by its content; None where there is no telling.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        return detect(file.read(HEAD))


def read_file(
    path: str | os.PathLike[str],
    run: str | None = None,
    project: str | None = None,
    *,
    time_seconds: float = 0.0,
    stats: SourceStats | None = None,
) -> Iterator[SourceEvent]:
    """All events of a recorded log, its last line included even without a newline.

    Names come from the path as in ``FileSource``. Rows are not live; all have the time ``time_seconds``, for a log
    carries none. No ``RunEnded`` comes but what the log itself says: that a recording is over says nothing about its
    run. What cannot be told by content is read as verl's file log. ``stats`` counts what was read and refused.

    Raises:
        OSError: the file cannot be read.
    """
    where = os.path.abspath(path)
    counts = SourceStats(f"file:{where}") if stats is None else stats
    kind = format_of(where) or JSONL
    place = kind.place(where)
    titles = None if run is not None else _titles
    run = clean_name(os.path.basename(place) if run is None else run)
    project = os.path.basename(os.path.dirname(place)) if project is None else project
    warned = False

    def reject(reason: str, count: int, detail: str) -> None:
        nonlocal warned
        counts.reject(reason, count)
        if detail and not warned:
            warned = True
            logger.warning(BAD_LINE, where, detail)

    reader = EventReader(run, clean_name(project) if project else "", lambda: kind.make(reject),
                         rename=titles, log=(kind.name, where))
    out: list[SourceEvent] = []
    with open(where, "rb", buffering=0) as file:
        rest = b""
        while data := file.read(CHUNK):
            counts.bytes += len(data)
            data = rest + data
            count_rows(counts, reader.feed(data, time_seconds, False, out), time_seconds)
            rest = data[len(data) - reader.reader.unread:]
            if len(rest) > CHUNK:  # wrong for so long that what follows cannot be told from noise
                break
            yield from out
            out.clear()
    count_rows(counts, reader.finish(time_seconds, False, out), time_seconds)
    yield from out


def _titles(project: str, experiment: str) -> Names:
    return clean_name(experiment), clean_name(project) if project else ""
