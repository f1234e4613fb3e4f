"""Which format a log has, by its content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from monitor.sources.console import ConsoleReader, looks_like_console
from monitor.sources.jsonl import RowReader
from monitor.sources.records import RecordReader, Reject

HEAD = 64 * 1024
"""Bytes of a log's beginning that a format is told by."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format, why it was chosen, and what reads it."""

    name: str
    why: str
    make: Callable[[Reject], RecordReader]


JSONL = Format("verl's file log", "its lines are JSON", RowReader)
CONSOLE = Format("verl's console log", "it has step lines, or lines as Ray prints them", ConsoleReader)


def detect(head: bytes) -> Format | None:
    """The format of a log that begins with ``head``; None when there is no telling, as of an empty one."""
    text = head.replace(b"\0", b"").lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b'{"'):
        return JSONL
    return CONSOLE if looks_like_console(head) else None
