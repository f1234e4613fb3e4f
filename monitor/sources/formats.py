"""Which format a log has, by its content, and what its place says of its run's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os.path import basename, dirname, splitext

from monitor.sources.console import ConsoleReader, looks_like_console
from monitor.sources.jsonl import RowReader
from monitor.sources.records import RecordReader, Reject
from monitor.sources.tensorboard import TensorBoardReader, looks_like_tensorboard
from monitor.sources.wandb import WandbReader, looks_like_wandb

HEAD = 64 * 1024
"""Bytes of a log's beginning that a format is told by."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format, why it was chosen, and what reads it.

    ``place``: the path that a log's run is called by, from the log's own. ``parts``: all logs there are of one run.
    ``chained``: each start of a run writes a new log beside the old ones. ``announced``: a log without a row yet is a
    run that starts.
    """

    name: str
    why: str
    make: Callable[[Reject], RecordReader]
    place: Callable[[str], str] = lambda path: splitext(path)[0]
    parts: bool = False
    chained: bool = True
    announced: bool = False

    def unit(self, path: str) -> str:
        """What is one log: the file, or the directory that its files are parts of."""
        return self.place(path) if self.parts else path


def _wandb_place(path: str) -> str:
    """``X`` of ``X/wandb/run-TIME-ID/run-ID.wandb``, for a file that does not tell what its run is called."""
    place = dirname(dirname(path))
    return dirname(place) if basename(place) == "wandb" else dirname(path)


JSONL = Format("verl's file log", "its lines are JSON", RowReader, chained=False, announced=True)
CONSOLE = Format("verl's console log", "it has step lines, or lines as Ray prints them", ConsoleReader)
TENSORBOARD = Format("TensorBoard's event file", "it begins with a record of TensorFlow's and its checksum",
                     TensorBoardReader, dirname, parts=True)
WANDB = Format("W&B's run file", "it begins with W&B's mark", WandbReader, _wandb_place)
PATTERNS = ("*.jsonl", "*.log", "*.out", "*tfevents*", "*.wandb")
"""Files that may be logs, by their names, where a directory is searched."""


def detect(head: bytes) -> Format | None:
    """The format of a log that begins with ``head``; None when there is no telling, as of an empty one."""
    if looks_like_wandb(head):
        return WANDB
    if looks_like_tensorboard(head):
        return TENSORBOARD
    text = head.replace(b"\0", b"").lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b'{"'):
        return JSONL
    return CONSOLE if looks_like_console(head) else None
