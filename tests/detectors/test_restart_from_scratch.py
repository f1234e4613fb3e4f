"""restart_from_scratch: what the console says of the checkpoint, and logs with several rows a step."""

from __future__ import annotations

from monitor.detectors.restart_from_scratch import RestartFromScratch
from tests.detectors.lone import Row, found

RESUMED = "console/resumed_from_step"


def starts(*ranges: range) -> list[Row]:
    return [(step, {"actor/pg_loss": 0.1}) for steps in ranges for step in steps]


def told(step: int, checkpoint: float) -> list[Row]:
    return [(step, {"actor/pg_loss": 0.1, RESUMED: checkpoint})]


def test_a_checkpoint_that_was_loaded_while_the_steps_begin_anew() -> None:
    (incident,) = found(RestartFromScratch, [*starts(range(1, 36)), *told(1, 20.0), *starts(range(2, 20))])
    assert "although the checkpoint of step 20 was loaded" in incident.reason


def test_a_resume_that_the_console_confirms_is_silent() -> None:
    assert found(RestartFromScratch, [*starts(range(1, 36)), *told(21, 20.0), *starts(range(22, 50))]) == []


def test_what_the_console_said_of_an_earlier_start_is_not_said_of_this_one() -> None:
    data = [*starts(range(1, 36)), *told(21, 20.0), *starts(range(22, 50), range(1, 20))]
    (incident,) = found(RestartFromScratch, data)
    assert "without resuming from a checkpoint" in incident.reason


def test_a_run_that_was_itself_resumed_has_its_steps_to_lose() -> None:
    assert len(found(RestartFromScratch, starts(range(500, 506), range(1, 60)))) == 1


def test_crashes_at_the_start_lose_nothing() -> None:
    assert found(RestartFromScratch, starts(range(1, 4), range(1, 3), range(1, 6), range(1, 60))) == []


def test_several_rows_of_a_step_are_one_start() -> None:
    data = [row for row in starts(range(1, 40), range(1, 60)) for _ in range(3)]
    assert len(found(RestartFromScratch, data)) == 1


def test_it_is_told_for_some_steps_only() -> None:
    (incident,) = found(RestartFromScratch, starts(range(1, 200), range(1, 100)))
    assert incident.ended
    assert incident.last_step == 30
