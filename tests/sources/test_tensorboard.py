"""Event files of TensorBoard: real ones, case 29's damage, any chunking, any corruption."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.sources.framing import CHECKED_LIMIT, RECORD_LIMIT, masked_crc32c
from monitor.sources.protobuf import WireError, fields, signed, zigzag
from monitor.sources.records import REASONS, Record, RecordReader, Row
from monitor.sources.tensorboard import TensorBoardReader, looks_like_tensorboard

DATA = Path(__file__).parents[1] / "data"
RECORDING = (DATA / "tensorboard" / "rloo-advantage-explosion.tfevents").read_bytes()
SHORT = RECORDING[:9000]
REPAIRED = (DATA / "cases" / "29_tb_zero_block_repaired.bin").read_bytes()

Values = list[tuple[int, dict[str, object]]]


class Rejects:
    """Records what a reader refuses."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.details: list[str] = []

    def __call__(self, reason: str, count: int, detail: str) -> None:
        assert reason in REASONS
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.details.append(detail)


class Fed:
    """Feeds a reader as a follower of a growing file does: what was not read, again, with what follows."""

    def __init__(self, reader: RecordReader) -> None:
        self.reader = reader
        self._rest = b""

    @property
    def read(self) -> int:
        return self.reader.read

    def idle(self) -> list[Record]:
        return list(self.reader.idle())

    def finish(self) -> list[Record]:
        return list(self.reader.finish())

    def feed(self, data: bytes) -> list[Record]:
        data = self._rest + data
        records = list(self.reader.feed(data))
        self._rest = data[len(data) - self.reader.unread:]
        return records


def case(name: str) -> bytes:
    return next((DATA / "cases" / name).iterdir()).read_bytes()


def merged(records: Iterable[Record]) -> Values:
    """Rows, those of one step in a row merged as the engine does."""
    steps: Values = []
    for record in records:
        assert isinstance(record, Row)
        if not steps or steps[-1][0] != record.step:
            steps.append((record.step, {}))
        steps[-1][1].update(record.values)
    return steps


def scalars(records: Iterable[Record]) -> int:
    return sum(len(values) for _, values in merged(records))


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    value %= 2**64
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def framed(payload: bytes) -> bytes:
    head = struct.pack("<Q", len(payload))
    return (head + struct.pack("<I", masked_crc32c(head)) + payload + struct.pack("<I", masked_crc32c(payload)))


def event(step: int, **values: float) -> bytes:
    """A record of several scalars, without a wall time."""
    summary = b"".join(field(1, field(1, tag.encode()) + field(2, value)) for tag, value in values.items())
    return framed((field(2, step) if step else b"") + field(5, summary))


def read(data: bytes) -> tuple[list[Record], Rejects]:
    rejects = Rejects()
    reader = Fed(TensorBoardReader(rejects))
    records = reader.feed(data)
    return records + reader.finish(), rejects


def test_the_checksum_is_the_standard_one() -> None:
    def masked(crc: int) -> int:
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32

    assert masked_crc32c(b"123456789") == masked(0xE3069283)  # RFC 3720's check value
    assert masked_crc32c(bytes(32)) == masked(0x8A9136AA)
    assert masked_crc32c(b"") == masked(0)


def test_a_recording_equals_the_file_log_of_the_same_run() -> None:
    records, rejects = read(RECORDING)
    lines = (DATA / "lab" / "rloo-advantage-explosion.jsonl").read_text().splitlines()
    expected = [json.loads(line) for line in lines[:len(records)]]
    assert len(records) == 16
    assert rejects.counts == {}
    for record, line in zip(records, expected, strict=True):
        assert isinstance(record, Row)
        assert record.step == line["step"]
        assert record.values == {key: struct.unpack("<f", struct.pack("<f", value))[0]
                                 for key, value in line["data"].items()}


def test_what_torch_writes_in_every_style() -> None:
    records, rejects = read((DATA / "tensorboard" / "torch-styles.tfevents").read_bytes())
    (first, values), *others = merged(records)
    assert first == 3
    assert math.isnan(values.pop("nan"))  # type: ignore[arg-type]  # values are objects by contract
    assert values == {"plain": 1.25, "new": 2.5, "double": 3.5}  # no text, no histogram
    assert others == [(1, {"back": -1.5}), (-2, {"minus": 1.0})]
    assert rejects.counts == {}


def test_a_file_with_its_header_only_is_a_run_that_starts() -> None:
    reader = Fed(TensorBoardReader(Rejects()))
    assert reader.feed(REPAIRED[:40]) == reader.idle() == reader.finish() == []
    assert reader.read == 0


def test_a_step_is_given_when_the_next_begins_or_all_is_quiet() -> None:
    reader = Fed(TensorBoardReader(Rejects()))
    assert reader.feed(event(0, a=1.0) + event(0, b=2.0)) == []
    assert reader.read == 0
    assert reader.feed(event(1, a=3.0)) == [Row(0, {"a": 1.0, "b": 2.0})]
    assert reader.idle() == [Row(1, {"a": 3.0})]
    assert reader.idle() == []
    assert reader.feed(event(1, b=4.0)) == []
    assert reader.feed(event(2, a=5.0)) == [Row(1, {"b": 4.0})]
    assert reader.finish() == [Row(2, {"a": 5.0})]
    assert reader.read == 4


def test_a_step_taken_again_is_a_row_of_its_own() -> None:
    records, _ = read(event(7, a=1.0) + event(7, a=2.0) + event(3, a=3.0))
    assert records == [Row(7, {"a": 1.0}), Row(7, {"a": 2.0}), Row(3, {"a": 3.0})]


@pytest.mark.parametrize("cut", [3273, 3279, 3274 - 15, 3280 - 4 - 39 - 5])
def test_a_record_cut_short_waits_for_its_rest(cut: int) -> None:
    rejects = Rejects()
    reader = Fed(TensorBoardReader(rejects))
    records = reader.feed(REPAIRED[:cut]) + reader.idle() + reader.feed(b"")
    assert scalars(records) == 59
    assert rejects.counts == {}
    records += reader.feed(REPAIRED[cut:])
    assert scalars(records + reader.finish()) == 60
    assert rejects.counts == {}


def test_case_29_truncated() -> None:
    rejects = Rejects()
    reader = Fed(TensorBoardReader(rejects))
    records = reader.feed(case("29_tb_truncated")) + reader.finish()
    assert scalars(records) == 59  # and the header: 60 events
    assert rejects.counts == {"bad_record": 1}
    assert rejects.details == [""]  # ordinary after a kill
    records += reader.feed((DATA / "cases" / "29_tb_truncated_rest.bin").read_bytes()) + reader.finish()
    assert scalars(records) == 60


def test_case_29_zero_block_is_never_passed_and_can_be_repaired() -> None:
    rejects = Rejects()
    reader = TensorBoardReader(rejects)
    data = case("29_tb_zero_block")
    records = reader.feed(data) + reader.idle()
    assert scalars(records) == 19  # and the header: 20 events
    position = len(data) - reader.unread
    assert position == 1065
    for _ in range(5):
        assert reader.feed(data[position:]) == []
        assert len(data) - reader.unread == position
    assert rejects.counts == {"bad_record": 1}
    records += reader.feed(REPAIRED[position:]) + reader.finish()
    assert reader.unread == 0
    assert merged(records) == merged(read(REPAIRED)[0])
    assert rejects.counts == {"bad_record": 1}


def test_case_29_bad_checksum_costs_one_record() -> None:
    records, rejects = read(case("29_tb_bad_crc"))
    assert scalars(records) == 59
    assert rejects.counts == {"bad_record": 1}
    assert "byte 1065" in rejects.details[0]


def test_a_bad_last_record_is_judged_when_the_next_has_begun() -> None:
    first, second, third = event(1, a=1.0), event(2, a=2.0), event(3, a=3.0)
    hole = second[:-9] + bytes(9)
    rejects = Rejects()
    reader = TensorBoardReader(rejects)
    reader.feed(first + hole)
    assert reader.unread == len(second)
    reader.feed(second)  # its last page arrived after all
    assert (reader.unread, rejects.counts) == (0, {"bad_record": 1})
    assert reader.feed(third) == [Row(2, {"a": 2.0})]


def test_a_hole_over_several_records_is_not_taken_for_one_bad_record() -> None:
    first, second, third = event(1, a=1.0), event(2, a=2.0), event(3, a=3.0)
    reader = TensorBoardReader(Rejects())
    reader.feed(first + second[:-9] + bytes(9 + 20) + third[20:])
    assert reader.unread == len(second + third)
    assert reader.feed(second + third) == [Row(1, {"a": 1.0}), Row(2, {"a": 2.0})]


def test_lengths_beyond_the_limit_are_none() -> None:
    head = struct.pack("<Q", RECORD_LIMIT + 1)
    head += struct.pack("<I", masked_crc32c(head))
    rejects = Rejects()
    reader = TensorBoardReader(rejects)
    reader.feed(event(1, a=1.0) + head)
    assert (reader.unread, rejects.counts) == (12, {"bad_record": 1})
    assert not looks_like_tensorboard(head)


def test_a_huge_record_is_passed_over_without_being_held() -> None:
    size = CHECKED_LIMIT + 1
    head = struct.pack("<Q", size)
    image = head + struct.pack("<I", masked_crc32c(head)) + bytes(size + 4)
    rejects = Rejects()
    reader = Fed(TensorBoardReader(rejects))
    data = event(1, a=1.0) + image + event(2, a=2.0)
    records: list[Record] = []
    for start in range(0, len(data), 65_536):
        records += reader.feed(data[start:start + 65_536])
    assert records + reader.finish() == [Row(1, {"a": 1.0}), Row(2, {"a": 2.0})]
    assert rejects.counts == {}


def test_a_good_record_that_is_no_event_is_counted() -> None:
    records, rejects = read(framed(b"\x2a\x7f") + event(2**60, a=1.0) + event(1, a=1.0))
    assert records == [Row(1, {"a": 1.0})]
    assert rejects.counts == {"bad_record": 1, "bad_step": 1}


def test_memory_of_a_step_without_end_is_bounded() -> None:
    reader = Fed(TensorBoardReader(Rejects()))
    records = reader.feed(b"".join(event(1, **{f"k{i}": 1.0}) for i in range(10_001)))
    assert [len(r.values) for r in records if isinstance(r, Row)] == [10_000]


def test_recognised_by_its_head() -> None:
    assert looks_like_tensorboard(RECORDING[:12])
    assert not looks_like_tensorboard(RECORDING[:11])
    assert not looks_like_tensorboard(b'{"step":1,"data":{}}')
    assert not looks_like_tensorboard(bytes(12))


@given(st.lists(st.integers(0, len(SHORT))), st.booleans())
def test_any_chunking_gives_the_same_rows(cuts: list[int], idle: bool) -> None:
    rejects = Rejects()
    reader = Fed(TensorBoardReader(rejects))
    records: list[Record] = []
    edges = [0, *sorted(cuts), len(SHORT)]
    for start, end in pairwise(edges):
        records += reader.feed(SHORT[start:end])
        if idle:
            records += reader.idle()
    assert rejects.counts == {}
    whole = TensorBoardReader(Rejects())
    assert merged(records + reader.finish()) == merged(whole.feed(SHORT) + whole.finish())


@given(st.data())
def test_no_corruption_raises_or_costs_what_comes_before_it(data: st.DataObject) -> None:
    damaged = bytearray(SHORT)
    start = data.draw(st.integers(0, len(SHORT) - 1))
    patch = data.draw(st.binary(max_size=40) | st.integers(1, 200).map(bytes))
    damaged[start:start + len(patch)] = patch
    rejects = Rejects()
    reader = TensorBoardReader(rejects)
    records: list[Record] = []
    position = 0
    for _ in range(4):  # as a file is polled
        chunk = bytes(damaged[position:position + data.draw(st.integers(1, len(SHORT)))])
        records += reader.feed(chunk)
        position += len(chunk) - reader.unread
        assert position >= 0
    for _ in range(2):
        records += reader.feed(bytes(damaged[position:]))
        position = len(damaged) - reader.unread
    records += reader.finish()
    before = merged(TensorBoardReader(Rejects()).feed(SHORT[:start]))
    assert merged(records)[:len(before)] == before
    assert sum(rejects.counts.values()) <= 5


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    try:
        found = fields(data)
    except WireError:
        return
    assert len(found) <= len(data)


@given(st.integers(-2**63, 2**63 - 1))
def test_numbers_of_the_wire_format(number: int) -> None:
    assert fields(field(1, number)) == [(8, number % 2**64)]
    assert signed(number % 2**64) == number
    assert zigzag((number << 1 ^ number >> 63) % 2**64) == number


@given(st.binary(min_size=1, max_size=200))
def test_a_record_of_any_bytes_with_good_checksums_never_raises(payload: bytes) -> None:
    records, rejects = read(framed(payload) + framed(field(5, payload)) + framed(field(5, field(1, payload)))
                            + framed(field(5, field(1, field(1, b"tag") + field(8, payload)))) + event(9, a=1.0))
    assert merged(records)[-1][1]["a"] == 1.0
    assert set(rejects.counts) <= {"bad_record", "bad_step"}
