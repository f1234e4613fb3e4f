"""Cuts the bytes of a binary log into its records: TensorFlow's records, and the chunks in blocks that W&B writes.

Only what its checksum has proved is taken. The rest, be it a record that has not arrived whole or one that is wrong, is
left ``unread``, for the caller to read again with what follows: on a network file system a page of a growing file can
read as zeros first. Nothing is taken for lost before the bytes after it prove that the writer went on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import product
from struct import Struct
from zlib import crc32

RECORD_LIMIT = 64 * 2**20  # longest record, in bytes; a length beyond it is no length
CHECKED_LIMIT = 2**20  # longest one looked into; beyond are images and graphs: a thousand scalars have 60 kB
BLOCK = 32 * 1024  # blocks of W&B's files; a chunk does not cross their borders
WANDB_HEADER = b":W&B\xe1\xbe"  # how W&B's files begin: a name and a magic number; a version byte follows

_UINT32 = Struct("<I")
_UINT64 = Struct("<Q")
_CHUNK = Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class Framing(ABC):
    """Cuts a stream of bytes into records.

    ``unread``: bytes at the end of what was fed that must be fed again, with what follows them. ``bad``: wrong places
    met so far, each counted once however often it is read again. ``detail``: of the last one.
    """

    def __init__(self) -> None:
        self.unread = 0
        self.bad = 0
        self.detail = ""
        self._position = 0  # of the first unread byte, from the start of the file
        self._counted = -1

    def feed(self, data: bytes) -> list[bytes]:
        """Records that ``data`` completes, which begins where the bytes taken so far end."""
        records: list[bytes] = []
        used = self._cut(data, records)
        self._position += used
        self.unread = len(data) - used
        return records

    @property
    def torn(self) -> bool:
        """Whether a record has begun and not ended."""
        return bool(self.unread)

    def end(self) -> None:
        """No more will come: a record without an end is wrong, which after a kill is ordinary."""
        if self.torn:
            self._wrong(0, "")

    @abstractmethod
    def _cut(self, data: bytes, records: list[bytes]) -> int:
        """Append whole records; how many bytes were taken."""

    def _wrong(self, at: int, detail: str) -> None:
        position = self._position + at
        if position != self._counted:
            self._counted = position
            self.bad += 1
            self.detail = detail and f"byte {position}: {detail}"


class TensorFlowFraming(Framing):
    """Length, its checksum, payload, its checksum: the records of a TensorBoard event file."""

    def __init__(self) -> None:
        super().__init__()
        self._skip = 0  # bytes to come of a record that is too long to be of use

    @property
    def torn(self) -> bool:
        return bool(self.unread or self._skip)

    def _cut(self, data: bytes, records: list[bytes]) -> int:
        size = len(data)
        at = min(self._skip, size)
        self._skip -= at
        while size - at >= 12:
            length = record_length(data[at:at + 12])
            if length < 0:
                self._wrong(at, "expected the length of a record and its checksum, got other bytes")
                break
            end = at + 16 + length
            if length > CHECKED_LIMIT:
                records.append(b"")
                self._skip = max(0, end - size)
                at = min(end, size)
                continue
            if end > size:
                break
            payload = data[at + 12:end - 4]
            if masked_crc32c(payload) == _UINT32.unpack_from(data, end - 4)[0]:
                records.append(payload)
            else:
                self._wrong(at, "a record's checksum does not match it")
                if size - end < 12 or record_length(data[end:end + 12]) < 0:
                    break
            at = end
        return at


class WandbFraming(Framing):
    """LevelDB's log format: chunks that do not cross blocks, each with a checksum, a length and its part in a record.

    W&B takes the plain crc32 of zlib in it and puts a header of its own at the start of the first block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] | None = None  # chunks of a record whose last one has not come
        self._size = 0

    @property
    def torn(self) -> bool:
        return bool(self.unread or self._parts)

    def _cut(self, data: bytes, records: list[bytes]) -> int:
        at, size = 0, len(data)
        if self._position == 0:
            if size < 7:
                return 0
            if not data.startswith(WANDB_HEADER):
                self._wrong(0, "expected the header of a W&B file, got other bytes")
                return 0
            at = 7
        while True:
            left = self._left(at)
            if size - at < min(left, 7):
                break
            if left < 7:  # no chunk fits: padding
                at += left
                continue
            checksum, length, kind = _CHUNK.unpack_from(data, at)
            end = at + 7 + length
            if end <= at + left and _FULL <= kind <= _LAST:
                if end > size:
                    break
                if crc32(data[at + 6:end]) == checksum:
                    self._join(kind, data[at + 7:end], at, records)
                    at = end
                    continue
                resume = [end, at + left]
            else:
                resume = [at + left]
            proved = [place for place in resume if self._whole(data, place)]
            # Zeros where a chunk begins are a page that is still to come, not damage.
            hole = not (checksum or length or kind)
            self._wrong(at, "expected a chunk of a record, got other bytes")
            if hole or not proved:
                break
            self._parts = None
            at = proved[0]
        return at

    def _left(self, at: int) -> int:
        return BLOCK - (self._position + at) % BLOCK

    def _whole(self, data: bytes, at: int) -> bool:
        """Whether a whole chunk begins at ``at``."""
        if len(data) - at < 7:
            return False
        checksum, length, kind = _CHUNK.unpack_from(data, at)
        end: int = at + 7 + length
        return bool(_FULL <= kind <= _LAST and 7 + length <= self._left(at) and end <= len(data)
                and crc32(data[at + 6:end]) == checksum)

    def _join(self, kind: int, chunk: bytes, at: int, records: list[bytes]) -> None:
        if kind in (_FULL, _FIRST):
            if self._parts is not None:
                self._wrong(at, "a record begins before the last one ended")
            self._parts, self._size = [], 0
        if self._parts is None:  # the rest of a record whose start was wrong
            return
        self._parts.append(chunk)
        self._size += len(chunk)
        if self._size > RECORD_LIMIT:
            self._wrong(at, f"expected at most {RECORD_LIMIT} bytes in a record, got more")
            self._parts = None
        elif kind in (_FULL, _LAST):
            records.append(b"".join(self._parts))
            self._parts = None


@lru_cache(4096)
def record_length(head: bytes) -> int:
    """The length of a TensorFlow record from its first 12 bytes; -1 if they are none. Lengths come again and again."""
    length: int = _UINT64.unpack_from(head)[0]
    whole = len(head) == 12 and masked_crc32c(head[:8]) == _UINT32.unpack_from(head, 8)[0]
    return length if whole and length <= RECORD_LIMIT else -1


def masked_crc32c(data: bytes) -> int:
    """TensorFlow's checksum: CRC-32C, rotated and shifted by a constant, so that zeros do not check as zeros.

    In Python, two bytes a turn: 5 us for a scalar, half of what reading it costs, and under a millisecond for a step.
    ``google-crc32c`` takes 0.3 us and is well kept, but is compiled code that would go into the trainer's environment.
    """
    table = _crc32c_table()
    crc = 0xFFFF_FFFF
    even = len(data) & ~1
    for pair in _pairs(even // 2).unpack_from(data):
        crc = table[(crc ^ pair) & 0xFFFF] ^ crc >> 16
    if even != len(data):
        crc = _crc32c_bytes()[(crc ^ data[-1]) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFF_FFFF
    return ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF


@lru_cache(256)
def _pairs(count: int) -> Struct:
    return Struct(f"<{count}H")


@lru_cache(1)
def _crc32c_bytes() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0) for crc in table]
    return table


@lru_cache(1)
def _crc32c_table() -> list[int]:
    one = _crc32c_bytes()
    return [one[one[low] & 0xFF ^ high] ^ one[low] >> 8 for high, low in product(range(256), repeat=2)]
