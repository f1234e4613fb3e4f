"""Gentle faults over a healthy run are reported before half of their course; the same run without them is silent."""

from __future__ import annotations

import pytest

from monitor.engine import Engine
from monitor.model import Incident, RawStep
from tests.bench.noise import judge
from tests.detectors.simulate import GENTLE, faulty, healthy

ONSET = 60


def incidents(rows: object) -> tuple[Incident, ...]:
    engine = Engine()
    for step, row in rows:  # type: ignore[attr-defined]  # steps and rows
        engine.handle(RawStep("run", step, 40.0 * step, row))
    return engine.snapshot().runs[0].incidents


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GENTLE)
def test_a_gentle_fault_is_reported_before_half_of_its_course(name: str, seed: int) -> None:
    fault, course, detectors, options = GENTLE[name]
    found = incidents(faulty(seed, ONSET + course, ONSET, course, fault, **options))
    early = [i for i in found if i.raised_step <= ONSET]
    assert early == [], "nothing before the onset"
    reported = [i.raised_step for i in found if i.detector in detectors]
    assert reported, found
    assert min(reported) <= ONSET + course // 2


@pytest.mark.parametrize("options", [
    {}, {"critic": False}, {"learns": False}, {"critic": False, "learns": False}, {"length": 3000.0}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_same_run_without_a_fault_is_silent(options: dict[str, object], seed: int) -> None:
    rows = enumerate(healthy(seed, 500, **options), 1)  # type: ignore[arg-type]  # passed through
    assert incidents(rows) == ()


@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_steps_of_noise_are_silent(seed: int) -> None:
    """`make noise` does the same for 200 seeds."""
    assert judge(seed) == []
