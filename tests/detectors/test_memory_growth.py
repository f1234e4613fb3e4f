"""memory_growth: leaks of all kinds in time, with and without a limit; caches, sawteeth and restarts are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from monitor.detectors.memory_growth import MemoryGrowth, MemoryGrowthSettings
from monitor.engine import Engine
from monitor.facts import Facts, Gpu, NodeFacts
from monitor.model import Incident, Status, Verdict
from tests.detectors.lone import Row, found
from tests.helpers import CASES, feed, observation, rows


def host(gib: Callable[[int], float], steps: int = 300, *, seed: int = 0, noise: float = 1.0) -> list[Row]:
    random = Random(seed)
    return [(s, {"perf/cpu_memory_used_gb": gib(s) + random.gauss(0, noise)}) for s in range(1, steps + 1)]


def limited(data: list[Row], gib: float) -> list[Incident]:
    settings = MemoryGrowthSettings(host_limit_gib=gib)
    engine = Engine(make_detectors=lambda _: [MemoryGrowth(settings)])
    feed(engine, data)
    return list(engine.snapshot().runs[0].incidents)


def test_case_19_is_told_by_row_40() -> None:
    (incident,) = found(MemoryGrowth, rows(CASES / "19_ram_creep.jsonl"))
    assert incident.raised_step <= 40


@pytest.mark.parametrize(("gib", "by"), [
    (lambda s: 300 + 2.0 * max(0, s - 50), 120), (lambda s: 100 + 0.5 * s, 100),
    (lambda s: 250 + 100 * (1 - math.exp(-s / 15)) + 2 * s, 160), (lambda s: 300 + 60 * (s % 20 > 15) + 2 * s, 90),
])
@pytest.mark.parametrize("seed", range(3))
def test_leaks(gib: Callable[[int], float], by: int, seed: int) -> None:
    told = found(MemoryGrowth, host(gib, seed=seed))
    assert told[0].raised_step <= by
    assert "without levelling off; at this pace it has doubled near step" in told[0].reason


def test_a_limit_that_is_near_is_told_after_little_growth() -> None:
    told = limited(host(lambda s: 300 + 0.5 * s, 160), 400.0)
    assert 40 <= told[0].raised_step <= 110
    assert "the 400 GiB of the node are full near step" in told[0].reason
    assert limited(host(lambda s: 300 + 0.5 * s, 100), 4000.0) == []


@pytest.mark.parametrize("limit", [0.0, 500.0])
@pytest.mark.parametrize("gib", [
    lambda s: 200 + 100 * (1 - math.exp(-s / 20)), lambda s: 200 + 150 * (1 - math.exp(-s / 60)),
    lambda s: 300 + 40 * (s % 20 > 15), lambda s: 300.0, lambda s: 300 + 60.0 * (s > 150),
    lambda s: 100 + 5.0 * (s % 20), lambda s: 100 + 30 * math.log(s),
], ids=["caches", "slow caches", "checkpoints", "flat", "a step", "a sawtooth", "ever slower"])
def test_memory_that_is_well(gib: Callable[[int], float], limit: float) -> None:
    assert limited(host(gib, 600), limit) == []


def test_each_start_fills_its_own_caches() -> None:
    data: list[Row] = [(s, {"perf/cpu_memory_used_gb": 300 + 80 * (1 - math.exp(-i / 15))})
                       for begin in range(1, 400, 20) for i, s in enumerate(range(begin, begin + 30))]
    assert found(MemoryGrowth, data) == []
    leak: list[Row] = [(s, {"perf/cpu_memory_used_gb": 200.0 + 4 * i})
                       for begin in (1, 60) for i, s in enumerate(range(begin, begin + 70))]
    first, second = found(MemoryGrowth, leak)
    assert first.ended
    assert second.first_step >= 60


@pytest.mark.parametrize("kind", ["reserved", "allocated"])
def test_a_gpu_peak_must_outgrow_the_answers(kind: str) -> None:
    key = f"actor/perf/max_memory_{kind}_gb"
    same: list[Row] = [(s, {key: 25 + 0.13 * s, "response_length/max": 1024.0}) for s in range(1, 300)]
    assert len(found(MemoryGrowth, same)) == 1
    longer: list[Row] = [(s, {key: 25 + 0.13 * s, "response_length/max": 1000.0 + 17 * s}) for s in range(1, 300)]
    assert found(MemoryGrowth, longer) == []
    random, record = Random(2), 0.0
    highs: list[Row] = []
    for step in range(1, 2000):
        record = max(record, random.gauss(40, 6))
        highs.append((step, {key: record}))
    assert found(MemoryGrowth, highs) == []


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_what_is_small_is_no_leak_and_what_is_large_is(scale: float) -> None:
    assert len(found(MemoryGrowth, host(lambda s: scale * (300 + 5 * s), 116, noise=0.0))) == int(scale > 1)


def _gpu_facts(used_gib: float, runs: int = 1) -> Facts:
    gpu = Gpu(index=3, uuid="GPU-3", memory_used=int(used_gib * 2**30), memory_total=80 * 2**30)
    return Facts(time_seconds=0.0, nodes=(NodeFacts(node="n", time_seconds=0.0, gpus=(gpu,)),), active_runs=runs)


def _gpu_run(level: Callable[[int], float], *, runs: int = 1) -> list[Verdict]:
    """Verdicts over 80 steps, with three looks at the GPU in each, of which two are peaks."""
    detector, out = MemoryGrowth(), []
    for step in range(80):
        for peak in (12.0, 0.0, 9.0):
            detector.probed(_gpu_facts(level(step) + peak, runs))
        verdict = detector.update(observation(step, {"stage_duration_seconds/step": 60.0}))
        if verdict is not None:
            out.append(verdict)
    return out


def test_memory_of_a_gpu_that_grows_is_told_with_the_time_when_it_is_full() -> None:
    last = _gpu_run(lambda step: 20 + 0.4 * step)[-1]
    assert last.status is Status.WARNING
    assert last.signal == "gpu_memory_used_bytes/n|3|GPU-3"
    assert "Memory in use on GPU 3 of n has grown from" in last.reason
    assert "the 80 GiB of the GPU are full near step" in last.reason
    assert " h" in last.reason


def test_memory_of_a_gpu_that_is_full_and_level_says_nothing() -> None:
    assert {verdict.status for verdict in _gpu_run(lambda step: 67.0)} == {Status.OK}
    assert {verdict.status for verdict in _gpu_run(lambda step: 67.0 - 30.0 / (1 + step))} == {Status.OK}


def test_a_gpu_that_runs_share_is_nobodys() -> None:
    assert _gpu_run(lambda step: 20 + 0.4 * step, runs=2) == []
