"""How steps come in. A source knows one way out of the trainer, and none of the other sources.

Every source is an async iterator of ``SourceEvent`` with counters that the exporter reads. Names and units are
not its business: it hands on verl's own keys, and the catalogue folds them.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from typing import Protocol

from monitor.model import SourceEvent

NAME_LIMIT = 200
"""Longest run or project name, in characters. Names become label values and file names."""


@dataclass(slots=True)
class SourceStats:
    """Counters of one source. Written and read in the event loop's thread only.

    ``up``: whether the last look succeeded; ``detail``: why not, or what the source waits for.
    ``last_read_seconds``, ``last_record_seconds``: the monitor's clock at the last successful look and at the
    last row, None before the first. ``records``: rows handed on. ``bytes``: bytes read. ``rejected``: how often
    input was refused, by reason (``nul_bytes`` counts bytes). ``files``: logs followed now; ``files_cut``: logs
    found but not followed, because there were too many. ``restarts``: logs begun anew. ``lag_bytes``: bytes
    seen but not yet read. ``writers``: run -> whether a process holds its log open (``unknown``, ``held``,
    ``released``).
    """

    name: str
    up: bool = False
    detail: str = ""
    last_read_seconds: float | None = None
    last_record_seconds: float | None = None
    records: int = 0
    bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    files: int = 0
    files_cut: int = 0
    restarts: int = 0
    lag_bytes: int = 0
    writers: dict[str, str] = field(default_factory=dict)

    def reject(self, reason: str, count: int = 1) -> None:
        """Count refused input under one of the source's reasons."""
        self.rejected[reason] = self.rejected.get(reason, 0) + count

    def copy_from(self, other: SourceStats) -> None:
        """Take over all values of ``other``, sharing nothing with it."""
        for entry in fields(self):
            value = getattr(other, entry.name)
            setattr(self, entry.name, dict(value) if isinstance(value, dict) else value)


class Source(Protocol):
    """One way in. Iteration ends after ``aclose()``; trouble outside never ends it, it shows in ``stats``."""

    stats: SourceStats

    def __aiter__(self) -> AsyncIterator[SourceEvent]:
        """The source itself; one consumer at a time."""

    def alive(self) -> None:
        """Called about once a second: a source that waits to be given something, and so cannot fail to look, says here
        that it is well. One that polls has nothing to do."""

    async def aclose(self) -> None:
        """Stop, and let a waiting iteration end. May be called twice."""


def clean_name(name: str) -> str:
    """A run or project name that is safe as a label value and on a page.

    Control, format and unassigned characters (among them the surrogates of undecodable file names) become ``_``,
    and a name beyond ``NAME_LIMIT`` is cut. A changed name ends in a hash of the original, so that names that
    differ stay different.
    """
    cleaned = "".join("_" if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in name).strip()
    if cleaned == name and 0 < len(cleaned) <= NAME_LIMIT:
        return cleaned
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{cleaned[: NAME_LIMIT - len(digest) - 1]}~{digest}"
