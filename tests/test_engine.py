"""Runs: life cycle, incarnations, suppression, isolation, caps."""

from __future__ import annotations

import pytest

from monitor.detectors import DETECTORS, Detector
from monitor.detectors.non_finite import NonFiniteDetector
from monitor.engine import Engine, EngineSettings
from monitor.model import (
    NAN,
    Observation,
    RawStep,
    RunEnded,
    RunStarted,
    RunState,
    Severity,
    SourceEvent,
    Verdict,
)
from monitor.run import RunView
from monitor.watches import BROKEN_AFTER_ERRORS, DetectorView
from tests.helpers import CASES, feed, rows

GOOD: dict[str, object] = {"actor/pg_loss": 0.1, "actor/grad_norm": 1.0, "actor/ppo_kl": 0.001,
                              "critic/score/mean": 0.5, "timing_s/step": 10.0}
BAD = GOOD | {"actor/pg_loss": None}


def _run(engine: Engine, name: str = "run") -> RunView:
    view = engine.snapshot().find(name)
    assert view is not None
    return view


def _detector(view: RunView, name: str) -> DetectorView:
    return next(d for d in view.detectors if d.spec.id == name)


def test_life_of_a_run() -> None:
    engine = Engine(EngineSettings(retain_ended_seconds=100))
    engine.handle(RunStarted("run", 0.0, "project"))
    assert _run(engine).state is RunState.STARTING
    engine.handle(RawStep("run", 0, 1.0, {"val-core/x/acc/mean@1": 0.1}))
    assert _run(engine).state is RunState.STARTING, "validation before training is no step"
    assert _run(engine).steps == 0
    feed(engine, [(s, GOOD) for s in range(1, 6)], start=2.0)
    assert _run(engine).state is RunState.RUNNING
    assert (_run(engine).steps, _run(engine).last_step) == (5, 5)
    engine.handle(RunEnded("run", 10.0, RunState.FINISHED, "done"))
    assert _run(engine).state is RunState.FINISHED
    engine.tick(109.0)
    assert _run(engine).state is RunState.FINISHED, "an ended run does not stall"
    engine.tick(111.0)
    assert engine.snapshot().find("run") is None


def test_a_stall_is_a_state_and_ends_with_the_next_step() -> None:
    engine = Engine()
    last = feed(engine, [(s, GOOD) for s in range(30)], seconds=10.0)
    engine.tick(last + 59)
    assert _run(engine).state is RunState.RUNNING
    engine.tick(last + 61)
    view = _run(engine)
    assert view.state is RunState.STALLED
    assert view.severity is Severity.CRITICAL
    assert "No step for 61 s after step 29" in view.incidents[-1].reason
    feed(engine, [(30, GOOD)], start=last + 70)
    assert _run(engine).state is RunState.RUNNING
    assert _run(engine).severity is None
    assert _run(engine).incidents[-1].ended == "it cleared"


def test_a_finished_run_is_no_stall() -> None:
    engine = Engine()
    last = feed(engine, [(s, GOOD) for s in range(30)], seconds=10.0)
    engine.tick(last + 61)
    engine.handle(RunEnded("run", last + 62, RunState.FINISHED, "its writer closed the log"))
    view = _run(engine)
    assert view.severity is None
    assert view.incidents[-1].ended == "the run ended"


def test_a_hard_fault_rises_at_once_and_its_consequences_are_held_back() -> None:
    engine = Engine()
    feed(engine, [(s, GOOD) for s in range(20)])
    feed(engine, [(s, BAD | {"actor/ppo_kl": 3.0}) for s in range(20, 40)], start=20.0)
    view = _run(engine)
    assert [i.detector for i in view.incidents] == ["non_finite"]
    assert view.incidents[0].raised_step == 20
    kl = _detector(view, "kl_runaway")
    assert (kl.severity, kl.suppressed_by) == (Severity.CRITICAL, "non_finite")
    # The cause goes, the consequence stays: now it is a finding of its own.
    feed(engine, [(s, GOOD | {"actor/ppo_kl": 3.0}) for s in range(40, 44)], start=40.0)
    assert [i.detector for i in _run(engine).incidents] == ["non_finite", "kl_runaway"]


def test_what_was_raised_before_its_cause_stays() -> None:
    engine = Engine()
    feed(engine, [(s, GOOD) for s in range(20)])
    feed(engine, [(s, GOOD | {"actor/ppo_kl": 3.0}) for s in range(20, 30)], start=20.0)
    feed(engine, [(s, BAD) for s in range(30, 33)], start=30.0)
    kl = _detector(_run(engine), "kl_runaway")
    assert kl.severity is Severity.CRITICAL
    assert not kl.suppressed_by


@pytest.mark.parametrize("restart", [[], [RunStarted("run", 40.0, restarted=True)]])
def test_incarnations(restart: list[SourceEvent]) -> None:
    """Steps that go back and a log begun anew are one restart each, and no finding."""
    engine = Engine()
    data = rows(CASES / "21_resume_ok_replay.jsonl")
    feed(engine, data[:35])
    for event in restart:
        engine.handle(event)
    feed(engine, data[35:], start=40.0)
    view = _run(engine)
    assert view.restarts == 1
    assert view.last_step == 40
    assert view.steps == 55
    assert view.incidents == ()


def test_several_rows_of_one_step_are_one_step() -> None:
    engine = Engine()
    feed(engine, [(1, GOOD), (1, {"actor/entropy": 0.3, "actor/pg_loss": 0.1}), (2, GOOD)])
    assert (_run(engine).steps, _run(engine).restarts) == (2, 0)
    assert _run(engine).values["entropy_nats"] == 0.3


def test_a_late_validation_row_is_no_restart() -> None:
    engine = Engine()
    feed(engine, [(5, GOOD), (6, GOOD), (5, {"val-core/x/acc/mean@1": 0.5}), (7, GOOD)])
    assert _run(engine).restarts == 0


def test_blind_detectors_name_what_is_missing() -> None:
    engine = Engine()
    feed(engine, [(s, GOOD) for s in range(1, 5)])
    assert _detector(_run(engine), "critic_loss_oscillation").missing == ()
    feed(engine, [(5, GOOD)], start=5.0)
    assert _detector(_run(engine), "critic_loss_oscillation").missing == ("critic/vf_loss",)
    assert "critic/advantages/max" in _detector(_run(engine), "advantage_explosion").missing
    assert _detector(_run(engine), "kl_runaway").missing == ()
    feed(engine, [(6, GOOD | {"critic/vf_loss": 1.0})], start=6.0)
    assert _detector(_run(engine), "critic_loss_oscillation").missing == ()
    feed(engine, [(s, GOOD) for s in range(7, 60)], start=7.0)
    assert _detector(_run(engine), "critic_loss_oscillation").missing == ("critic/vf_loss",), "it is logged no more"


class _Broken(Detector):
    spec = NonFiniteDetector.spec

    def update(self, observation: Observation) -> Verdict | None:
        raise ZeroDivisionError(observation.step)


def test_a_detector_that_raises_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    others = [d for d in DETECTORS if d.spec.id != "non_finite"]
    engine = Engine(make_detectors=lambda _: [_Broken(), *(d() for d in others)])
    feed(engine, [(s, GOOD) for s in range(BROKEN_AFTER_ERRORS + 10)])
    snapshot = engine.snapshot()
    assert snapshot.costs["non_finite"][0] == BROKEN_AFTER_ERRORS
    assert _detector(_run(engine), "non_finite").broken
    assert _detector(_run(engine), "non_finite").missing
    assert _detector(_run(engine), "kl_runaway").verdict.signal
    assert len(caplog.records) == 2, "told once when it begins and once when it is taken out"


def test_runs_are_capped_and_the_oldest_ended_one_makes_room() -> None:
    engine = Engine(EngineSettings(max_runs=3))
    for index in range(4):
        feed(engine, [(1, GOOD)], run=f"run{index}", start=float(index))
    assert [v.run for v in engine.snapshot().runs] == ["run0", "run1", "run2"]
    assert engine.snapshot().dropped_runs == 1
    engine.handle(RunEnded("run1", 5.0, RunState.FINISHED, "done"))
    feed(engine, [(1, GOOD)], run="run9", start=6.0)
    assert [v.run for v in engine.snapshot().runs] == ["run0", "run2", "run9"]


def test_series_are_capped_and_counted() -> None:
    engine = Engine(EngineSettings(max_series=10, max_unknown_keys=5))
    feed(engine, [(1, {f"timing_s/stage{i}": 1.0 for i in range(20)} | {f"mine{i}": 1.0 for i in range(20)})])
    view = _run(engine)
    assert (len(view.values), len(view.unknown)) == (10, 5)
    assert engine.snapshot().dropped_series == 25


def test_a_snapshot_is_of_its_moment() -> None:
    engine = Engine()
    feed(engine, [(1, GOOD)])
    before = engine.snapshot()
    feed(engine, [(2, BAD)], start=2.0)
    assert before.runs[0].last_step == 1
    assert before.runs[0].values["policy_loss"] == 0.1
    assert engine.snapshot().version > before.version
    assert engine.snapshot().runs[0] is engine.snapshot().runs[0], "and not copied again without need"


def test_nonfinite_values_are_counted_per_metric() -> None:
    engine = Engine()
    feed(engine, [(1, {"training/rollout_actor_probs_pearson_corr": NAN} | GOOD)] * 2)
    assert _run(engine).nonfinite == {"rollout_probability_correlation": 2}
    assert _run(engine).severity is None
