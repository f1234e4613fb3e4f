"""What a log holds, whatever its format, and what a reader of a format must offer.

A reader is pure: bytes in, records out, no I/O, no clock, no logging. However the bytes are cut into chunks, the
records are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from monitor.model import RunState

REASONS = ("bad_json", "bad_step", "bad_data", "bad_record", "bad_value", "too_long", "nul_bytes", "unreadable",
           "internal")
"""Why input of a log is refused: the keys of ``SourceStats.rejected``. The last two are about the file."""

Reject = Callable[[str, int, str], None]
"""Told of refused input: the reason (one of ``REASONS``), how many, and a detail to warn with, which may be empty."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row. ``values``: as the log has them, null as None. ``run``: the row's own run name, mostly empty."""

    step: int
    values: Mapping[str, object]
    run: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """The run's resolved configuration, nested as verl has it, and what the run is called, where the log says so."""

    values: Mapping[str, object]
    run: str = ""
    project: str = ""
    experiment: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """The log says that its run is over."""

    state: RunState
    reason: str
    run: str = ""


Record = Row | Config | End


def config_of(values: Mapping[str, object], run: str = "") -> Config:
    """A configuration of verl's, with the names that it gives its run."""
    trainer = values.get("trainer")
    names = trainer if isinstance(trainer, Mapping) else {}
    project, experiment = names.get("project_name"), names.get("experiment_name")
    return Config(values, run, project if isinstance(project, str) else "",
                  experiment if isinstance(experiment, str) else "")


class RecordReader(ABC):
    """Turns the bytes of one log into records.

    ``read``: complete units (lines, rows) so far that were not blank, whether or not they were of use. ``unread``:
    bytes at the end of what was fed that must be fed again, with what follows them: they are not whole, or wrong and
    may still be put right.
    """

    binary: ClassVar[bool] = False
    """Whether zero bytes mean something."""
    tells_end: ClassVar[bool] = False
    """Whether a log of this kind that ends without an ``End`` is that of a run that was killed."""
    read = 0
    unread = 0

    @abstractmethod
    def feed(self, data: bytes) -> Sequence[Record]:
        """Records that ``data`` completes."""

    def idle(self) -> Sequence[Record]:
        """What can be made of what came last, when nothing has come for some seconds."""
        return ()

    @abstractmethod
    def finish(self) -> Sequence[Record]:
        """What can be made of a last unit that never was completed, when the log is over."""
