"""Checkpoints as a detector judges them, and a start that should have been a resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from monitor.detectors.checkpoint_incomplete import CheckpointIncomplete
from monitor.detectors.restart_from_scratch import RestartFromScratch
from monitor.facts import Checkpoint, CheckpointFacts, Facts, Sibling
from monitor.model import Status, Verdict
from tests.helpers import observation

NOW = 100_000.0


def facts(*checkpoints: Checkpoint, **values: Any) -> Facts:
    """Facts of one run's directory."""
    tracked = max((c.step for c in checkpoints), default=None)
    known = {"tracker_step": tracked, "free_bytes": 10**12, **values}
    seen = CheckpointFacts(directory="/work/checkpoints/math/exp-2", time_seconds=NOW, checkpoints=checkpoints, **known)
    return Facts(time_seconds=NOW, checkpoints={"run": seen}, run="run")


def good(step: int, **values: Any) -> Checkpoint:
    return Checkpoint(step=step, path="", **{"modified_seconds": NOW - 5000, "bytes": 10**9, **values})


def judged(seen: Facts, *, step: int = 10, save_freq: int = 5) -> Verdict:
    """What is said of these facts at a step."""
    detector = CheckpointIncomplete()
    detector.configured({"trainer.save_freq": save_freq})
    for number in (1, step):
        detector.update(observation(number, {"policy_loss": 0.1}))
    verdict = detector.probed(seen)
    assert verdict is not None
    return verdict


def test_complete_checkpoints_are_silent() -> None:
    verdict = judged(facts(good(5), good(10)))
    assert (verdict.status, verdict.value) == (Status.OK, 10.0)


def test_nothing_saved_yet_is_silent() -> None:
    assert judged(facts()).status is Status.OK


def test_the_critic_missing_is_told_at_the_first_save() -> None:
    verdict = judged(facts(good(5, missing=("critic/ is missing: verl cannot load the critic",), modified_seconds=NOW)))
    assert verdict.status is Status.WARNING
    assert verdict.reason == ("global_step_5: critic/ is missing: verl cannot load the critic. "
                              "There is no complete one.")


def test_one_that_is_being_written_says_nothing_and_one_that_was_left_does() -> None:
    half = good(10, missing=("data.pt is missing",), modified_seconds=NOW - 30)
    assert judged(facts(good(5), half, tracker_step=5)).status is Status.OK
    left = replace(half, modified_seconds=NOW - 700)
    assert "global_step_10: data.pt is missing. The last complete one is that of step 5" in judged(
        facts(good(5), left, tracker_step=5)).reason


def test_while_the_next_is_saved_nothing_is_said_of_the_one_that_the_tracker_names() -> None:
    """What verl 0.9.1 shows with max_actor_ckpt_to_keep 1: the actor of step 5 goes before step 10 is whole."""
    thinned = good(5, missing=("actor/ is missing: verl cannot load the actor",))
    half = good(10, missing=("data.pt is missing",), modified_seconds=NOW - 30)
    detector = CheckpointIncomplete()
    detector.update(observation(10, {"policy_loss": 0.1}))
    assert detector.probed(facts(thinned, half, tracker_step=5)) is None  # nor is it called well
    left = replace(half, modified_seconds=NOW - 700)  # the save has failed, and there is nothing to resume from
    reason = judged(facts(thinned, left, tracker_step=5)).reason
    assert "global_step_5: actor/ is missing" in reason
    assert reason.endswith("There is no complete one.")


def test_the_rest_of_a_start_before_is_not_this_runs() -> None:
    """It failed while it saved step 20 and went on from 5; step 20 will be written anew."""
    left = good(20, missing=("data.pt is missing",), modified_seconds=NOW - 7000)
    assert judged(facts(good(5), left, tracker_step=5), step=9).status is Status.OK
    assert "global_step_20: data.pt is missing" in judged(facts(good(5), left, tracker_step=5), step=20).reason


def test_checkpoints_beyond_the_run_do_not_hide_that_a_save_is_overdue() -> None:
    assert "no complete checkpoint for 13 steps" in judged(facts(good(10), good(100), tracker_step=10), step=23).reason


@pytest.mark.parametrize(("actor", "critic", "enough"), [
    (2, 2, True), (2, "none", True), (3, 3, False), (3, 2, False), (2, None, False), (2, 1, False), (1, "none", False),
    (None, None, False), ("two", 2, False)])
def test_the_room_of_one_that_verl_removes_first_counts(actor: Any, critic: Any, enough: bool) -> None:
    detector = CheckpointIncomplete()
    detector.configured({"trainer.save_freq": 5, "trainer.max_actor_ckpt_to_keep": actor,
                         "trainer.max_critic_ckpt_to_keep": critic})
    for step in range(1, 11):
        detector.update(observation(step, {"policy_loss": 0.1}))
    has = critic != "none"  # a run without a critic keeps all of none
    verdict = detector.probed(facts(good(5, critic=has), good(10, critic=has), free_bytes=5 * 10**8))
    assert verdict is not None
    assert (verdict.status is Status.OK) == enough


def test_verl_does_not_remove_what_the_start_before_has_saved() -> None:
    detector = CheckpointIncomplete()
    detector.configured({"trainer.save_freq": 5, "trainer.max_actor_ckpt_to_keep": 2})
    for step in range(6, 11):  # resumed from 5
        detector.update(observation(step, {"policy_loss": 0.1}))
    verdict = detector.probed(facts(good(5), good(10), free_bytes=5 * 10**8))
    assert verdict is not None
    assert "are free and the next checkpoint needs" in verdict.reason


def test_older_ones_may_be_thinned_out() -> None:
    assert judged(facts(good(5, missing=("actor/ is missing",)), good(10))).status is Status.OK


def test_the_tracker_the_disk_and_a_save_that_is_overdue() -> None:
    assert "is missing: the next start" in judged(
        facts(good(10), tracker_step=None, tracker_problem="t is missing: the next start begins from scratch")).reason
    assert "0.931 GiB are free and the next checkpoint needs" in judged(facts(good(10), free_bytes=10**9)).reason
    assert judged(facts(good(10)), step=22).status is Status.OK
    overdue = "no complete checkpoint for 13 steps, while trainer.save_freq is 5"
    assert overdue in judged(facts(good(10)), step=23).reason
    assert overdue in judged(facts(), step=13).reason
    assert judged(facts(good(10)), step=999, save_freq=-1).status is Status.OK


def test_a_look_that_is_older_than_the_last_steps_is_judged_by_the_steps_of_its_time() -> None:
    detector = CheckpointIncomplete()
    detector.configured({"trainer.save_freq": 2})
    for step in range(1, 20):
        detector.update(observation(step, {"policy_loss": 0.1}, now=NOW - 8 + step))
    verdict = detector.probed(facts(good(6)))  # then the run was at step 8
    assert verdict is not None
    assert verdict.status is Status.OK


def test_a_file_system_that_does_not_answer_says_nothing() -> None:
    assert CheckpointIncomplete().probed(facts(problem="Stale file handle")) is None


def restart(seen: Facts, *steps: int, total: int | None = 100, mode: str = "auto") -> list[Verdict | None]:
    """What is said of a new run at each of its steps, with these facts after each."""
    detector = RestartFromScratch()
    detector.configured({"trainer.total_training_steps": total, "trainer.resume_mode": mode})
    out = []
    for step in steps:
        detector.update(observation(step, {"policy_loss": 0.1}))
        out.append(detector.probed(seen))
    return out


def other(**values: Any) -> Sibling:
    return Sibling(**{"name": "exp-1", "step": 40, "modified_seconds": NOW - 600, "interval_seconds": 100.0, **values})


def test_a_start_that_passes_over_its_own_checkpoint() -> None:
    verdict = restart(facts(good(40)), 1)[0]
    assert verdict is not None
    assert verdict.status is Status.WARNING
    assert "although /work/checkpoints/math/exp-2 holds a checkpoint of step 40" in verdict.reason
    assert restart(facts(good(40)), 41) == [None]  # resumed
    assert restart(facts(good(40)), 1, mode="disable") == [None]  # meant
    assert restart(facts(good(1)), 1, 2, 3) == [None] * 3


def test_a_tracker_that_points_nowhere_or_is_missing_names_no_step_that_is_lost() -> None:
    nowhere = "names step 999, and there is no global_step_999"
    assert restart(facts(tracker_step=999, tracker_problem=nowhere), 1) == [None]
    for tracked, problem in ((999, nowhere), (None, "is missing")):
        verdict = restart(facts(good(40), tracker_step=tracked, tracker_problem=problem), 1)[0]
        assert verdict is not None
        assert "holds a checkpoint of step 40: the training of 40 steps" in verdict.reason


def test_a_start_under_another_name() -> None:
    verdict = restart(facts(siblings=(other(),)), 1)[0]
    assert verdict is not None
    assert "while the experiment exp-1 of the same project stopped at a checkpoint of step 40" in verdict.reason


@pytest.mark.parametrize("sibling", [
    other(name="ablation"), other(step=5), other(step=100), other(modified_seconds=NOW - 200),
    other(modified_seconds=NOW - 90_000), other(interval_seconds=0.0), other(name="exp-2")], ids=str)
def test_another_experiment_that_is_no_earlier_start_of_this_one(sibling: Sibling) -> None:
    """Another subject; hardly begun; finished; still saving beside this one; long ago; a single checkpoint; itself."""
    assert restart(facts(siblings=(sibling,)), 1) == [None]


def test_without_the_number_of_steps_a_finished_run_cannot_be_told_so_nothing_is_said() -> None:
    assert restart(facts(siblings=(other(),)), 1, total=None) == [None]


def test_it_is_told_for_some_steps() -> None:
    found = restart(facts(siblings=(other(),)), *range(1, 250))
    told = [number + 1 for number, verdict in enumerate(found) if verdict is not None and verdict.status > Status.OK]
    assert told[0] == 1
    assert told[-1] >= 31
