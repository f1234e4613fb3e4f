"""`make bench`: cost per step, per scrape, per attached log() and of each source. Compare ratios, not times."""

from __future__ import annotations

import pickle
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from monitor.catalog import parse
from monitor.detectors import DETECTORS
from monitor.engine import Engine, EngineSettings, Snapshot
from monitor.exporter import MonitorView, Renderer
from monitor.model import RawStep
from tests.bench.peers import compare
from tests.bench.sources import attached, sources
from tests.helpers import LAB, rows

DATA = [data for _, data in rows(LAB / "ppo-healthy.jsonl")][1:]
MONITOR = MonitorView(heartbeat_seconds=0.0)


def step_of(number: int) -> RawStep:
    """A row of 120 keys; the recording is repeated for as long as the run lasts."""
    return RawStep("run", number, float(number), DATA[number % len(DATA)])


def best(call: Callable[[], object], repeat: int = 5) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def per_step() -> None:
    """Microseconds per step through parse and all detectors, early and late in a run. The runs are stepped in turn, so
    that a machine whose speed changes does not favour one of them."""
    runs = {length: Engine() for length in (100, 1_000, 10_000)}
    for length, engine in runs.items():
        for number in range(length):
            engine.handle(step_of(number))
    times: dict[int, list[float]] = {length: [] for length in runs}
    for number in range(400):
        for length, engine in runs.items():
            row = step_of(length + number)
            start = time.perf_counter()
            engine.handle(row)
            times[length].append(time.perf_counter() - start)
    cost = {length: 1e6 * statistics.median(spent) for length, spent in times.items()}
    for length, microseconds in cost.items():
        print(f"a step after {length:6,}: {microseconds:7.1f} us through parse, engine and {len(DETECTORS)} detectors "
              f"(ratio to 100: {microseconds / cost[100]:.2f})")
    parsing = 1e6 * best(lambda: [parse(step_of(n)) for n in range(200)]) / 200
    print(f"                    {parsing:7.1f} us of it parse ({len(DATA[0])} keys)")
    for name, (_, seconds) in sorted(runs[10_000].snapshot().costs.items()):
        print(f"                    {1e6 * seconds / 10_400:7.1f} us {name}")


def _page(snapshot: Snapshot) -> bytes:
    return Renderer().page(snapshot, MONITOR, "")[0]


def scrape() -> None:
    """Milliseconds and bytes of a scrape for 10, 100 and 1,000 runs; anew, and when nothing has changed."""
    first = 0.0
    for count in (10, 100, 1_000):
        engine = Engine(EngineSettings(max_runs=count))
        for number in range(count):
            for row in range(8):
                engine.handle(RawStep(f"run{number:04}", row, float(row), DATA[row]))
        renderer, snapshot = Renderer(), engine.snapshot()
        anew = best(partial(_page, snapshot), 3)
        size = len(renderer.page(snapshot, MONITOR, "")[0])
        kept = best(partial(renderer.page, snapshot, MONITOR, ""), 5)
        first = first or anew / count
        print(f"scrape, {count:5,} runs: {1e3 * anew:8.1f} ms anew (per run, ratio to 10 runs: "
              f"{anew / count / first:.2f}), {1e3 * kept:6.2f} ms unchanged, {size / 1e6:.2f} MB")


def memory() -> None:
    """Bytes of one run's state after 1,000 and 10,000 steps, and with every cap reached."""
    for length in (1_000, 10_000):
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        engine = Engine()
        for number in range(length):
            engine.handle(step_of(number))
        engine.snapshot()
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        pickled = sum(len(pickle.dumps(w.detector)) for w in engine._runs["run"].watches.items)
        print(f"memory of a run after {length:6,} steps: {held / 1e3:6.0f} kB with its snapshot "
              f"({pickled / 1e3:.0f} kB of detectors, pickled)")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    engine = Engine()
    for number in range(600):
        # A hostile run: ever new keys, and a finding every few steps.
        odd: dict[str, object] = {f"timing_s/stage{number}_{i}": 1.0 for i in range(40)}
        odd |= {f"own/{number}_{i}": 1.0 for i in range(40)}
        engine.handle(RawStep("run", number, float(number), DATA[number % 100] | odd |
                              ({"actor/pg_loss": None} if number % 8 < 2 else {})))
    engine.snapshot()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    view = engine.snapshot().runs[0]
    print(f"memory of a run at every cap ({len(view.values)} series, {len(view.unknown)} own keys, "
          f"{len(view.incidents)} incidents kept): {held / 1e3:6.0f} kB")


if __name__ == "__main__":
    print(f"Python {sys.version.split()[0]}")
    per_step()
    scrape()
    memory()
    compare()
    attached()
    sources()
