"""The cost of all detectors for a step, beside one evaluation of rldoctor 0.2 in its live mode on the same rows.

rldoctor is installed from PyPI into a virtual environment of its own, for this measurement only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from monitor.catalog import parse
from monitor.detectors import DETECTORS
from monitor.model import RawStep
from tests.helpers import LAB, rows

LENGTHS = (100, 700)
THEIRS = """
import json, sys, time
from rl_doctor.live import LiveMonitor
data = json.load(open(sys.argv[1]))
out = {}
for length in (100, 700):
    monitor = LiveMonitor(check_every=10**9, on_finding=lambda finding: None)
    for step in range(length):
        monitor.log(data[step % len(data)], step)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        monitor.check()
        times.append(time.perf_counter() - start)
    out[length] = sorted(times)[2]
print(json.dumps(out))
"""


def ours() -> dict[int, float]:
    """Seconds that all detectors together take for a step, after so many."""
    data = [values for _, values in rows(LAB / "ppo-healthy.jsonl")][1:]
    out: dict[int, float] = {}
    for length in LENGTHS:
        detectors = [detector() for detector in DETECTORS]
        spent = []
        for step in range(length + 300):
            observation = parse(RawStep("run", step, float(step), data[step % len(data)]))
            start = time.perf_counter()
            for detector in detectors:
                detector.update(observation)
            spent.append(time.perf_counter() - start)
        out[length] = sorted(spent[length:])[150]
    return out


def theirs() -> dict[int, float]:
    """Seconds of one evaluation of rldoctor after so many steps; nothing where it cannot be installed."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        venv.create(python.parent.parent, with_pip=True)
        installed = subprocess.run([python, "-m", "pip", "install", "-q", "rldoctor==0.2.0"], capture_output=True,
                                   text=True, check=False)
        if installed.returncode:
            print(f"rldoctor cannot be installed here: {installed.stderr.strip()[-200:]}")
            return {}
        data, script = Path(folder, "rows.json"), Path(folder, "theirs.py")
        data.write_text(json.dumps([values for _, values in rows(LAB / "ppo-healthy.jsonl")][1:]))
        script.write_text(THEIRS)
        done = subprocess.run([python, script, data], capture_output=True, text=True, check=True)
        return {int(length): seconds for length, seconds in json.loads(done.stdout).items()}


def compare() -> None:
    """Print both and their ratio."""
    here, there = ours(), theirs()
    for length in LENGTHS:
        line = f"all {len(DETECTORS)} detectors, a step after {length:3}: {1e6 * here[length]:7.1f} us"
        if length in there:
            line += (f"; one evaluation of rldoctor 0.2: {1e6 * there[length]:9.0f} us "
                     f"({there[length] / here[length]:,.0f} times)")
        print(line)


if __name__ == "__main__":
    print(f"Python {sys.version.split()[0]}")
    compare()
