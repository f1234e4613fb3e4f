"""Stalls are judged by the run's own steps, and never by anything that is not a step."""

from __future__ import annotations

import pytest

from monitor.detectors.rollout_stall import RolloutStall
from monitor.model import Observation, Status
from tests.helpers import CASES, LAB, observation, rows

STEP, TESTING = "stage_duration_seconds/step", "stage_duration_seconds/testing"
VALIDATION = "validation_score/x|acc|mean@1|core"


def _silence(detector: RolloutStall, last: float) -> float:
    """Seconds after ``last`` at which the detector first calls a stall."""
    for tenth in range(1_000_000):
        verdict = detector.tick(last + tenth / 10)
        if verdict is not None and verdict.status is Status.CRITICAL:
            return tenth / 10
    raise AssertionError("never")


def _steady(seconds: float, count: int, *, live: bool = True, reported: bool = True) -> tuple[RolloutStall, float]:
    detector, now = RolloutStall(), 0.0
    for step in range(1, count + 1):
        now += seconds
        values = {"policy_loss": 0.1} | ({STEP: seconds} if reported else {})
        detector.update(observation(step, values, now=now, live=live))
    return detector, now


@pytest.mark.parametrize(("seconds", "allowed"), [(2.0, 60.0), (12.0, 60.0), (20.0, 100.0), (60.0, 300.0)])
@pytest.mark.parametrize("reported", [True, False])
def test_five_median_steps_or_a_minute(seconds: float, allowed: float, reported: bool) -> None:
    detector, last = _steady(seconds, 30, reported=reported)
    assert _silence(detector, last) == pytest.approx(allowed, abs=0.11)


def test_the_first_step_may_take_long_and_teaches_nothing() -> None:
    detector = RolloutStall()
    detector.restarted(0.0)
    assert detector.tick(3600.0).status < Status.WARNING  # type: ignore[union-attr]
    detector.update(observation(1, {STEP: 1800.0}, now=3600.0))
    for step in range(2, 20):
        detector.update(observation(step, {STEP: 20.0}, now=3600.0 + 20 * step))
    assert _silence(detector, 3600.0 + 20 * 19) == pytest.approx(100.0, abs=0.11)


def test_never_a_step_is_a_stall_after_two_hours() -> None:
    detector = RolloutStall()
    detector.restarted(100.0)
    verdict = detector.tick(100.0 + 7201)
    assert verdict is not None
    assert verdict.status is Status.CRITICAL
    assert "no step has been completed" in verdict.reason


def test_slow_validation_steps_are_learned() -> None:
    detector, now = RolloutStall(), 0.0
    for step in range(1, 61):
        testing = {TESTING: 300.0, VALIDATION: 0.5} if step % 20 == 0 else {}
        now += 20.0 + testing.get(TESTING, 0.0)
        detector.update(observation(step, {STEP: 20.0} | testing, now=now))
    assert _silence(detector, now) == pytest.approx(1.5 * 320, abs=0.11)


def test_validation_that_is_still_to_come_is_waited_for_where_steps_are_long() -> None:
    def run(first: dict[str, float]) -> float:
        detector, now = RolloutStall(), 0.0
        detector.update(observation(0, first, now=now))
        for step in range(1, 16):
            now += 90.0
            detector.update(observation(step, {STEP: 90.0}, now=now))
        return _silence(detector, now)
    assert run({VALIDATION: 0.5}) == pytest.approx(15 * 90.0, abs=0.11)
    assert run({"policy_loss": 0.5}) == pytest.approx(5 * 90.0, abs=0.11)


def test_case_16_one_step_twelve_times_slower_is_alive() -> None:
    detector, now = RolloutStall(), 0.0
    for step, data in rows(CASES / "16_slow_but_alive.jsonl"):
        seconds = float(data["timing_s/step"])  # type: ignore[arg-type]
        for part in range(100):
            verdict = detector.tick(now + seconds * part / 100)
            assert verdict is None or verdict.status < Status.WARNING, (step, verdict)
        now += seconds
        detector.update(observation(step, {STEP: seconds}, now=now))


@pytest.mark.parametrize("burst", [2, 18, 312])
def test_case_27_a_buffered_log_arrives_in_bursts(burst: int) -> None:
    detector, step = RolloutStall(), 0
    for arrival in range(1, 9):
        now = arrival * burst * 60.0
        for _ in range(burst):
            step += 1
            detector.update(observation(step, {STEP: 60.0}, now=now))
        for waited in range(0, burst * 60, 30):
            verdict = detector.tick(now + waited)
            assert verdict is not None
            assert verdict.status < Status.WARNING
    assert _silence(detector, now) == pytest.approx(max(300.0, 1.5 * burst * 60), abs=0.11)


def test_rows_that_lay_there_before_are_no_burst_and_teach_their_reported_times() -> None:
    detector = RolloutStall()
    for step in range(1, 101):
        detector.update(observation(step, {STEP: 20.0}, now=500.0, live=False))
    assert _silence(detector, 500.0) == pytest.approx(100.0, abs=0.11)


def test_a_resumed_run_gets_its_long_first_step_again() -> None:
    detector, last = _steady(20.0, 30)
    detector.restarted(last + 5)
    assert detector.tick(last + 3600).status < Status.WARNING  # type: ignore[union-attr]
    detector.update(observation(21, {STEP: 400.0}, now=last + 600))
    assert _silence(detector, last + 600) == pytest.approx(100.0, abs=0.11)


def test_the_recorded_hang_is_told_a_minute_after_its_last_step() -> None:
    detector, now = RolloutStall(), 0.0
    from monitor.catalog import parse
    from monitor.model import RawStep

    for step, data in rows(LAB / "gpu-ppo-hang.jsonl"):
        now += float(data.get("timing_s/step", 10.0)) + float(data.get("timing_s/testing", 0.0))  # type: ignore[arg-type]
        detector.update(parse(RawStep("run", step, now, data)))
    silence = _silence(detector, now)
    assert silence == pytest.approx(60.0, abs=0.11)
    verdict = detector.tick(now + silence)
    assert verdict is not None
    assert "after step 46" in verdict.reason


def test_a_clock_that_jumps_back_is_no_negative_silence() -> None:
    detector, last = _steady(20.0, 10)
    verdict = detector.tick(last - 1000)
    assert verdict is not None
    assert verdict.value == 0.0
    assert detector.update(Observation("run", 11, last - 500, {STEP: 20.0})) is not None
    assert _silence(detector, last) == pytest.approx(100.0, abs=0.11)
