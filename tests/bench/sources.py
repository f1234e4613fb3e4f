"""The ways in: cost of an attached ``log()`` beside verl's own FileLogger, and rows a second for each source beside
bare parsing of the same bytes."""

from __future__ import annotations

import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from monitor.attach.recorder import Event, Identity, Recorder
from monitor.sources.exposition import read_page
from monitor.sources.formats import CONSOLE, JSONL, TENSORBOARD, WANDB, Format
from monitor.sources.framing import TensorFlowFraming, WandbFraming
from monitor.sources.push import PushSource
from tests.helpers import LAB, REPOSITORY, rows

FIVE = REPOSITORY / "tests" / "data" / "five"
ROW = rows(LAB / "ppo-healthy.jsonl")[2][1]
REPEAT = 30


class Queue:
    """A target that keeps nothing."""

    def put(self, event: Event) -> None:
        """Take it."""

    def flush(self, seconds: float) -> bool:
        """Nothing to do."""
        return True

    def drop(self) -> None:
        """Nothing to do."""


class FileLogger:
    """verl 0.9.1's: orjson into an unbuffered file."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - as verl has it

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Write a row."""
        self._file.write(orjson.dumps({"step": step, "data": data}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def in_turn(**calls: Callable[[int], object]) -> dict[str, float]:
    """Median seconds of each call, called in turn, so that a machine whose speed changes favours none."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(2_000):
        for name, call in calls.items():
            start = time.perf_counter()
            call(number)
            spent[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in spent.items()}


def attached() -> None:
    """Microseconds of an attached log() in the caller's thread."""
    data = {key: value for key, value in ROW.items() if value is not None}
    data |= {f"more/{number}": 0.1 * number for number in range(120 - len(data))}
    recorder = Recorder(Identity("run", "project", "incarnation"), (Queue(),))
    with tempfile.TemporaryDirectory() as folder:
        logger = FileLogger(os.path.join(folder, "log.jsonl"))
        cost = in_turn(ours=lambda step: recorder.log(data, step), file=lambda step: logger.log(data, step),
                       json=lambda step: json.dumps({"step": step, "data": data}))
        logger.close()
    print(f"attached log() of {len(data)} keys: {1e6 * cost['ours']:6.1f} us in the caller's thread; verl's FileLogger "
          f"{1e6 * cost['file']:.1f} us (ratio {cost['ours'] / cost['file']:.2f}), json.dumps alone "
          f"{1e6 * cost['json']:.1f} us (ratio {cost['ours'] / cost['json']:.2f})")


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
