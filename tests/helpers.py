"""Small things that many tests need. No fixtures here: those are in conftest.py."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from monitor.catalog import parse
from monitor.detectors import Detector
from monitor.engine import Engine
from monitor.model import Observation, RawStep, Verdict

REPOSITORY = Path(__file__).parent.parent
LAB = REPOSITORY / "monitor" / "demo_runs"
CASES = REPOSITORY / "tests" / "data" / "cases"
SHARED = REPOSITORY.parent / "shared"


def shared(*parts: str) -> Path:
    """A path of the measuring corpus, which lies beside the project; skips the test where it does not."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip("the corpus (../shared beside the project) is not here")
    return path


def rows(path: Path) -> list[tuple[int, dict[str, object]]]:
    """Steps and values of a well-formed log, in the plainest way."""
    out = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        out.append((row["step"], row["data"]))
    return out


def observation(step: int, values: Mapping[str, float], *, now: float = 0.0, live: bool = True) -> Observation:
    """An observation in series names."""
    return Observation("run", step, now, dict(values), live)


def judge(detector: Detector, path: Path) -> list[tuple[int, Verdict]]:
    """All verdicts of a detector on a recorded run."""
    out = []
    for step, data in rows(path):
        verdict = detector.update(parse(RawStep("run", step, 0.0, data)))
        if verdict is not None:
            out.append((step, verdict))
    return out


def feed(engine: Engine, data: Iterable[tuple[int, Mapping[str, object]]], *, run: str = "run", start: float = 0.0,
         seconds: float = 1.0) -> float:
    """Rows into an engine, one each ``seconds``; returns the time of the last."""
    now = start
    for step, values in data:
        engine.handle(RawStep(run, step, now, values), "test")
        now += seconds
    return now - seconds


def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], object], seconds: float = 10.0, what: str = "condition") -> None:
    """Poll until ``condition`` holds.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"{what} did not hold within {seconds:g} s")
