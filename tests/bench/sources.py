"""The ways in: cost of an attached ``log()`` beside verl's own FileLogger, and rows a second for each source beside
bare parsing of the same bytes."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from monitor.attach import wrap
from monitor.attach.push import Push
from monitor.attach.recorder import Identity, Recorder
from monitor.attach.settings import Settings
from monitor.sources.exposition import read_page
from monitor.sources.formats import CONSOLE, JSONL, TENSORBOARD, WANDB, Format
from monitor.sources.framing import TensorFlowFraming, WandbFraming
from monitor.sources.push import PushSource
from tests.helpers import LAB, REPOSITORY, rows

FIVE = REPOSITORY / "tests" / "data" / "five"
ROW = rows(LAB / "ppo-healthy.jsonl")[2][1]
REPEAT = 30


class Tracking:
    """As verl's, with no backend: what is left is the call."""

    def __init__(self, project_name: str, experiment_name: str) -> None:
        """Nothing to begin."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Hand the row to no backend."""


class Watched(Tracking):
    """The same with the monitor around it."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """As above; wrapped is what a class itself defines."""


class FileLogger:
    """Like verl 0.9.1's: orjson into an unbuffered file."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - as verl has it

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Write a row."""
        self._file.write(orjson.dumps({"step": step, "data": data}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


def file_logger(path: str) -> tuple[str, Any]:
    """verl's own where verl is installed, else one like it."""
    try:
        own = importlib.import_module("verl.utils.tracking").FileLogger
    except (ImportError, AttributeError):
        return "a FileLogger like verl's", FileLogger(path)
    os.environ["VERL_FILE_LOGGER_PATH"] = path
    return "verl's FileLogger", own("project", "experiment")


def in_turn(calls: Mapping[str, Callable[[dict[str, Any], int], object]], data: Mapping[str, float], repeat: int,
            pause: float, tidy: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each call with a row of its own, in turn and in changing order, so that neither a machine whose
    speed changes nor what the one before has left in the caches favours any."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    names, rng = list(calls), random.Random(0)
    for number in range(repeat):
        rng.shuffle(names)
        for name in names:
            row = {key: value + number for key, value in data.items()}
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            calls[name](row, number)
            spent[name].append(time.perf_counter() - start)
        tidy()
    return {name: statistics.median(times) for name, times in spent.items()}


def attached() -> None:
    """Microseconds of an attached log() in the caller's thread, less the call itself: row after row, and after a pause,
    as a trainer calls it, when nothing of it is in the processor's caches."""
    data = {key: float(value) for key, value in ROW.items() if isinstance(value, (float, int))}
    data |= {f"more/{number}": 0.1 * number for number in range(120 - len(data))}
    wrap.wrap_tracking(Watched)
    bare, watched = Tracking("project", "run"), Watched("project", "run")
    target = Push(Settings(url="http://127.0.0.1:9"))
    target._thread = threading.current_thread()  # none of ours is to run while others are timed
    vars(watched)[wrap._ON_TRACKING] = Recorder(Identity("run", "project", "incarnation"), (target,))
    with tempfile.TemporaryDirectory() as folder:
        name, logger = file_logger(os.path.join(folder, "log.jsonl"))
        for repeat, pause, when in ((3_000, 0.0, "row after row"), (300, 0.01, "after a pause")):
            cost = in_turn({"bare": bare.log, "ours": watched.log, "file": logger.log}, data, repeat, pause,
                           target._queue.clear)  # as that thread would
            ours = cost["ours"] - cost["bare"]
            print(f"attached log() of {len(data)} keys, {when}: {1e6 * ours:6.1f} us in the caller's thread; {name} "
                  f"{1e6 * cost['file']:6.1f} us (ratio {ours / cost['file']:.2f}; aim 0.3)")
        logger.finish()


def seconds(call: Callable[[], object]) -> float:
    """Least seconds of five calls."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def recorded(name: str) -> bytes:
    """A recording of one real run of 31 rows."""
    return gzip.decompress((FIVE / f"{name}.gz").read_bytes())


def read(kind: Format, data: bytes) -> int:
    """Read a log whole; its rows."""
    reader = kind.make(lambda *_: None)
    reader.feed(data)
    reader.finish()
    return reader.read


def framed(framing: TensorFlowFraming | WandbFraming, data: bytes) -> int:
    """Records of a binary log."""
    return len(framing.feed(data))


def sources() -> None:
    """Rows a second of each source, and the ratio of its time to bare parsing of the same bytes."""
    lines = recorded("five.jsonl") * REPEAT
    console = b"".join(line + b"\n" for line in recorded("console.log").splitlines() if b"step:" in line) * REPEAT
    board, wandb = recorded("events.out.tfevents"), recorded("run.wandb")
    pushed = [line for line in recorded("push.jsonl").splitlines() if b"/steps" in line] * REPEAT
    page = (REPOSITORY / "tests" / "data" / "metrics.golden.txt").read_text()

    def push() -> None:
        source = PushSource(lambda: 0.0)
        for number, line in enumerate(pushed):
            body = json.loads(line)["body"]
            source.steps("run", body | {"incarnation": str(number // 31)})

    for name, unit, count, bare_name, ours, bare in (
        ("file", "rows", 31 * REPEAT, "orjson", lambda: read(JSONL, lines),
         lambda: [orjson.loads(line) for line in lines.splitlines()]),
        ("console", "rows", 31 * REPEAT, "splitting its pairs", lambda: read(CONSOLE, console),
         lambda: [[pair.partition(b":") for pair in line.split(b" - ")] for line in console.splitlines()]),
        ("tensorboard", "events", framed(TensorFlowFraming(), board), "framing", lambda: read(TENSORBOARD, board),
         lambda: framed(TensorFlowFraming(), board)),
        ("wandb", "rows", 31, "framing", lambda: read(WANDB, wandb), lambda: framed(WandbFraming(), wandb)),
        ("push", "rows", len(pushed), "json", push, lambda: [json.loads(line) for line in pushed]),
        ("prometheus", "pages", 1, "prometheus_client", lambda: read_page(page, "x"), lambda: _families(page)),
    ):
        taken, least = seconds(ours), seconds(bare)
        print(f"source {name:11}: {count / taken:10,.0f} {unit}/s ({1e6 * taken / count:8.1f} us each; "
              f"{taken / least:5.2f} times {bare_name} alone)")


def _families(page: str) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    for _ in text_string_to_metric_families(page):
        pass


if __name__ == "__main__":
    print(f"Python {sys.version.split()[0]}")
    attached()
    sources()
