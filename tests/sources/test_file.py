"""Following logs with real files: restarts, rotation, ends, names, trouble of one file or of all."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from monitor.model import RawStep, RunEnded, RunStarted, RunState, SourceEvent
from monitor.sources import NAME_LIMIT, Source, SourceStats
from monitor.sources import file as file_module
from monitor.sources import tail as tail_module
from monitor.sources.events import EventReader
from monitor.sources.file import FileSource
from monitor.sources.jsonl import parse_line
from monitor.sources.recording import read_file
from monitor.sources.records import REASONS, Row
from monitor.sources.writer import FileId, WriterState, WriterWatch
from tests.sources.following import POLL, Following, append, following, nothing, play

CASES = Path(__file__).parents[1] / "data" / "cases"


def rows(*steps: int, note: str = "") -> bytes:
    return b"".join(b'{"step":%d,"data":{"note":"%s"}}\n' % (step, note.encode()) for step in steps)


# --- live and recorded


def test_backlog_is_not_live_and_has_the_age_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "proj" / "exp.jsonl"
    path.parent.mkdir()
    path.write_bytes(rows(1, 2))
    os.utime(path, (time.time() - 100, time.time() - 100))
    before = time.monotonic()
    follow = play(path, (nothing, [1, 2]), (lambda: append(path, rows(3, 4)), [1, 2, 3, 4]))
    start, *events = follow.events
    assert isinstance(start, RunStarted)
    assert (start.run, start.project, start.restarted) == ("exp", "proj", False)
    steps = [event for event in events if isinstance(event, RawStep)]
    assert [event.live for event in steps] == [False, False, True, True]
    assert steps[0].time_seconds == steps[1].time_seconds == start.time_seconds
    assert before - 101 < steps[0].time_seconds < before - 99
    assert steps[2].time_seconds == steps[3].time_seconds > before
    assert {(event.run, event.project) for event in steps} == {("exp", "proj")}


def test_time_stamps_from_the_future_are_no_negative_age(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1))
    os.utime(path, (time.time() + 600, time.time() + 600))
    follow = play(path, (nothing, [1]))
    assert follow.of(RawStep)[0].time_seconds <= time.monotonic()


def test_a_path_that_comes_later_is_live_from_its_first_row(tmp_path: Path) -> None:
    path = tmp_path / "proj" / "exp.jsonl"

    def create() -> None:
        path.parent.mkdir()
        path.write_bytes(rows(1))

    for where in (path, path.parent):
        shutil.rmtree(path.parent, ignore_errors=True)
        follow = play(where, (nothing, []), (create, [1]))
        assert follow.source.stats.up
        assert follow.of(RawStep)[0].live


def test_a_file_that_appears_in_a_directory_is_live(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_bytes(rows(1))
    follow = play(tmp_path, (nothing, [1]), (lambda: (tmp_path / "new.jsonl").write_bytes(rows(2)), [1, 2]))
    assert [(event.run, event.live) for event in follow.of(RawStep)] == [("old", False), ("new", True)]


@pytest.mark.parametrize("there", [True, False])
def test_an_empty_log_is_a_run_that_starts(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "exp.jsonl"
    if there:
        path.touch()

    async def check() -> None:
        async with following(path) as follow:
            path.touch()
            await follow.until(lambda: follow.events)
            append(path, rows(1))
            await follow.reaches([1])
            assert len(follow.of(RunStarted)) == 1

    asyncio.run(check())


def test_a_burst_has_one_time(tmp_path: Path) -> None:
    """Case 27: a buffered log brings many rows at once, 18 or 312 of them."""
    path = tmp_path / "exp.jsonl"
    path.touch()
    follow = play(
        path,
        (lambda: append(path, rows(*range(312), note="x" * 3400)), list(range(312))),
        (lambda: append(path, rows(*range(312, 330))), list(range(330))),
    )
    times = [event.time_seconds for event in follow.of(RawStep)]
    assert len(set(times[:312])) == len(set(times[312:])) == 1
    assert times[0] < times[-1]


def test_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    shutil.copy(CASES / "32_half_last_line.jsonl", path)
    rest = (CASES / "32_half_last_line_rest.txt").read_bytes()
    follow = play(path, (nothing, list(range(1, 10))), (lambda: append(path, rest), list(range(1, 11))))
    assert [event.live for event in follow.of(RawStep)] == [False] * 9 + [True]
    assert sum(follow.source.stats.rejected.values()) == 0


def test_a_bad_line_is_counted_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "exp.jsonl"
    shutil.copy(CASES / "32_bad_middle_line.jsonl", path)
    good = [1, 2, 3, 4, 6, 7, 8, 9, 10]
    follow = play(path, (nothing, good), (lambda: append(path, b'oops\n{"step":true}\n' + rows(11)), [*good, 11]))
    assert follow.source.stats.rejected["bad_json"] == 2
    assert follow.source.stats.rejected["bad_step"] == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "monitor.sources.file"]
    assert f"{path}, line 5: expected" in warning


def test_a_nul_head_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    shutil.copy(CASES / "31_nul_prefix.jsonl", path)
    assert play(path, (nothing, [31, 32, 33])).source.stats.rejected["nul_bytes"] == 4096


def test_a_hole_at_the_end_may_still_be_filled(tmp_path: Path) -> None:
    """A network file system may show a file's new length before its new content."""
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1) + bytes(len(rows(2))))

    def fill() -> None:
        with path.open("r+b") as file:
            file.seek(len(rows(1)))
            file.write(rows(2))

    follow = play(path, (nothing, [1]), (fill, [1, 2]))
    assert follow.source.stats.rejected["nul_bytes"] == 0


# --- begun anew

PART_1, PART_2 = ((CASES / f"27_truncate_part{n}.jsonl").read_bytes() for n in (1, 2))
STEPS_1 = list(range(1, 31))


def steps_of(data: bytes) -> list[int]:
    return [row.step for row in map(parse_line, data.splitlines()) if isinstance(row, Row)]


LONGER = PART_2 + rows(*range(25, 1200), note="y" * 20)
EQUAL = PART_2 + b" " * (len(PART_1) - len(PART_2) - 1) + b"\n"


@pytest.mark.parametrize("part", [PART_2, EQUAL, LONGER], ids=["shorter", "equal", "longer"])
@pytest.mark.parametrize("how", ["in place", "renamed over", "removed first"])
@pytest.mark.parametrize("below", [False, True])
def test_a_log_begun_anew_is_read_from_its_start(tmp_path: Path, part: bytes, how: str, below: bool) -> None:
    """Case 27, in place as verl does it, and case 31's rename and reused inode; at every size."""
    assert len(EQUAL) == len(PART_1) < len(LONGER)
    path = tmp_path / "exp.jsonl"
    path.write_bytes(PART_1)

    def anew() -> None:
        if how == "renamed over":
            other = tmp_path / "exp.tmp"
            other.write_bytes(part)
            other.rename(path)
            return
        if how == "removed first":
            path.unlink()
        path.write_bytes(part)

    follow = play(tmp_path if below else path, (nothing, STEPS_1), (anew, STEPS_1 + steps_of(part)))
    assert [event.restarted for event in follow.of(RunStarted)] == [False, True]
    assert follow.of(RunEnded) == []
    assert follow.source.stats.restarts == 1
    assert [event.live for event in follow.of(RawStep)] == [False] * 30 + [True] * len(steps_of(part))


def test_a_rewrite_that_only_differs_late_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    first = rows(*range(1, 400))
    path.write_bytes(first)
    other = first.replace(b'"step":395', b'"step":995')
    assert len(other) == len(first)
    assert other[:4096] == first[:4096]
    follow = play(path, (nothing, steps_of(first)), (lambda: path.write_bytes(other), steps_of(first + other)))
    assert follow.source.stats.restarts == 1


def test_the_last_row_before_a_restart_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, 2)[:-1])
    follow = play(path, (nothing, [1]), (lambda: path.write_bytes(rows(7)), [1, 2, 7]))
    kinds = [(type(event).__name__, getattr(event, "step", None)) for event in follow.events]
    assert kinds == [("RunStarted", None), ("RawStep", 1), ("RawStep", 2), ("RunStarted", None), ("RawStep", 7)]


def test_a_mirror_that_replaces_the_file_is_the_same_log(tmp_path: Path) -> None:
    """rsync writes each copy to a new inode: no step may count twice."""
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, 2))

    def copy() -> None:
        (tmp_path / "tmp").write_bytes(rows(1, 2, 3))
        (tmp_path / "tmp").rename(path)

    assert play(path, (nothing, [1, 2]), (copy, [1, 2, 3])).source.stats.restarts == 0


# --- rotation


@pytest.mark.parametrize("append_mode", [True, False])
def test_copytruncate_counts_no_step_twice(tmp_path: Path, append_mode: bool) -> None:
    """Case 31: without append mode the writer leaves a hole of NUL bytes at the head."""
    path = tmp_path / "exp.jsonl"
    first = list(range(1, 40))
    with path.open("ab" if append_mode else "wb", buffering=0) as writer:
        writer.write(rows(*first))

        def rotate() -> None:
            shutil.copy(path, tmp_path / "exp.jsonl.1")
            (tmp_path / "exp.jsonl.2.gz").write_bytes(b"\x1f\x8b packed")
            os.truncate(path, 0)
            writer.write(rows(40, 41))

        follow = play(
            tmp_path,
            (nothing, first),
            (rotate, [*first, 40, 41]),
            (lambda: writer.write(rows(42)), [*first, 40, 41, 42]),
        )
    assert follow.source.stats.rejected["nul_bytes"] == (0 if append_mode else len(rows(*first)))
    assert follow.source.stats.files == 1


@pytest.mark.parametrize("target", ["exp.jsonl.1", "exp-old.jsonl"])
def test_rename_and_create_loses_nothing_and_counts_nothing_twice(tmp_path: Path, target: str) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, 2))

    def rotate() -> None:
        append(path, rows(3))  # not read yet when the file is renamed
        path.rename(tmp_path / target)
        path.write_bytes(rows(4, note="new"))

    async def check() -> None:
        async with following(tmp_path) as follow:
            await follow.reaches([1, 2])
            rotate()
            await follow.reaches([1, 2, 3, 4])
            await follow.polls(12)  # several walks
            assert follow.steps == [1, 2, 3, 4]
            assert {event.run for event in follow.events} == {"exp"}

    asyncio.run(check())


def test_a_log_set_aside_is_no_second_run(tmp_path: Path) -> None:
    """People rename a log before they start again, because verl would truncate it."""
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, 2))

    async def check() -> None:
        async with following(tmp_path) as follow:
            await follow.reaches([1, 2])
            append(path, rows(3))
            path.rename(tmp_path / "exp-kept.jsonl")
            await follow.until(lambda: follow.of(RunEnded))
            await follow.polls(12)
            path.write_bytes(rows(1, note="again"))
            await follow.reaches([1, 2, 3, 1])
            assert {event.run for event in follow.events} == {"exp"}
            assert [event.restarted for event in follow.of(RunStarted)][-1]

    asyncio.run(check())


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_every_step_counts_once_whatever_happens_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, below: bool
) -> None:
    """Rows in pieces, restarts in place, renames with unread rows, copytruncate; in tiny chunks and any order."""
    monkeypatch.setattr(tail_module, "CHUNK", 300)
    monkeypatch.setattr(file_module, "_POLL_BYTES", 900)
    random = Random(seed)
    path = tmp_path / "exp.jsonl"
    source = FileSource(tmp_path if below else path, clock=time.monotonic)
    events: list[SourceEvent] = []
    written, unwritten = 0, b""

    def look() -> None:
        source._next_walk = 0.0
        while True:
            events.extend(source._poll())
            if not source._more:
                return

    def row() -> bytes:
        nonlocal written
        written += 1
        return rows(written, note=str(random.random()))

    actions = ["write"] * 12 + ["look"] * 3 + ["restart", "rename", "copytruncate"]
    look()
    writer = path.open("wb", buffering=0)
    for number in range(50):
        action = random.choice(actions) if number else "restart"
        if action == "write":
            unwritten += b"".join(row() for _ in range(random.randint(1, 8)))
            cut = random.randint(0, len(unwritten))
            writer.write(unwritten[:cut])
            unwritten = unwritten[cut:]
        elif action != "look":
            writer.write(unwritten)
            unwritten = b""
            if action == "rename":
                path.rename(tmp_path / random.choice([f"exp.jsonl.{number}", f"old{number}.jsonl"]))
            else:
                look()  # truncation destroys what was not read
            if action == "copytruncate":
                os.truncate(path, 0)
            else:
                writer.close()
                writer = path.open("wb", buffering=0)
            writer.write(row())
        if action != "write":
            look()
    writer.write(unwritten)
    writer.close()
    look()
    assert [event.step for event in events if isinstance(event, RawStep)] == list(range(1, written + 1))
    assert {event.run for event in events} == {"exp"}


# --- the end


def test_a_removed_log_ends_its_run_and_may_come_back(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1) + rows(2)[:-1])

    async def check() -> None:
        async with following(path) as follow:
            await follow.reaches([1])
            path.unlink()
            await follow.until(lambda: follow.of(RunEnded))
            (end,) = follow.of(RunEnded)
            assert (end.run, end.state, end.reason) == ("exp", RunState.GONE, "its log was removed")
            assert follow.steps == [1, 2]
            assert follow.source.stats.files == 0
            path.write_bytes(rows(5, note="other"))
            await follow.reaches([1, 2, 5])
            assert [event.restarted for event in follow.of(RunStarted)] == [False, True]
            await follow.polls(6)
            assert len(follow.of(RunEnded)) == 1

    asyncio.run(check())


def test_a_log_that_is_moved_away_and_back_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, 2))

    async def check() -> None:
        async with following(path) as follow:
            await follow.reaches([1, 2])
            path.rename(tmp_path / "aside")
            await follow.until(lambda: follow.of(RunEnded))
            (tmp_path / "aside").rename(path)
            append(path, rows(3))
            await follow.reaches([1, 2, 3])
            assert [event.restarted for event in follow.of(RunStarted)] == [False, False]

    asyncio.run(check())


WRITER = (
    "import sys\nf = open(sys.argv[1], 'wb', buffering=0)\n"
    "for line in sys.stdin:\n    f.write(eval(line))\n    print('done', flush=True)\n"
)


class Writer:
    """A trainer's stand-in: another process that holds the log open."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{data!r}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate()


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not show open files")


def quick_watch() -> WriterWatch:
    return WriterWatch(scan_seconds=0.05, confirm_seconds=0.1)


@needs_proc
@pytest.mark.parametrize("kill", [True, False])
def test_a_run_ends_when_its_writer_closes_the_log(tmp_path: Path, kill: bool) -> None:
    path = tmp_path / "exp.jsonl"
    writer = Writer(path)

    async def check() -> None:
        async with following(path, watch=quick_watch()) as follow:
            stats = follow.source.stats
            await asyncio.to_thread(writer.write, rows(1) + rows(2)[:-1])
            await follow.until(lambda: stats.writers == {"exp": "held"})
            assert follow.steps == [1]
            await asyncio.to_thread(writer.end, kill)
            await follow.until(lambda: follow.of(RunEnded))
            (end,) = follow.of(RunEnded)
            assert (end.state, end.reason) == (RunState.FINISHED, "its writer closed the log")
            assert follow.events.index(end) == len(follow.events) - 1
            assert follow.steps == [1, 2]  # the last line without its newline too
            assert stats.writers == {"exp": "released"}
            append(path, b"\n" + rows(3))  # it goes on after all
            await follow.reaches([1, 2, 3])
            assert [event.restarted for event in follow.of(RunStarted)] == [False, False]
            again = Writer(path)
            await asyncio.to_thread(again.write, rows(1, note="again"))
            await follow.reaches([1, 2, 3, 1])
            assert follow.of(RunStarted)[-1].restarted
            await follow.until(lambda: stats.writers == {"exp": "held"})
            await asyncio.to_thread(again.end)
            await follow.until(lambda: len(follow.of(RunEnded)) == 2)

    try:
        asyncio.run(check())
    finally:
        writer.end(kill=True)


@needs_proc
def test_a_writer_that_opens_for_each_row_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"

    async def check() -> None:
        async with following(path, watch=quick_watch()) as follow:
            for step in range(20):
                append(path, rows(step))
                await asyncio.sleep(0.02)
            await follow.reaches(list(range(20)))
            assert follow.of(RunEnded) == []
            assert follow.source.stats.writers == {"exp": "unknown"}

    asyncio.run(check())


@pytest.mark.parametrize("proc", ["/proc", "/nonexistent"])
def test_an_old_log_is_that_of_a_finished_run(tmp_path: Path, proc: str) -> None:
    old, recent = tmp_path / "old.jsonl", tmp_path / "recent.jsonl"
    old.write_bytes(rows(1) + rows(2)[:-1])
    recent.write_bytes(rows(7))
    os.utime(old, (time.time() - 9000, time.time() - 9000))

    async def check() -> None:
        async with following(tmp_path, watch=WriterWatch(proc=proc)) as follow:
            await follow.until(lambda: follow.of(RunEnded))
            await follow.polls(3)
            (end,) = follow.of(RunEnded)
            assert (end.run, end.state) == ("old", RunState.FINISHED)
            assert end.reason.startswith("log untouched for 2.5 h when the monitor started")
            seen = os.path.isdir(f"{proc}/self/fd")
            assert end.reason.endswith("and no process holds it open") == seen
            assert [(e.step, e.live) for e in follow.of(RawStep) if e.run == "old"] == [(1, False), (2, False)]
            append(old, b"\n" + rows(3))
            await follow.until(lambda: 3 in follow.steps)
            assert [e.restarted for e in follow.of(RunStarted) if e.run == "old"] == [False, False]
            await follow.polls(3)
            assert len(follow.of(RunEnded)) == 1

    asyncio.run(check())


@needs_proc
def test_an_old_log_that_is_held_is_not_over(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    writer = Writer(path)

    async def check() -> None:
        writer.write(rows(1))
        os.utime(path, (time.time() - 9000, time.time() - 9000))
        async with following(path, watch=quick_watch()) as follow:
            await follow.until(lambda: follow.source.stats.writers == {"exp": "held"})
            assert follow.of(RunEnded) == []

    try:
        asyncio.run(check())
    finally:
        writer.end(kill=True)


# --- names


def started(path: Path, **options: object) -> list[tuple[str, str]]:
    async def look() -> list[tuple[str, str]]:
        async with following(path, **options) as follow:
            await follow.until(lambda: follow.source.stats.files and not follow.source.stats.lag_bytes)
            await follow.polls(2)
            return sorted((event.run, event.project) for event in follow.of(RunStarted))

    return asyncio.run(look())


def plant(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rows(number))


def test_names_follow_verls_layout(tmp_path: Path) -> None:
    root = tmp_path / "logs"
    plant(root, "p1/a.jsonl", "p2/b.jsonl", "p1/same.jsonl", "p2/same.jsonl", "x/y/deep.jsonl", "top.v1.jsonl")
    plant(root, "p1/notes.txt", "p1/a.jsonl.gz", ".snapshot/p1/a.jsonl", "p1/.a.jsonl")
    assert started(root) == [
        ("a", "p1"), ("b", "p2"), ("p1/same", "p1"), ("p2/same", "p2"), ("top.v1", "logs"), ("x/y/deep", "y"),
    ]  # fmt: skip
    assert started(root / "p1") == [("a", "p1"), ("same", "p1")]
    assert started(root / "p1" / "a.jsonl", run="mine", project="ours") == [("mine", "ours")]
    assert started(root / "p1", project="ours") == [("a", "ours"), ("same", "ours")]


def test_names_never_collide(tmp_path: Path) -> None:
    root = tmp_path / "p"
    plant(root, "exp.jsonl", "p/exp.jsonl", "p/exp.json", "q/exp.jsonl")
    names = started(root, patterns=("exp.json*",))
    assert len({run for run, _ in names}) == 4
    assert {"p/exp", "q/exp"} < {run for run, _ in names}
    assert names == started(root, patterns=("exp.json*",))


def test_a_late_file_of_a_taken_name_renames_nobody(tmp_path: Path) -> None:
    plant(tmp_path, "p1/exp.jsonl")
    follow = play(tmp_path, (nothing, [0]), (lambda: plant(tmp_path, "p2/exp.jsonl"), [0, 0]))
    assert [event.run for event in follow.of(RawStep)] == ["exp", "p2/exp"]


def test_links_to_a_log_are_the_same_log(tmp_path: Path) -> None:
    plant(tmp_path, "p/exp.jsonl")
    (tmp_path / "latest.jsonl").symlink_to("p/exp.jsonl")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.link(tmp_path / "p" / "exp.jsonl", tmp_path / "p" / "hard.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to("nowhere")
    assert started(tmp_path) == [("exp", "p")]


def test_hostile_names_are_cleaned(tmp_path: Path) -> None:
    plant(tmp_path, "a\nb.jsonl", "a\tb.jsonl", "x" * 240 + ".jsonl", "x" * 241 + ".jsonl", os.fsdecode(b"\xff.jsonl"))
    names = [run for run, _ in started(tmp_path)]
    assert len(set(names)) == 5
    assert all(name.isprintable() and len(name) <= NAME_LIMIT for name in names)


# --- trouble


def test_an_unreadable_file_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(tmp_path, "bad.jsonl", "good.jsonl")
    forbidden = True
    real_open = open

    def guarded(path: str, *arguments: object, **options: object) -> object:
        if forbidden and str(path).endswith("bad.jsonl"):
            raise PermissionError(13, "Permission denied", path)
        return real_open(path, *arguments, **options)  # type: ignore[call-overload]  # passed through as given

    monkeypatch.setattr(tail_module, "open", guarded, raising=False)

    async def check() -> None:
        nonlocal forbidden
        async with following(tmp_path) as follow:
            await follow.until(lambda: follow.steps == [1])
            await follow.until(lambda: follow.source.stats.rejected["unreadable"] >= 3)
            assert follow.source.stats.up
            forbidden = False
            await follow.until(lambda: follow.steps == [1, 0])
            assert not follow.of(RawStep)[1].live  # it lay there when the source started

    asyncio.run(check())
    assert [r.getMessage().count("cannot be read") for r in caplog.records if r.levelno >= logging.WARNING] == [1]


def test_an_error_of_ours_in_one_file_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 41."""
    plant(tmp_path, "a.jsonl", "b.jsonl")
    feed = EventReader.feed

    def broken(self: EventReader, *arguments: object) -> int:
        if self.run == "a":
            raise ZeroDivisionError("injected")
        return feed(self, *arguments)  # type: ignore[arg-type]  # passed through as given

    monkeypatch.setattr(EventReader, "feed", broken)
    follow = play(tmp_path, (nothing, [1]), (lambda: append(tmp_path / "b.jsonl", rows(2)), [1, 2]))
    assert follow.source.stats.rejected["internal"] >= 1
    assert follow.source.stats.up
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "a.jsonl" in record.getMessage()
    assert record.exc_info


@pytest.mark.parametrize("broken", ["stat", "scandir"])
def test_a_dead_directory_shows_as_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    plant(tmp_path, "exp.jsonl")
    real = getattr(os, broken)
    dead = True

    def failing(path: str, **options: object) -> object:
        if dead and str(path) == str(tmp_path):
            raise OSError(5, "Input/output error", path)
        return real(path, **options)

    monkeypatch.setattr(os, broken, failing)

    async def check() -> None:
        nonlocal dead
        follow = Following(FileSource(tmp_path, clock=time.monotonic, poll_seconds=POLL))
        task = asyncio.create_task(follow.gather())
        stats = follow.source.stats
        await follow.until(lambda: stats.rejected["unreadable"] >= 2)
        assert not stats.up
        assert "Input/output error" in stats.detail
        dead = False
        await follow.until(lambda: stats.up and follow.steps == [0])
        assert not follow.of(RawStep)[0].live  # found by the first look that worked
        dead = True
        await follow.until(lambda: not stats.up)
        await asyncio.sleep(8 * POLL)
        assert follow.of(RunEnded) == []  # nobody saw it removed
        await follow.source.aclose()
        await task

    asyncio.run(check())


def test_a_file_system_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 40: the loop goes on, the source says that it is down, and it can be closed."""
    plant(tmp_path, "exp.jsonl")
    hang, release, real = False, threading.Event(), os.stat

    def stat(path: str, **options: bool) -> os.stat_result:
        if hang:
            release.wait(10)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(file_module, "_STUCK_SECONDS", 0.05)

    async def check() -> None:
        nonlocal hang
        follow = Following(FileSource(tmp_path, clock=time.monotonic, poll_seconds=POLL))
        task = asyncio.create_task(follow.gather())
        await follow.until(lambda: follow.steps == [0])
        hang = True
        began = time.monotonic()
        await follow.until(lambda: not follow.source.stats.up)
        await follow.source.aclose()
        await task
        assert time.monotonic() - began < 5
        release.set()

    asyncio.run(check())


def test_a_huge_file_does_not_hold_up_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "CHUNK", 1000)
    monkeypatch.setattr(file_module, "_POLL_BYTES", 2000)
    big = list(range(2000))
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(rows(*big))
    (tmp_path / "z.jsonl").write_bytes(rows(7))

    async def check() -> None:
        async with following(tmp_path) as follow:
            await follow.until(lambda: any(event.run == "z" for event in follow.of(RawStep)))
            assert len(follow.steps) < 1000
            await follow.until(lambda: len(follow.steps) == 6001)
            for name in "abc":
                assert [event.step for event in follow.of(RawStep) if event.run == name] == big
            assert not any(event.live for event in follow.of(RawStep))
            assert follow.source.stats.lag_bytes == 0

    asyncio.run(check())


def test_followed_files_are_capped_to_the_newest(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / f"r{number}.jsonl"
        path.write_bytes(rows(number))
        os.utime(path, (time.time() - 100 + number,) * 2)

    async def check() -> None:
        async with following(tmp_path, max_files=4) as follow:
            await follow.reaches([2, 3, 4, 5])
            assert (follow.source.stats.files, follow.source.stats.files_cut) == (4, 2)
            plant(tmp_path, "new.jsonl")
            await follow.until(lambda: follow.steps == [2, 3, 4, 5, 0])
            assert [(event.run, event.state) for event in follow.of(RunEnded)] == [("r2", RunState.GONE)]
            assert (follow.source.stats.files, follow.source.stats.files_cut) == (4, 3)

    asyncio.run(check())


def test_removed_files_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "_FORGET_SECONDS", 0.0)
    plant(tmp_path, *(f"r{number}.jsonl" for number in range(5)))

    async def check() -> None:
        async with following(tmp_path) as follow:
            await follow.until(lambda: len(follow.steps) == 5)
            for path in tmp_path.iterdir():
                path.unlink()
            await follow.until(lambda: len(follow.of(RunEnded)) == 5)
            await follow.until(lambda: not follow.source._tails)

    asyncio.run(check())


# --- the iterator


def test_a_wait_that_is_cancelled_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(*range(50)))

    async def check() -> list[int]:
        source: Source = FileSource(path, clock=time.monotonic, poll_seconds=POLL)
        iterator = source.__aiter__()
        steps: list[int] = []
        while len(steps) < 50:
            try:
                event = await asyncio.wait_for(iterator.__anext__(), 0.001)
            except asyncio.TimeoutError:
                continue
            steps += [event.step] if isinstance(event, RawStep) else []
        await source.aclose()
        await source.aclose()
        with pytest.raises(StopAsyncIteration):
            await iterator.__anext__()
        return steps

    assert asyncio.run(check()) == list(range(50))


def test_counters_tell_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, 2))
    stats = play(path, (nothing, [1, 2])).source.stats
    assert (stats.name, stats.up, stats.records, stats.bytes) == (f"file:{path.name}", True, 2, len(rows(1, 2)))
    assert stats.last_read_seconds is not None
    assert stats.last_record_seconds is not None
    assert stats.last_record_seconds <= stats.last_read_seconds
    assert set(stats.rejected) == set(REASONS)


# --- recordings


def recorded(events: Iterator[SourceEvent]) -> list[int]:
    return [event.step for event in events if isinstance(event, RawStep)]


def test_a_recording_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "proj" / "exp.jsonl"
    path.parent.mkdir()
    path.write_bytes(rows(1, 2) + b"broken\n" + rows(3)[:-1])
    stats = SourceStats("check")
    first, *rest = read_file(path, stats=stats)
    assert isinstance(first, RunStarted)
    assert (first.run, first.project) == ("exp", "proj")
    assert recorded(iter(rest)) == [1, 2, 3]
    assert all(isinstance(event, RawStep) and not event.live for event in rest)
    assert (stats.records, stats.rejected) == (3, {"bad_json": 1})
    first = next(read_file(path, "mine", "ours", time_seconds=5.0))
    assert (first.run, first.time_seconds) == ("mine", 5.0)


def test_a_recording_equals_what_was_followed(tmp_path: Path) -> None:
    for name in ("01_nan_onset_bare_tokens", "31_nul_prefix", "32_bad_middle_line", "36_label_churn"):
        path = CASES / f"{name}.jsonl"
        steps = recorded(read_file(path))
        assert steps
        assert play(path, (nothing, steps)).source.stats.records == len(steps)


def test_a_recording_that_cannot_be_read_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_file(tmp_path / "absent.jsonl"))
    with pytest.raises(IsADirectoryError):
        next(read_file(tmp_path))


# --- what only shows when two things happen between two polls


class StagedWatch(WriterWatch):
    """Says of every log what the test wants, until the log is forgotten."""

    def __init__(self) -> None:
        super().__init__(proc="/nonexistent")
        self.told = WriterState.UNKNOWN
        self.unheld = False

    def state(self, file: FileId) -> WriterState:
        return self.told

    def nobody(self, file: FileId) -> bool:
        return self.unheld

    def forget(self, file: FileId) -> None:
        self.told = WriterState.UNKNOWN


def test_the_end_of_the_log_before_does_not_end_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, 2))
    watch = StagedWatch()
    source = FileSource(path, clock=time.monotonic, watch=watch)
    source._poll()
    path.write_bytes(rows(1, note="again"))
    watch.told = WriterState.RELEASED  # seen of the old writer, just before the new one came
    assert not any(isinstance(event, RunEnded) for event in source._poll())


def test_an_old_log_that_grows_is_not_over(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1))
    os.utime(path, (time.time() - 9000, time.time() - 9000))
    watch = StagedWatch()
    source = FileSource(path, clock=time.monotonic, watch=watch)
    source._poll()  # no scan has looked for a writer yet
    append(path, rows(2))
    watch.unheld = True
    events = source._poll()
    assert recorded(iter(events)) == [2]
    assert not any(isinstance(event, RunEnded) for event in events)


def test_a_rewrite_within_one_tick_of_the_time_stamp_is_seen(tmp_path: Path) -> None:
    """Some file systems keep whole seconds: size and time stamp then stay as they were."""
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, note="a"))
    stamp = path.stat().st_mtime_ns
    source = FileSource(path, clock=time.monotonic)
    source._poll()
    path.write_bytes(rows(1, note="b"))
    os.utime(path, ns=(stamp, stamp))
    assert [event.restarted for event in source._poll() if isinstance(event, RunStarted)] == [True]


def test_a_backlog_leaves_the_event_loop_to_others(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(*range(3200)))

    async def check() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        source = FileSource(path, clock=time.monotonic, poll_seconds=POLL)
        await source.__anext__()
        task = asyncio.create_task(other())
        for _ in range(3200):
            await source.__anext__()
        task.cancel()
        await source.aclose()
        assert turns >= 50

    asyncio.run(check())


def test_a_log_of_another_head_is_another_log(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1, *range(100, 120)))
    source = FileSource(path, clock=time.monotonic)
    source._poll()
    path.write_bytes(rows(2, *range(100, 121)))  # the same bytes before the reading position
    assert recorded(iter(source._poll())) == [2, *range(100, 121)]


def test_what_comes_while_the_backlog_is_measured_is_live(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_bytes(rows(1))

    def clock() -> float:  # first asked for the backlog's time, after its size is known
        if path.stat().st_size == len(rows(1)):
            append(path, rows(2))
        return time.monotonic()

    source = FileSource(path, clock=clock)
    steps = [(event.step, event.live) for event in source._poll() + source._poll() if isinstance(event, RawStep)]
    assert steps == [(1, False), (2, True)]
