"""Who holds a log open: real processes, and a made-up /proc for what cannot be staged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monitor.sources.writer import FileId, WriterState, WriterWatch

UNKNOWN, HELD, RELEASED = WriterState.UNKNOWN, WriterState.HELD, WriterState.RELEASED
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not show open files")

HOLD = "import sys; f = open(sys.argv[1], sys.argv[2]); print('ready', flush=True); sys.stdin.read()"
BY_ROW = (
    "import sys, time\nprint('ready', flush=True)\n"
    "while True:\n    f = open(sys.argv[1], 'ab'); f.write(b'row'); f.close(); time.sleep(0.02)"
)


def file_id(path: Path) -> FileId:
    status = path.stat()
    return status.st_dev, status.st_ino


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python process that has done its work of opening when this returns."""
    processes: list[subprocess.Popen[str]] = []

    def begin(code: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@needs_proc
@pytest.mark.parametrize("kill", [True, False])
def test_held_then_released(tmp_path: Path, start: Start, kill: bool) -> None:
    path = tmp_path / "exp.jsonl"
    writer = start(HOLD, str(path), "wb")
    file = file_id(path)
    watch = WriterWatch()
    files = {file: path.name}
    assert watch.state(file) is UNKNOWN
    watch.check(files, 100.0)
    assert watch.state(file) is UNKNOWN  # seen once is not enough
    assert not watch.nobody(file)
    watch.check(files, 100.9)
    assert watch.state(file) is UNKNOWN
    watch.check(files, 101.0)
    assert watch.state(file) is HELD
    if kill:
        writer.kill()
    writer.communicate()
    watch.check(files, 103.0)
    assert watch.state(file) is HELD  # one scan without a holder may be an accident
    watch.check(files, 104.0)
    assert watch.state(file) is HELD  # too early for the next scan
    watch.check(files, 105.5)
    assert watch.state(file) is RELEASED
    watch.forget(file)
    assert watch.state(file) is UNKNOWN


@needs_proc
def test_readers_and_this_process_are_no_writers(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "exp.jsonl"
    with path.open("wb"):
        start(HOLD, str(path), "rb")
        watch = WriterWatch()
        for now in (100.0, 103.0, 106.0):
            watch.check({file_id(path): path.name}, now)
        assert watch.state(file_id(path)) is UNKNOWN
        assert watch.nobody(file_id(path))


@needs_proc
def test_read_and_write_counts_and_another_name_does_not(tmp_path: Path, start: Start) -> None:
    path, other = tmp_path / "exp.jsonl", tmp_path / "other" / "exp.jsonl"
    other.parent.mkdir()
    other.touch()
    start(HOLD, str(path), "a+b")
    files = {file_id(path): path.name, file_id(other): other.name}
    watch = WriterWatch()
    watch.check(files, 100.0)
    watch.check(files, 101.5)
    assert watch.state(file_id(path)) is HELD
    assert watch.state(file_id(other)) is UNKNOWN
    watch.check({}, 102.0)
    assert watch.state(file_id(path)) is UNKNOWN  # what does not matter any more is forgotten


@needs_proc
def test_a_second_holder_keeps_it_held(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "exp.jsonl"
    first = start(HOLD, str(path), "ab")
    watch = WriterWatch()
    files = {file_id(path): path.name}
    watch.check(files, 100.0)
    watch.check(files, 101.0)
    second = start(HOLD, str(path), "ab")
    first.communicate()
    for now in (104.0, 107.0, 110.0):
        watch.check(files, now)
        assert watch.state(file_id(path)) is HELD
    second.communicate()
    for now in (113.0, 116.0):
        watch.check(files, now)
    assert watch.state(file_id(path)) is RELEASED


@needs_proc
def test_a_writer_that_opens_for_each_row_stays_unknown(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "exp.jsonl"
    path.touch()
    start(BY_ROW, str(path))
    watch = WriterWatch(scan_seconds=0.0, confirm_seconds=0.3)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        watch.check({file_id(path): path.name}, time.monotonic())
        assert watch.state(file_id(path)) is UNKNOWN
        time.sleep(0.02)


class FakeProc:
    """A process file system with one process, 4711, and its descriptor 3."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root, self.target = root, target
        self.process = root / "4711"
        (self.process / "fd").mkdir(parents=True)
        (self.process / "fdinfo").mkdir()
        self.open("0100001")
        (self.process / "stat").write_text("4711 (ray::Task) Runner) S 1 1 1")

    def open(self, flags: str) -> None:
        (self.process / "fd" / "3").symlink_to(self.target)
        (self.process / "fdinfo" / "3").write_text(f"pos:\t0\nflags:\t{flags}\nmnt_id:\t1\n")

    def close(self) -> None:
        (self.process / "fd" / "3").unlink()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "exp.jsonl"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("flags", "state"), [("0100001", HELD), ("0102002", HELD), ("0100000", UNKNOWN), ("nonsense", UNKNOWN)]
)
def test_flags_tell_writers(tmp_path: Path, log: Path, flags: str, state: WriterState) -> None:
    proc = FakeProc(tmp_path / "proc", log)
    proc.close()
    proc.open(flags)
    watch = WriterWatch(proc=str(proc.root))
    for now in (0.0, 3.0):
        watch.check({file_id(log): log.name}, now)
    assert watch.state(file_id(log)) is state


def test_a_known_holder_needs_no_scan(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = FakeProc(tmp_path / "proc", log)
    watch = WriterWatch(proc=str(proc.root))
    watch.check({file_id(log): log.name}, 0.0)
    monkeypatch.setattr(watch, "_scan", lambda wanted: pytest.fail("scanned"))
    for now in range(1, 100):
        watch.check({file_id(log): log.name}, float(now))
    assert watch.state(file_id(log)) is HELD


def test_scans_are_rare(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = FakeProc(tmp_path / "proc", log)
    proc.close()
    watch = WriterWatch(proc=str(proc.root))
    scans: list[object] = []

    def scan(wanted: object) -> dict[FileId, tuple[str, str]]:
        scans.append(wanted)
        return {}

    monkeypatch.setattr(watch, "_scan", scan)
    for tick in range(101):
        watch.check({file_id(log): log.name}, tick * 0.1)
    assert 5 <= len(scans) <= 6


@pytest.mark.parametrize(("letter", "state"), [("Z", RELEASED), ("S", UNKNOWN)])
def test_forbidden_is_not_closed_unless_the_process_is_dead(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, letter: str, state: WriterState
) -> None:
    proc = FakeProc(tmp_path / "proc", log)
    watch = WriterWatch(proc=str(proc.root))
    for now in (0.0, 1.0):
        watch.check({file_id(log): log.name}, now)
    assert watch.state(file_id(log)) is HELD
    real_stat, real_listdir = os.stat, os.listdir

    def stat(path: str, **options: bool) -> os.stat_result:
        if "/fd/" in str(path):
            raise PermissionError(13, "denied", path)
        return real_stat(path, **options)

    def listdir(path: str) -> list[str]:
        if str(path).endswith("/fd"):
            raise PermissionError(13, "denied", path)
        return real_listdir(path)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "listdir", listdir)
    (proc.process / "stat").write_text(f"4711 (ray::Task) Runner) {letter} 1 1 1")
    file = log.name
    real = real_stat(log)
    for now in (3.0, 6.0, 9.0):
        watch.check({(real.st_dev, real.st_ino): file}, now)
    assert watch.state((real.st_dev, real.st_ino)) is state


def test_without_proc_everything_is_unknown(tmp_path: Path, log: Path) -> None:
    watch = WriterWatch(proc=str(tmp_path / "absent"))
    assert not watch.available
    watch.check({file_id(log): log.name}, 0.0)
    assert watch.state(file_id(log)) is UNKNOWN
    assert watch.nobody(file_id(log))
