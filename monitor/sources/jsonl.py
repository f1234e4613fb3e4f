"""Lines, rows and events of verl's file log, ``{"step": N, "data": {...}}`` a line. No I/O, no clock, no logging.

Two dialects exist: up to verl 0.6.1 the standard json module wrote bare ``NaN`` and ``Infinity``, from 0.7.1
orjson writes ``null`` instead. A file may hold both after an upgrade.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import orjson

from monitor.sources.records import RecordReader, Reject, Row

LINE_LIMIT = 64 * 2**20
"""Longest line, in bytes. A row of a thousand keys has 50 kB; what is beyond this limit is no metrics row."""

_EXPECTED = 'expected {"step": N, "data": {...}}'
_STEP = re.compile(r"\s*[+-]?[0-9]{1,16}\s*")
_LARGEST_STEP = 2**53  # a float holds every integer up to here; the store and Prometheus hold floats
_SHOWN = 60  # characters of a refused line that a warning quotes

@dataclass(frozen=True, slots=True)
class Rejected:
    """A line that is no row. ``reason``: one of ``REASONS``; ``detail``: what was expected and what came."""

    reason: str
    detail: str


def parse_line(line: bytes) -> Row | Rejected | None:
    """The row of one line, or why it is none; None for a blank line. Never raises.

    A value of any kind is passed on: judging values is the catalogue's work, and a bad one must not cost a row.
    """
    line = line.strip().removeprefix(b"\xef\xbb\xbf")
    if not line:
        return None
    try:
        record = _load(line)
    except (ValueError, RecursionError) as error:
        # The parser's own text says "line 1": it knows of this line only.
        why = f"{error.msg}, character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Rejected("bad_json", f"{_EXPECTED}, got {_quote(line)} ({why})")
    if not isinstance(record, dict):
        return Rejected("bad_json", f"{_EXPECTED}, got {_quote(line)}")
    step = _step(record.get("step"))
    if step is None:
        got = _quote(record["step"]) if "step" in record else "no step"
        return Rejected("bad_step", f"{_EXPECTED} with an integer step, got {got}")
    data = record.get("data")
    if not isinstance(data, dict):
        got = _quote(data) if "data" in record else "no data"
        return Rejected("bad_data", f"{_EXPECTED} with a mapping as data, got {got}")
    run = record.get("run")
    return Row(step, data, run if isinstance(run, str) else "")


def _load(line: bytes) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # Bare NaN and Infinity, numbers beyond a float, text that is not UTF-8: the standard module takes them.
        text = line.decode("utf-8", "replace")
        return json.loads(text, parse_int=_integer, object_pairs_hook=_encodable)


def _integer(digits: str) -> int | float:
    # int() refuses more than 4,300 digits; orjson too turns what exceeds 64 bits into a float.
    return int(digits) if len(digits) < 19 else float(digits)


def _encodable(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # A key with half a surrogate pair would make all of /metrics impossible to encode.
    return {key.encode("utf-8", "replace").decode(): value for key, value in pairs}


def _step(value: object) -> int | None:
    if (isinstance(value, str) and _STEP.fullmatch(value)) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST_STEP:
        return None
    return value


def _quote(value: object) -> str:
    if isinstance(value, bytes):
        shown = value[:_SHOWN].decode("utf-8", "replace")
        return repr(shown) + ("..." if len(value) > _SHOWN else "")
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'}"
    return repr(value)[:_SHOWN]


class LineSplitter:
    """Cuts a byte stream into lines, however it is chunked, and holds the last one until its newline comes.

    NUL bytes are dropped and counted in ``nul_bytes``: JSON holds none, and a log rotated by copy-and-truncate
    under a writer that keeps its offset begins with a hole of them. A line beyond ``limit`` bytes is given up as
    soon as it passes the limit, so that memory stays bounded.
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self.nul_bytes = 0
        self.number = 1  # of the line being held
        self._limit = limit
        self._held = bytearray()
        self._dropping = False

    def feed(self, data: bytes) -> list[tuple[int, bytes | None]]:
        """Lines that ``data`` completes, with their numbers from 1; None for one that is too long."""
        if b"\0" in data:
            kept = data.translate(None, b"\0")
            self.nul_bytes += len(data) - len(kept)
            data = kept
        *pieces, rest = data.split(b"\n")
        lines: list[tuple[int, bytes | None]] = []
        for piece in pieces:
            self._add(piece, lines)
            if not self._dropping:
                lines.append((self.number, bytes(self._held)))
            self._held.clear()
            self._dropping = False
            self.number += 1
        self._add(rest, lines)
        return lines

    def _add(self, piece: bytes, lines: list[tuple[int, bytes | None]]) -> None:
        if self._dropping:
            return
        if len(self._held) + len(piece) > self._limit:
            self._held = bytearray()
            self._dropping = True
            lines.append((self.number, None))
        else:
            self._held += piece

    @property
    def held(self) -> bytes:
        """The last line, which has no newline yet."""
        return bytes(self._held)

    def discard(self) -> None:
        """Forget the held line."""
        self._held = bytearray()


class RowReader(RecordReader):
    """Turns the bytes of one log into rows."""

    def __init__(self, reject: Reject, limit: int = LINE_LIMIT) -> None:
        self._reject = reject
        self._limit = limit
        self._splitter = LineSplitter(limit)

    def feed(self, data: bytes) -> list[Row]:
        """Rows that ``data`` completes."""
        before = self._splitter.nul_bytes
        rows: list[Row] = []
        for number, line in self._splitter.feed(data):
            if line is None:
                self.read += 1
                self._reject("too_long", 1, f"line {number}: expected at most {self._limit} bytes, got more")
                continue
            row = parse_line(line)
            if row is None:
                continue
            self.read += 1
            if isinstance(row, Row):
                rows.append(row)
            else:
                self._reject(row.reason, 1, f"line {number}: {row.detail}")
        nul_bytes = self._splitter.nul_bytes - before
        if nul_bytes:
            self._reject("nul_bytes", nul_bytes, "")
        return rows

    def finish(self) -> list[Row]:
        """The last line, when the log is over and its newline never came.

        A whole row is handed out and done with. A torn one is counted, without a detail because it is ordinary
        after a kill, and stays held: should the log go on after all, its rest may still come.
        """
        row = parse_line(self._splitter.held)
        if isinstance(row, Row):
            self._splitter.discard()
            self.read += 1
            return [row]
        if row is not None:
            self._reject(row.reason, 1, "")
        return []
