"""The wire format of protocol buffers, as much of it as reading a few fields takes.

Not the protobuf package: it would be a dependency of every installation, with generated code tied to its version, in
the trainer's own environment where other packages pin it. The format itself has not changed since 2008.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}
_FLOAT, _DOUBLE = Struct("<f"), Struct("<d")


class WireError(ValueError):
    """Bytes that are no message."""


def field(number: int, wire_type: int) -> int:
    """The mark before a field: what ``fields`` gives along with its value."""
    return number << 3 | wire_type


def fields(data: bytes) -> list[tuple[int, Any]]:
    """The fields of a message: mark and value, an int for a varint and else the field's bytes.

    The mark says the type too, so that a reader which compares it need not look at the value's type again.

    Raises:
        WireError: the bytes are no message.
    """
    found: list[tuple[int, Any]] = []
    at, end = 0, len(data)
    try:
        while at < end:
            mark = data[at]
            at += 1
            if mark > 127:
                mark, at = _varint(data, at - 1)
            wire_type = mark & 7
            if wire_type in (VARINT, BYTES):
                value = data[at]
                at += 1
                if value > 127:
                    value, at = _varint(data, at - 1)
                if wire_type == VARINT:
                    found.append((mark, value))
                    continue
                size = value
            else:
                size = _SIZES[wire_type]
            stop = at + size
            if stop > end:
                raise WireError("a field that is longer than its message")
            found.append((mark, data[at:stop]))
            at = stop
    except IndexError:
        raise WireError("a message that ends within a field") from None
    except KeyError:
        raise WireError("a field of an unknown type") from None
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise WireError("a number of more than ten bytes")


def signed(value: int) -> int:
    """A varint as the int32 or int64 that it stands for."""
    return value - 2**64 if value >= 2**63 else value


def zigzag(value: int) -> int:
    """A varint as the sint64 that it stands for."""
    return value >> 1 ^ -(value & 1)


def float32(value: bytes) -> float:
    """Four bytes as a float."""
    number: float = _FLOAT.unpack(value)[0]
    return number


def float64(value: bytes) -> float:
    """Eight bytes as a double."""
    number: float = _DOUBLE.unpack(value)[0]
    return number


def text(value: bytes) -> str:
    """A string, whatever its bytes: one bad name must not cost its record."""
    return value.decode("utf-8", "replace")
