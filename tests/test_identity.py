"""One run seen through several logs and sources: told once, restarted once, judged once."""

from __future__ import annotations

from itertools import permutations

import pytest

from monitor.engine import Engine
from monitor.model import Log, RawStep, RunConfig, RunEnded, RunStarted, RunState
from monitor.run import HANDOVER_SECONDS, RunView
from tests.test_engine import BAD, GOOD, _run

FILE, BOARD, WANDB = (("file", "x.jsonl"), ("board", "a.tfevents"), ("wandb", "a.wandb"))


def _both(first: list[int], second: list[int]) -> list[tuple[str, int]]:
    """Steps of two sources, the second one behind."""
    out: list[tuple[str, int]] = []
    for index in range(max(len(first), len(second))):
        out += [("push", step) for step in first[index:index + 1]]
        out += [("file", step) for step in second[index:index + 1]]
    return out


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_run_seen_through_two_sources_is_one_run(behind: int) -> None:
    steps = list(range(1, 31))
    engine = Engine()
    for now, (source, step) in enumerate(_both(steps, [1] * behind + steps)):
        if now == 15:
            engine.handle(RunStarted("run", 15.0, "project"), "file")
            assert _run(engine).state is RunState.RUNNING
        values = BAD if step == 20 else GOOD
        engine.handle(RawStep("run", step, float(now), values), source)
    engine.handle(RunEnded("run", 90.0, RunState.FINISHED, "the trainer finished"), "push")
    engine.handle(RawStep("run", 30, 91.0, GOOD), "file")
    view = _run(engine)
    assert (view.steps, view.restarts, view.last_step, view.state) == (30, 0, 30, RunState.FINISHED)
    assert [(i.detector, i.raised_step) for i in view.incidents] == [("non_finite", 20)]


def test_a_source_that_falls_silent_is_replaced_by_the_other() -> None:
    engine = Engine()
    for step in range(1, 6):
        engine.handle(RawStep("run", step, float(step), GOOD), "push")
    for step in range(1, 11):
        engine.handle(RawStep("run", step, 10.0 + step, GOOD), "file")
    assert (_run(engine).steps, _run(engine).last_step, _run(engine).restarts) == (10, 10, 0)


def test_a_restart_that_two_sources_tell_is_one() -> None:
    engine = Engine()
    for step in (1, 2, 3):
        engine.handle(RawStep("run", step, float(step), GOOD), "push")
        engine.handle(RawStep("run", step, float(step), GOOD), "file")
    for source in ("push", "file"):
        engine.handle(RunStarted("run", 5.0, restarted=True), source)
    for step in (2, 3, 4):
        engine.handle(RawStep("run", step, 5.0 + step, GOOD), "push")
        engine.handle(RawStep("run", step, 5.0 + step, GOOD), "file")
    assert (_run(engine).restarts, _run(engine).last_step) == (1, 4)


def row(engine: Engine, step: int, now: float, log: Log, **more: float) -> None:
    engine.handle(RawStep("run", step, now, {**GOOD, **more}, log=log), "logs")


def start(engine: Engine, now: float, log: Log, *, restarted: bool) -> None:
    engine.handle(RunStarted("run", now, restarted=restarted, log=log), "logs")


def told_by(engine: Engine, *logs: Log) -> RunView:
    """Twenty steps told by each log."""
    for log in logs:
        start(engine, 0.0, log, restarted=False)
    for step in range(1, 21):
        for log in logs:
            row(engine, step, float(step), log)
    return _run(engine)


@pytest.mark.parametrize("order", [*permutations((FILE, BOARD, WANDB))])
def test_each_start_is_counted_once_however_many_logs_tell_it(order: tuple[Log, ...]) -> None:
    engine = Engine()
    assert told_by(engine, FILE, BOARD, WANDB).restarts == 0
    for incarnation in (1, 2, 3):
        now = 100.0 * incarnation
        for behind, log in enumerate(order):  # each start of a run writes a new file of the chained formats
            log = log if log is FILE else (log[0], f"{incarnation}{log[1]}")
            start(engine, now + 10 * behind, log, restarted=True)
            for step in range(15, 25 + behind):
                row(engine, step, now + 10 * behind + step / 100, log)
        assert (_run(engine).restarts, _run(engine).last_step) == (incarnation, 26)
    assert _run(engine).incidents == ()


def test_a_late_row_of_the_incarnation_before_is_not_taken_for_the_present() -> None:
    engine = Engine()
    told_by(engine, FILE, BOARD)
    start(engine, 30.0, FILE, restarted=True)
    row(engine, 21, 31.0, BOARD)  # buffered by the trainer that is gone
    for step in (1, 2, 3):
        row(engine, step, 31.0 + step, FILE)
    assert (_run(engine).last_step, _run(engine).restarts) == (3, 1)
    # Nothing comes of the log that told the start: the other one is believed after a while.
    row(engine, 4, 40.0 + HANDOVER_SECONDS, BOARD)
    assert _run(engine).last_step == 4


def test_what_only_one_log_holds_is_taken_from_it() -> None:
    engine = Engine()
    for step in range(1, 6):
        row(engine, step, float(step), FILE)
        row(engine, step - 1, step + 0.5, BOARD, **{"response_length/mean": 100.0 + step})
    view = _run(engine)
    assert (view.steps, view.last_step, view.values["response_length_tokens/mean"]) == (5, 5, 105.0)
    assert engine.snapshot().repeated_rows == 0


def test_a_fault_told_by_two_logs_is_one_finding() -> None:
    engine = Engine()
    told_by(engine, FILE, WANDB)
    for log in (FILE, WANDB, BOARD):
        engine.handle(RawStep("run", 21, 30.0, BAD, log=log), "logs")
    assert [incident.detector for incident in _run(engine).incidents] == ["non_finite"]
    assert sum(sum(item.findings.values()) for item in _run(engine).detectors) == 1


@pytest.mark.parametrize(("estimator", "expected"), [
    ("gae", "ppo"), ("grpo", "grpo"), ("AdvantageEstimator.GAE", "ppo"), (None, "critic-free"), (3, "critic-free")])
def test_the_algorithm_is_the_configurations_where_it_is_known(estimator: object, expected: str) -> None:
    engine = Engine()
    engine.handle(RunConfig("run", 0.0, {"algorithm": {"adv_estimator": estimator}}), "push")
    for step in range(1, 7):
        engine.handle(RawStep("run", step, float(step), GOOD), "push")
    assert _run(engine).algorithm == expected


def test_what_is_remembered_of_keys_is_bounded() -> None:
    engine = Engine()
    for step in range(200):
        engine.handle(RawStep("run", step, float(step), {f"own/{step}_{key}": 1.0 for key in range(50)}), "push")
    assert len(engine._runs["run"]._owner) < 1_000


def test_another_log_of_a_run_that_is_over_does_not_bring_it_back() -> None:
    engine = Engine()
    told_by(engine, FILE)
    engine.handle(RunEnded("run", 30.0, RunState.FINISHED, "its writer closed the log"), "logs")
    start(engine, 40.0, WANDB, restarted=False)
    for step in range(1, 21):
        row(engine, step, 40.0, WANDB)
    assert _run(engine).state is RunState.FINISHED
    row(engine, 21, 50.0, WANDB)
    assert _run(engine).state is RunState.RUNNING, "a new step does"
