"""The fake driver for tests: built once, driven by a file, read by a node probe in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import REPOSITORY

SOURCE = Path(__file__).parent / "fake_nvml.c"

_READER = """
import dataclasses, json, sys, time
from monitor.probes.exchange import pack
from monitor.probes.node import NodeProbe
now = [1000.0]
probe = NodeProbe("node-a", lambda: now[0], deadline_seconds=0.5)
for line in sys.stdin:
    if line == "close\\n":
        begun = time.monotonic(); probe.close(); print(json.dumps({"seconds": time.monotonic() - begun}), flush=True)
        continue
    now[0] += float(line)
    begun = time.monotonic()
    told = pack(probe.read(), 0.0)
    print(json.dumps({**told, "seconds": time.monotonic() - begun}), flush=True)
"""


def build(folder: Path, *flags: str) -> Path:
    """The directory of a fresh libnvidia-ml.so.1; skips the test where it cannot be made or used."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing, which builds the fake driver")
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("pynvml (nvidia-ml-py) is not installed")
    folder.mkdir(exist_ok=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Wl,-soname,libnvidia-ml.so.1", *flags, "-o",
                    str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True)
    return folder


class Driver:
    """The fake driver's state, and the probe that reads it."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder, self._process = folder, process

    def set(self, *lines: str) -> None:
        """What the driver says from now on; whole or not at all."""
        new = self._folder / "state.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self._folder / "state")

    def read(self, later: float = 1.0) -> dict[str, Any]:
        """The node's facts, so many seconds later on the probe's clock; ``seconds``: what that took."""
        return self._say(f"{later}\n")

    def close(self) -> float:
        """Close the probe; what that took, in seconds."""
        return float(self._say("close\n")["seconds"])

    @property
    def calls(self) -> int:
        """Calls that reached the driver."""
        path = self._folder / "calls"
        return path.stat().st_size if path.exists() else 0

    @property
    def log(self) -> str:
        """What the probe logged as a warning."""
        return (self._folder / "log").read_text()

    def _say(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def environment(library: Path, folder: Path) -> dict[str, str]:
    """What leads a process to the fake driver, and that to its state."""
    return {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML_STATE": str(folder / "state"),
            "FAKE_NVML_CALLS": str(folder / "calls")}


@contextmanager
def driver(library: Path, folder: Path) -> Iterator[Driver]:
    """A probe on the fake driver."""
    (folder / "state").write_text("")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", _READER], cwd=REPOSITORY, env=environment(library, folder),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield Driver(folder, process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        deadline = time.monotonic() + 5
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
        process.wait()
        process.stdout.close()
