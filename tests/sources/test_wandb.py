"""Files of Weights & Biases: real ones of release 0.31, damage of every kind, any chunking."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.model import RunState
from monitor.sources.framing import BLOCK, WANDB_HEADER
from monitor.sources.records import Config, End, Record, Row
from monitor.sources.wandb import WandbReader, looks_like_wandb
from tests.sources.test_tensorboard import Fed, Rejects, field

DATA = Path(__file__).parents[1] / "data" / "wandb"
KILLED = (DATA / "killed.wandb").read_bytes()  # four blocks
CONFIG = {"trainer": {"project_name": "grpo", "nnodes": 1, "logger": ["wandb"]},
          "algorithm": {"adv_estimator": "grpo", "kl": None},
          "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}}


def read(data: bytes) -> tuple[list[Record], Rejects]:
    rejects = Rejects()
    reader = Fed(WandbReader(rejects))
    records = reader.feed(data)
    return [*records, *reader.finish()], rejects


def rows(records: list[Record]) -> list[Row]:
    return [record for record in records if isinstance(record, Row)]


def plain(records: list[Record]) -> list[str]:
    """Records in a form in which NaN equals NaN."""
    return [repr(record) for record in records]


def file_of(*records: bytes) -> bytes:
    """A W&B file, as LevelDB's log format has it."""
    out = WANDB_HEADER + b"\0"
    for record in records:
        first = True
        while True:
            left = BLOCK - len(out) % BLOCK
            if left < 7:
                out += bytes(left)
                left = BLOCK
            part, record = record[:left - 7], record[left - 7:]
            kind = (1 if first else 4) if not record else (2 if first else 3)
            body = bytes([kind]) + part
            out += struct.pack("<IH", crc32(body), len(part)) + body
            first = False
            if not record:
                break
    return out


def item(key: str, value: object) -> bytes:
    return field(1, field(2, key.encode()) + long_field(16, json.dumps(value).encode()))


def long_field(number: int, value: bytes) -> bytes:
    return bytes([(number << 3 | 2) & 127 | 128, number >> 4]) + field(0, value)[1:]


def history(step: int, **values: object) -> bytes:
    return field(2, b"".join(item(key, value) for key, value in values.items()) + field(2, field(1, step)))


def test_a_finished_run() -> None:
    rejects = Rejects()
    reader = Fed(WandbReader(rejects))
    records = reader.feed((DATA / "finished.wandb").read_bytes())
    assert records[0] == Config(CONFIG, "", "grpo", "finished")
    assert records[-1] == End(RunState.FINISHED, "W&B recorded that its process ended with exit code 0")
    assert [row.step for row in rows(records)] == list(range(1, 13))
    by_step = {row.step: row.values for row in rows(records)}
    assert by_step[1] == {"actor/pg_loss": -0.1, "actor/grad_norm": 1.5, "critic/score/mean": 0.01,
                          "training/global_step": 1}
    assert math.isnan(by_step[5]["actor/grad_norm"])  # type: ignore[arg-type]  # values are objects by contract
    assert by_step[6]["critic/score/mean"] == math.inf
    # Two calls of log() with one step are one record; the later value holds.
    assert by_step[8] == {"actor/pg_loss": 72, "actor/grad_norm": 0.1875, "critic/score/mean": 0.08,
                          "training/global_step": 8, "val-core/gsm8k/reward/mean@1": 0.4}
    assert reader.read == 12
    assert rejects.counts == {}


def test_configuration_is_told_whole_when_it_changes() -> None:
    records, _ = read((DATA / "finished.wandb").read_bytes())
    configs = [record.values for record in records if isinstance(record, Config)]
    assert configs == [CONFIG, {**CONFIG, "late": 3}]


def test_a_failed_run() -> None:
    records, _ = read((DATA / "failed.wandb").read_bytes())
    assert records[-1] == End(RunState.FAILED, "W&B recorded that its process ended with exit code 3")


def test_a_killed_run_has_neither_its_last_row_nor_an_end() -> None:
    records, rejects = read(KILLED)
    assert [row.step for row in rows(records)] == [*range(1, 13), *range(20, 59)]
    assert rows(records)[-1].values == {f"actor/k{i}": i * 1.5 + 58 for i in range(60)}
    assert not any(isinstance(record, End) for record in records)
    assert rejects.counts == {}


def test_nested_keys_and_text() -> None:
    records, _ = read((DATA / "nested.wandb").read_bytes())
    assert rows(records)[-1] == Row(13, {"a/b": 1.5, "a/c/d": 2, "txt": "hello"})


def test_a_file_that_is_new_is_a_run_that_starts() -> None:
    for data in (KILLED[:7], KILLED[:3], b""):
        reader = Fed(WandbReader(Rejects()))
        assert [*reader.feed(data), *reader.idle(), *reader.finish()] == []
        assert reader.read == 0


def test_values_of_every_kind() -> None:
    typed = b"".join(field(1, field(2, key) + value) for key, value in {
        b"number": b"\x31" + struct.pack("<d", 2.5), b"integer": field(5, 5), b"yes": field(4, 1),
        b"none": field(3, 0), b"text": field(7, b"x"), b"json": field(8, b"[1]"), b"_timestamp": field(4, 1)}.items())
    (row,) = rows(read(file_of(field(2, typed + field(2, field(1, 4)))))[0])
    assert row == Row(4, {"number": 2.5, "integer": -3, "yes": True, "none": None, "text": "x", "json": [1]})


def test_the_step_may_be_a_value_only() -> None:
    records, rejects = read(file_of(field(2, item("_step", 3) + item("a", 1)), field(2, item("a", 1)),
                                    field(2, item("_step", "x") + item("a", 1)), history(2**60, a=1)))
    assert records == [Row(3, {"a": 1})]
    assert rejects.counts == {"bad_step": 3}


def test_a_value_that_is_no_json_costs_itself_only() -> None:
    bad = field(1, field(2, b"b") + long_field(16, b"{oops"))
    records, rejects = read(file_of(field(2, item("a", 1) + bad + field(2, field(1, 1)))))
    assert records == [Row(1, {"a": 1, "b": None})]
    assert rejects.counts == {"bad_value": 1}


def test_configuration_is_unwrapped_nested_and_removed() -> None:
    def config(*updates: bytes) -> bytes:
        return field(5, b"".join(updates))

    def removal(key: str) -> bytes:
        return field(2, item(key, 0)[2:])

    deep = field(1, field(2, b"a") + field(2, b"b") + long_field(16, b"2"))
    records, _ = read(file_of(config(item("a", {"value": {"b": 1}, "desc": None})), config(deep),
                              config(item("c", 1)), config(removal("a")), config(item("_wandb", {}))))
    assert records == [Config({"a": {"b": 1}}), Config({"a": {"b": 2}}), Config({"a": {"b": 2}, "c": 1}),
                       Config({"c": 1})]


def test_a_process_that_ends_to_be_resumed_does_not_end_the_run() -> None:
    exit_record = bytes([0x92, 0x01]) + field(0, field(1, 0) + field(3, 1))[1:]
    assert read(file_of(history(1, a=1), exit_record))[0] == [Row(1, {"a": 1})]


@pytest.mark.parametrize("size", [BLOCK - 60, BLOCK - 40, BLOCK, 3 * BLOCK])
def test_records_across_blocks(size: int) -> None:
    for padding in range(size, size + 40):  # every way to meet a block's end
        text = "x" * padding
        records, rejects = read(file_of(history(1, text=text), history(2, a=1)))
        assert records == [Row(1, {"text": text}), Row(2, {"a": 1})]
        assert rejects.counts == {}


def test_a_chunk_with_a_bad_checksum_costs_its_record() -> None:
    data = bytearray(file_of(history(1, a=1), history(2, a=2), history(3, a=3)))
    data[data.index(b"2", 40)] ^= 1
    records, rejects = read(bytes(data))
    assert [row.step for row in rows(records)] == [1, 3]
    assert rejects.counts == {"bad_record": 1}


@pytest.mark.parametrize("damaged_block", [0, 1, 2])
def test_a_record_with_a_bad_part_is_not_joined_without_it(damaged_block: int) -> None:
    data = bytearray(file_of(history(1, a=1), history(2, text="x" * 3 * BLOCK), history(3, a=3)))
    data[damaged_block * BLOCK + BLOCK // 2] ^= 1
    records, rejects = read(bytes(data))
    assert records == [Row(1, {"a": 1}), Row(3, {"a": 3})]
    assert rejects.counts == {"bad_record": 1}


def test_a_bad_chunk_header_costs_the_rest_of_its_block() -> None:
    data = bytearray(file_of(*(history(step, a="x" * 1000) for step in range(1, 101))))
    first = 7
    data[first + 4:first + 6] = b"\xff\xff"
    records, rejects = read(bytes(data))
    steps = [row.step for row in rows(records)]
    assert steps == list(range(steps[0], 101))
    assert 25 < steps[0] < 40
    assert rejects.counts == {"bad_record": 1}


def test_zeros_are_never_passed_and_can_be_repaired() -> None:
    data = file_of(*(history(step, a="x" * 1000) for step in range(1, 101)))
    start = data.index(struct.pack("<IH", crc32(data[7 + 6:7 + 7 + (n := data[11] | data[12] << 8)]), n)) + 7 + n
    hole = data[:start] + bytes(4096) + data[start + 4096:]
    rejects = Rejects()
    reader = WandbReader(rejects)
    records = reader.feed(hole)
    assert len(hole) - reader.unread == start
    assert reader.feed(hole[start:]) == []
    assert rejects.counts == {"bad_record": 1}
    records += reader.feed(data[start:])
    assert [row.step for row in rows(records)] == list(range(1, 101))
    assert (reader.unread, rejects.counts) == (0, {"bad_record": 1})


def test_a_file_of_something_else_is_refused_once() -> None:
    rejects = Rejects()
    reader = WandbReader(rejects)
    for _ in range(3):
        assert reader.feed(b'{"step":1,"data":{}}\n') == []
        assert reader.unread == 21
    assert rejects.counts == {"bad_record": 1}


def test_a_file_cut_short_goes_on() -> None:
    data = (DATA / "finished.wandb").read_bytes()
    for cut in range(0, len(data), 101):
        rejects = Rejects()
        reader = Fed(WandbReader(rejects))
        records = [*reader.feed(data[:cut]), *reader.finish()]
        assert set(rejects.details) <= {""}  # ordinary after a kill
        records += reader.feed(data[cut:])
        assert plain(records) == plain(read(data)[0])


def test_recognised_by_its_head() -> None:
    assert looks_like_wandb(KILLED[:7])
    assert not looks_like_wandb(KILLED[:5])
    assert not looks_like_wandb(b"")


@given(st.lists(st.integers(0, len(KILLED)), max_size=30))
def test_any_chunking_gives_the_same_records(cuts: list[int]) -> None:
    rejects = Rejects()
    reader = Fed(WandbReader(rejects))
    records: list[Record] = []
    for start, end in pairwise([0, *sorted(cuts), len(KILLED)]):
        records += reader.feed(KILLED[start:end])
    assert plain(records) == plain(read(KILLED)[0])
    assert rejects.counts == {}


def test_byte_by_byte() -> None:
    data = (DATA / "nested.wandb").read_bytes()
    reader = Fed(WandbReader(Rejects()))
    records = [record for byte in data for record in reader.feed(bytes([byte]))]
    assert plain(records) == plain(read(data)[0])


@given(st.data())
def test_no_corruption_raises_or_costs_what_comes_before_it(data: st.DataObject) -> None:
    damaged = bytearray(KILLED)
    start = data.draw(st.integers(0, len(KILLED) - 1))
    patch = data.draw(st.binary(max_size=40) | st.integers(1, 5000).map(bytes))
    damaged[start:start + len(patch)] = patch
    rejects = Rejects()
    reader = WandbReader(rejects)
    records: list[Record] = []
    position = 0
    for _ in range(4):  # as a file is polled
        chunk = bytes(damaged[position:position + data.draw(st.integers(1, len(KILLED)))])
        records += reader.feed(chunk)
        position += len(chunk) - reader.unread
    for _ in range(2):
        records += reader.feed(bytes(damaged[position:]))
        position = len(damaged) - reader.unread
    records += reader.finish()
    before = plain(WandbReader(Rejects()).feed(KILLED[:start]))
    assert plain(records)[:len(before)] == before
    assert sum(rejects.counts.values()) <= 5


@given(st.binary(max_size=200), st.integers(2, 30))
def test_a_record_of_any_bytes_never_raises(payload: bytes, number: int) -> None:
    records, _ = read(file_of(payload, long_field(number, payload), long_field(number, field(1, payload)),
                              history(9, last=1)))
    assert records[-1] == Row(9, {"last": 1})
