"""Rows of a TensorBoard event file, in which each scalar is a record of its own.

Neither TensorFlow nor the tensorboard package is needed: the latter brings 178 MB and takes ten times as long.
A record's ``wall_time`` is not used: it is the clock of the trainer's host, which may be off by hours.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

from monitor.sources.framing import TensorFlowFraming, record_length
from monitor.sources.protobuf import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    WireError,
    field,
    fields,
    float32,
    float64,
    signed,
    text,
)
from monitor.sources.records import Record, RecordReader, Reject, Row

_LARGEST_STEP = 2**53  # as in verl's own log: floats hold every integer up to here
_ROW_LIMIT = 10_000  # keys of a row, so that a step which never ends takes no memory

_EVENT_STEP, _EVENT_VERSION, _EVENT_SUMMARY = field(2, VARINT), field(3, BYTES), field(5, BYTES)
_SUMMARY_VALUE = field(1, BYTES)
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR = field(1, BYTES), field(2, FIXED32), field(8, BYTES)
_TENSOR_TYPE, _TENSOR_CONTENT = field(1, VARINT), field(4, BYTES)
_FLOATS, _FLOATS_PACKED = field(5, FIXED32), field(5, BYTES)
_DOUBLES, _DOUBLES_PACKED = field(6, FIXED64), field(6, BYTES)
_CONTENT = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}  # DT_FLOAT, DT_DOUBLE, DT_INT32, DT_INT64: its one number


def looks_like_tensorboard(head: bytes) -> bool:
    """Whether a file that begins so is an event file. 12 bytes suffice."""
    return len(head) >= 12 and record_length(head[:12]) >= 0


class TensorBoardReader(RecordReader):
    """Turns the bytes of one event file into rows.

    A step is over when the next begins, and nothing says so of the last: ``idle`` gives what has come of it. Its
    further keys then make another row of the same step. ``read`` counts rows, and records that hold no scalar.

    Tags are verl's keys unchanged. Steps may go back: a resumed run can write on into the same file.
    """

    binary: ClassVar[bool] = True

    def __init__(self, reject: Reject) -> None:
        self._reject = reject
        self._framing = TensorFlowFraming()
        self._reported = 0
        self._step = 0
        self._values: dict[str, object] = {}
        # A summary of one float is the same at every step up to its last four bytes: half the time is saved.
        self._tags: dict[bytes, str] = {}

    def feed(self, data: bytes) -> list[Record]:
        """Rows of the steps that ``data`` brings to an end."""
        rows: list[Record] = []
        for payload in self._framing.feed(data):
            try:
                self._take(payload, rows)
            except WireError as error:
                self.read += 1
                self._reject("bad_record", 1, f"expected an event, got {error}")
        self._report()
        return rows

    def idle(self) -> list[Record]:
        """The row of the latest step, as far as it has come. To be called when the file was quiet for a while."""
        rows: list[Record] = []
        self._emit(rows)
        return rows

    def finish(self) -> list[Record]:
        """The row of the latest step. A record cut short is counted; its rest may come all the same."""
        self._framing.end()
        self._report()
        return self.idle()

    def _report(self) -> None:
        self.unread = self._framing.unread
        bad = self._framing.bad - self._reported
        if bad:
            self._reported += bad
            self._reject("bad_record", bad, self._framing.detail)

    def _take(self, payload: bytes, rows: list[Record]) -> None:
        step = 0  # protocol buffers do not write a zero
        scalars: list[tuple[str, float]] = []
        header = False
        for mark, value in fields(payload):
            if mark == _EVENT_STEP:
                step = signed(value)
            elif mark == _EVENT_SUMMARY:
                if (tag := self._tags.get(value[:-4])) is not None:
                    scalars.append((tag, float32(value[-4:])))
                else:
                    scalars += self._summary(value)
            elif mark == _EVENT_VERSION:
                header = True
        if not scalars:
            self.read += not header  # a file with its header only is a run that starts
            return
        if abs(step) > _LARGEST_STEP:
            self.read += 1
            self._reject("bad_step", 1, f"expected a step within 2**53, got {step}")
            return
        for tag, number in scalars:
            # A key that comes again is a step taken again: the engine has to see both.
            if step != self._step or tag in self._values or len(self._values) >= _ROW_LIMIT:
                self._emit(rows)
                self._step = step
            self._values[tag] = number

    def _summary(self, data: bytes) -> list[tuple[str, float]]:
        values = [content for mark, content in fields(data) if mark == _SUMMARY_VALUE]
        scalars = [scalar for value in values if (scalar := _scalar(value)) is not None]
        if len(scalars) == len(values) == 1 and len(self._tags) < _ROW_LIMIT:
            tag = scalars[0][0]
            if data[:-4] == _one_float(tag):
                self._tags[data[:-4]] = tag
        return scalars

    def _emit(self, rows: list[Record]) -> None:
        if self._values:
            rows.append(Row(self._step, self._values))
            self._values = {}
            self.read += 1


def _scalar(data: bytes) -> tuple[str, float] | None:
    """Tag and number of a summary's value; None for an image, a histogram, a text.

    Raises:
        WireError: it is no message.
    """
    tag, number = "", None
    for mark, value in fields(data):
        if mark == _VALUE_TAG:
            tag = text(value)
        elif mark == _VALUE_SIMPLE:
            number = float32(value)
        elif mark == _VALUE_TENSOR:
            number = _tensor(value)
    return (tag, number) if tag and number is not None else None


def _one_float(tag: str) -> bytes:
    """The start of a summary of one float, as every writer puts it; empty for a tag that is long."""
    name = tag.encode()
    if len(name) > 100:
        return b""
    value = bytes((_VALUE_TAG, len(name))) + name + bytes((_VALUE_SIMPLE,))
    return bytes((_SUMMARY_VALUE, len(value) + 4)) + value


def _tensor(data: bytes) -> float | None:
    """The number of a tensor that holds one: how TensorFlow 2 and torch's ``new_style`` write a scalar."""
    parts: dict[int, Any] = dict(fields(data))
    try:
        if _FLOATS in parts:
            return float32(parts[_FLOATS])
        if _FLOATS_PACKED in parts:
            return float32(parts[_FLOATS_PACKED])
        if _DOUBLES in parts:
            return float64(parts[_DOUBLES])
        if _DOUBLES_PACKED in parts:
            return float64(parts[_DOUBLES_PACKED])
        layout = _CONTENT.get(parts.get(_TENSOR_TYPE, 0))
        if layout is None or _TENSOR_CONTENT not in parts:
            return None
        return float(struct.unpack(layout, parts[_TENSOR_CONTENT])[0])
    except struct.error:  # more numbers than one, or none
        return None
