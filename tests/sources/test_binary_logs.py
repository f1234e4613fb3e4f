"""Following TensorBoard's and W&B's files: growth at any byte, damage, restarts, several files of one run, ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from monitor.engine import Engine, Snapshot
from monitor.model import RawStep, RunEnded, RunStarted, RunState
from monitor.replay import replay_all
from monitor.sources import tail as tail_module
from monitor.sources.records import Row
from monitor.sources.tensorboard import TensorBoardReader
from monitor.sources.writer import WriterWatch
from tests.sources.following import Following, append, following
from tests.sources.test_tensorboard import RECORDING, REPAIRED, Values, case, event, field, framed, merged
from tests.sources.test_wandb import file_of, history, item, long_field

DATA = Path(__file__).parents[1] / "data"
WANDB = DATA / "wandb"
HEADER = RECORDING[:12 + RECORDING[0] + 4]


@pytest.fixture(autouse=True)
def _soon_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(tail_module, "_SETTLE_SECONDS", 0.05)


def events_file(folder: Path, number: int = 1, data: bytes = b"") -> Path:
    path = folder / f"events.out.tfevents.17000000{number:02}.h.{number}.0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def into(follow: Following) -> Snapshot:
    engine = Engine()
    for told in follow.events:
        engine.handle(told, follow.source.stats.name)
    return engine.snapshot()


def values(follow: Following) -> Values:
    """Rows, those of one step in a row as one."""
    return merged(Row(row.step, row.values) for row in follow.of(RawStep))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backlog", [False, True])
def test_an_event_file_may_grow_by_any_bytes(tmp_path: Path, seed: int, backlog: bool) -> None:
    random = Random(seed)
    data = RECORDING[:20_000]
    cuts = sorted(random.sample(range(len(data)), 8))

    async def follow() -> Following:
        path = events_file(tmp_path / "proj" / "exp", data=data[:cuts[0]] if backlog else b"")
        async with following(tmp_path) as follow:
            for start, end in zip([cuts[0] if backlog else 0, *cuts], [*cuts, len(data)], strict=False):
                append(path, data[start:end])
                await follow.polls(2)
            await follow.until(lambda: values(follow) == expected)
            await follow.polls(8)
        return follow

    reader = TensorBoardReader(lambda *_: None)
    expected = merged([*reader.feed(data), *reader.finish()])
    assert len(expected) > 3
    followed = asyncio.run(follow())
    assert values(followed) == expected
    assert {(row.run, row.project) for row in followed.of(RawStep)} == {("exp", "proj")}
    assert followed.source.stats.rejected == dict.fromkeys(followed.source.stats.rejected, 0)
    assert followed.source.stats.restarts == 0


@pytest.mark.parametrize("damage", ["29_tb_truncated", "29_tb_zero_block", "29_tb_bad_crc"])
def test_case_29(tmp_path: Path, damage: str) -> None:
    async def follow() -> Following:
        path = events_file(tmp_path, data=case(damage))
        async with following(tmp_path) as follow:
            await follow.polls(10)
            before = sum(len(row) for _, row in values(follow))
            assert before == {"29_tb_truncated": 59, "29_tb_zero_block": 19, "29_tb_bad_crc": 59}[damage]
            assert follow.of(RunEnded) == []
            if damage == "29_tb_truncated":
                append(path, (DATA / "cases" / "29_tb_truncated_rest.bin").read_bytes())
            elif damage == "29_tb_zero_block":
                assert follow.source.stats.lag_bytes > 0
                with path.open("r+b") as file:
                    file.write(REPAIRED)
            else:
                append(path, event(21, late=1.0))
            await follow.until(lambda: sum(len(row) for _, row in values(follow)) == 60)
            assert follow.source.stats.lag_bytes == 0
        return follow

    follow_up = asyncio.run(follow())
    assert follow_up.source.stats.rejected["bad_record"] == (damage != "29_tb_truncated")
    assert follow_up.source.stats.restarts == 0, "a hole that is filled is no new log"
    assert [start.restarted for start in follow_up.of(RunStarted)] == [False]


def test_a_file_with_its_header_only_is_waited_for(tmp_path: Path) -> None:
    async def follow() -> None:
        path = events_file(tmp_path / "exp", data=HEADER)
        async with following(tmp_path) as follow:
            await follow.polls(5)
            assert follow.events == []
            assert follow.source.stats.files == 1
            append(path, event(1, a=1.0) + event(2, a=2.0))
            await follow.until(lambda: follow.steps == [1, 2])

    asyncio.run(follow())


@pytest.mark.parametrize("live", [False, True])
def test_dozens_of_restarts_in_one_directory_are_one_run(tmp_path: Path, live: bool) -> None:
    def start(number: int) -> None:
        # Resumed from a checkpoint: each start takes up again a little before the last one's end.
        first = 10 * number + 1
        steps = range(max(1, first - 3), first + 10)
        rows = (event(step, **{"actor/pg_loss": 1.0}) for step in steps)
        path = events_file(tmp_path / "exp", number, HEADER + b"".join(rows))
        os.utime(path, (time.time() - 1000 + number,) * 2)

    async def follow() -> Following:
        if not live:
            for number in range(30):
                start(number)
        async with following(tmp_path) as follow:
            for number in range(30):
                if live:
                    start(number)
                await follow.until(lambda last=10 * number + 10: last in follow.steps)  # type: ignore[misc]
            await follow.polls(5)
        return follow

    followed = asyncio.run(follow())
    assert len(followed.steps) == 30 * 13 - 3
    (view,) = into(followed).runs
    assert (view.run, view.restarts, view.last_step) == ("exp", 29, 300)
    assert followed.of(RunEnded) == []


def test_two_live_event_files_with_different_metrics_are_one_run(tmp_path: Path) -> None:
    async def follow() -> Following:
        folder = tmp_path / "exp"
        first, second = events_file(folder, 1, HEADER), events_file(folder, 2, HEADER)
        async with following(tmp_path) as follow:
            for step in range(1, 9):
                append(first, event(step, **{"actor/pg_loss": 1.0 * step}))
                append(second, event(step, **{"response_length/mean": 100.0 + step}))
                await follow.polls(2)
            await follow.until(lambda: follow.steps.count(8) == 2)
        return follow

    snapshot = into(asyncio.run(follow()))
    (view,) = snapshot.runs
    assert (view.run, view.last_step) == ("exp", 8)
    assert view.restarts <= 1, "a second file looks like a new start once"
    assert view.values["policy_loss"] == 8.0
    assert view.values["response_length_tokens/mean"] == 108.0


def test_a_second_live_file_of_texts_changes_nothing(tmp_path: Path) -> None:
    """verl's validation generations go into an event file of their own."""
    text = framed(field(2, 5) + field(5, field(1, field(1, b"val/text") + field(8, field(1, 7)))))

    async def follow() -> Following:
        folder = tmp_path / "exp"
        first, second = events_file(folder, 1, HEADER), events_file(folder, 2, HEADER)
        async with following(tmp_path) as follow:
            for step in range(1, 6):
                append(first, event(step, a=1.0))
                append(second, text)
                await follow.polls(2)
            await follow.until(lambda: 5 in follow.steps)
        return follow

    followed = asyncio.run(follow())
    assert [start.restarted for start in followed.of(RunStarted)] == [False]
    assert into(followed).runs[0].restarts == 0


def test_case_38_the_trainers_clock_is_not_believed(tmp_path: Path) -> None:
    def timed(step: int, wall: float) -> bytes:
        summary = field(5, field(1, field(1, b"actor/pg_loss") + field(2, 1.0)))
        return framed(b"\x09" + struct.pack("<d", wall) + field(2, step) + summary)

    now = time.time()
    walls = [now + 600] * 5 + [now - 600] * 10 + [now - 12 * 3600] * 10

    async def follow() -> Following:
        path = events_file(tmp_path / "exp", data=HEADER)
        async with following(tmp_path) as follow:
            for step, wall in enumerate(walls, 1):
                append(path, timed(step, wall))
            await follow.until(lambda: len(follow.steps) == len(walls))
        return follow

    before = time.monotonic()
    times = [row.time_seconds for row in asyncio.run(follow()).of(RawStep)]
    assert all(before <= at <= time.monotonic() for at in times)
    assert times == sorted(times)


WRITER = """
import sys, time
with open(sys.argv[1], "wb", buffering=0) as file:
    file.write(open(sys.argv[2], "rb").read())
    sys.stdin.readline()
"""


def written(path: Path, content: Path) -> subprocess.Popen[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(content)], stdin=subprocess.PIPE)


@pytest.mark.parametrize(("name", "state", "words"), [
    ("finished", RunState.FINISHED, "exit code 0"),
    ("failed", RunState.FAILED, "exit code 3"),
    ("killed", RunState.FAILED, "closed the log without a word of the run's end"),
])
def test_the_end_of_a_wandb_run(tmp_path: Path, name: str, state: RunState, words: str) -> None:
    path = tmp_path / "wandb" / "offline-run-20261201_092127-abc" / "run-abc.wandb"

    async def follow() -> Following:
        writer = written(path, WANDB / f"{name}.wandb")
        try:
            watch = WriterWatch(scan_seconds=0.05, confirm_seconds=0.1)
            async with following(tmp_path, watch=watch) as follow:
                await follow.until(lambda: len(follow.steps) > 10)
                await follow.until(lambda: "held" in follow.source.stats.writers.values())
                writer.communicate(b"\n")
                await follow.until(lambda: follow.of(RunEnded))
                await follow.polls(20)
            return follow
        finally:
            writer.kill()

    followed = asyncio.run(follow())
    (end,) = followed.of(RunEnded)
    assert end.state is state
    assert words in end.reason
    assert {(row.run, row.project) for row in followed.of(RawStep)} == {(name, "grpo")}


def test_a_wandb_run_started_again_is_the_same_run(tmp_path: Path) -> None:
    def run_record() -> bytes:
        config = field(1, item("trainer", {"project_name": "p", "experiment_name": "exp"}))
        return long_field(17, field(3, b"p") + field(4, config) + field(8, b"exp"))

    def start(number: int, *steps: int) -> None:
        path = tmp_path / "wandb" / f"run-2026120{number}_000000-id{number}" / f"run-id{number}.wandb"
        path.parent.mkdir(parents=True)
        path.write_bytes(file_of(run_record(), *(history(s, **{"actor/pg_loss": 1}) for s in steps)))
        os.utime(path, (time.time() - 1000 + number,) * 2)

    async def follow() -> Following:
        start(1, 1, 2, 3, 4)
        async with following(tmp_path) as follow:
            await follow.until(lambda: len(follow.steps) == 4)
            start(2, 3, 4, 5)
            await follow.until(lambda: len(follow.steps) == 7)
        return follow

    (view,) = into(asyncio.run(follow())).runs
    assert (view.run, view.project, view.restarts, view.last_step) == ("exp", "p", 1, 5)


def test_growing_wandb_files_at_any_byte(tmp_path: Path) -> None:
    data = (WANDB / "killed.wandb").read_bytes()
    path = tmp_path / "run-abc.wandb"
    path.write_bytes(data[:50_000])

    async def follow() -> Following:
        async with following(tmp_path) as follow:
            for start in range(50_000, len(data), 7001):
                append(path, data[start:start + 7001])
                await follow.polls(1)
            await follow.until(lambda: follow.steps[-1] == 58)
        return follow

    assert asyncio.run(follow()).steps == [*range(1, 13), *range(20, 59)]


def test_a_binary_log_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    async def follow() -> Following:
        path = events_file(tmp_path / "exp", data=HEADER + event(1, a=1.0) + event(2, a=2.0))
        async with following(tmp_path) as follow:
            await follow.until(lambda: len(follow.steps) == 2)
            path.write_bytes(HEADER + event(1, a=3.0) + event(2, a=4.0) + event(3, a=5.0))
            await follow.until(lambda: len(follow.steps) == 5)
        return follow

    followed = asyncio.run(follow())
    assert followed.source.stats.restarts == 1
    assert [start.restarted for start in followed.of(RunStarted)] == [False, True]


def test_check_reads_a_folder_of_restarts_as_one_run(tmp_path: Path) -> None:
    for number in range(3):
        steps = range(10 * number + 1, 10 * number + 11)
        events_file(tmp_path / "exp", number, HEADER + b"".join(event(s, **{"actor/pg_loss": 1.0}) for s in steps))
    shutil.copy(WANDB / "finished.wandb", tmp_path)
    recordings, errors = replay_all(sorted(path for path in tmp_path.rglob("*") if path.is_file()))
    assert errors == []
    runs = [view for recording in recordings for view in recording.runs]
    assert [(view.run, view.steps, view.restarts) for view in runs] == [("exp", 30, 2), ("finished", 12, 0)]
