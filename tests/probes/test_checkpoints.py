"""verl's checkpoint layout: what is complete, and what each missing piece is called."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monitor.probes import checkpoints
from monitor.probes.checkpoint_watch import CheckpointWatch, model_bytes
from monitor.probes.checkpoints import MOST_CHECKPOINTS, TRACKER, Expectation, expectation, find, look, siblings
from monitor.probes.room import RunPlace
from monitor.verl_config import flatten

GAE = Expectation(critic=True)


def save(directory: Path, step: int, *, ranks: int = 2, roles: tuple[str, ...] = ("actor", "critic"),
         when: float | None = None) -> Path:
    """A checkpoint as verl 0.9.1 leaves it, with small files."""
    folder = directory / f"global_step_{step}"
    for role in roles:
        (folder / role / "huggingface").mkdir(parents=True)
        (folder / role / "huggingface" / "config.json").write_text("{}")
        (folder / role / "fsdp_config.json").write_text("{}")
        for kind in ("model", "optim", "extra_state"):
            for rank in range(ranks):
                (folder / role / f"{kind}_world_size_{ranks}_rank_{rank}.pt").write_bytes(b"x" * 100)
    (folder / "data.pt").write_bytes(b"x")
    (directory / TRACKER).write_text(str(step))
    if when is not None:
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (when, when))
    return folder


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without the rights of root, whom no mode of a file keeps out."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def missing(directory: Path, expected: Expectation = GAE) -> list[str]:
    """What the newest checkpoint lacks."""
    return list(look(directory, 0.0, expected).checkpoints[-1].missing)


def test_complete_ones_pass(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    seen = look(tmp_path, 7.0, GAE)
    assert [(c.step, c.missing, c.critic) for c in seen.checkpoints] == [(2, (), True), (4, (), True)]
    assert (seen.tracker_step, seen.tracker_problem, seen.problem, seen.time_seconds) == (4, "", "", 7.0)
    assert seen.checkpoints[1].bytes == 2 * (6 * 100 + 4) + 1
    assert abs(seen.checkpoints[1].modified_seconds - time.time()) < 60
    assert (seen.free_bytes or 0) > 0


@pytest.mark.parametrize(("gone", "said"), [
    ("critic", "critic/ is missing: verl cannot load the critic"),
    ("actor", "actor/ is missing: verl cannot load the actor"),
    ("data.pt", "data.pt is missing: after a resume the data begin anew, in silence"),
    ("actor/model_world_size_2_rank_1.pt",
     "actor/model_world_size_2_rank_1.pt is missing (rank 1 of 2): the weights cannot be loaded"),
    ("critic/optim_world_size_2_rank_0.pt",
     "critic/optim_world_size_2_rank_0.pt is missing (rank 0 of 2): verl fails when it loads the optimizer"),
    ("actor/extra_state_world_size_2_rank_1.pt", "actor/extra_state_world_size_2_rank_1.pt is missing (rank 1 of 2): "
     "verl fails when it loads the scheduler and the random state"),
])
def test_each_missing_piece_has_a_message_of_its_own(tmp_path: Path, gone: str, said: str) -> None:
    path = save(tmp_path, 2) / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert missing(tmp_path) == [said]


def test_the_tracker(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / TRACKER).write_text("9")
    seen = look(tmp_path, 0.0, GAE)
    assert seen.tracker_step == 9
    assert seen.tracker_problem == (f"{TRACKER} names step 9, and there is no global_step_9: "
                                    "the next start begins from scratch, in silence")
    (tmp_path / TRACKER).write_text("two\n")
    assert look(tmp_path, 0.0, GAE).tracker_problem == f"{TRACKER}: expected a step, got 'two': the next start fails"
    (tmp_path / TRACKER).write_text("9" * 5000)
    assert "expected a step, got '99999999999999999999'" in look(tmp_path, 0.0, GAE).tracker_problem
    (tmp_path / TRACKER).unlink()
    assert "the next start begins from scratch" in look(tmp_path, 0.0, GAE).tracker_problem
    assert look(tmp_path, 0.0, Expectation(critic=True, tracker=False)).tracker_problem == ""  # an asynchronous save
    shutil.rmtree(tmp_path / "global_step_2")
    assert look(tmp_path, 0.0, GAE).tracker_problem == ""  # nothing was saved yet


def test_what_the_configuration_leaves_out_is_not_missing(tmp_path: Path) -> None:
    folder = save(tmp_path, 2, roles=("actor",))
    assert missing(tmp_path, Expectation(critic=False)) == []
    assert missing(tmp_path, Expectation()) == []  # nothing is known of a critic
    for path in folder.rglob("optim_*"):
        path.unlink()
    assert missing(tmp_path, Expectation(contents=frozenset(["model", "extra"]))) == []
    assert [text.split()[0] for text in missing(tmp_path, Expectation())] == ["actor/optim_world_size_2_rank_0.pt"]
    config = flatten({"algorithm": {"adv_estimator": "gae"}, "actor_rollout_ref": {"actor": {"checkpoint": {
        "save_contents": ["model", "extra"], "async_save": True}}}})
    assert expectation(config) == Expectation(critic=True, contents=frozenset(["model", "extra"]), tracker=False)
    assert expectation({"algorithm.adv_estimator": "AdvantageEstimator.GRPO"}).critic is False
    assert expectation({"critic.enable": True}).critic is True
    # FSDP takes no part in asynchronous saves, and then no one writes the tracker.
    assert expectation({**config, "actor_rollout_ref.actor.strategy": "fsdp2"}).tracker is True
    assert expectation({**config, "actor_rollout_ref.actor.strategy": "megatron"}).tracker is False


def test_a_critic_in_an_earlier_one_shows_that_the_run_has_one(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4, roles=("actor",))
    assert missing(tmp_path, Expectation()) == ["critic/ is missing: verl cannot load the critic"]


def test_megatrons_layout_is_not_judged_by_fsdps_files(tmp_path: Path) -> None:
    for path in ("actor/dist_ckpt/__0_0.distcp", "actor/model/huggingface/a.safetensors", "critic/dist_ckpt/x",
                 "data.pt"):
        (tmp_path / "global_step_3" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "global_step_3" / path).write_bytes(b"x")
    assert missing(tmp_path) == []
    shutil.rmtree(tmp_path / "global_step_3" / "critic")
    assert missing(tmp_path) == ["critic/ is missing: verl cannot load the critic"]


def test_each_role_has_contents_of_its_own(tmp_path: Path) -> None:
    for path in (save(tmp_path, 2) / "critic").glob("optim_*"):
        path.unlink()
    assert [text.split()[0] for text in missing(tmp_path)] == ["critic/optim_world_size_2_rank_0.pt"]
    config = flatten({"algorithm": {"adv_estimator": "gae"}, "critic": {"checkpoint": {
        "save_contents": ["model", "extra"]}}})
    assert missing(tmp_path, expectation(config)) == []


def test_ranks_that_differ_from_those_that_are_to_load_it(tmp_path: Path) -> None:
    save(tmp_path, 2, roles=("actor",))
    assert missing(tmp_path, Expectation(world_size=2)) == []
    assert missing(tmp_path, Expectation(world_size=8)) == [
        "actor/ was written by 2 ranks and is to be loaded by 8: verl finds no file of theirs"]


def test_supervised_training_has_no_roles(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_5"
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text("{}")
    for name in ("fsdp_config.json", "data_0.pt", "data_1.pt", "model_world_size_2_rank_0.pt",
                 "model_world_size_2_rank_1.pt"):
        (folder / name).write_bytes(b"x")
    assert missing(tmp_path, Expectation()) == []
    assert "begins from scratch" in look(tmp_path, 0.0, Expectation()).tracker_problem
    (folder / "model_world_size_2_rank_1.pt").unlink()
    assert missing(tmp_path, Expectation()) == [
        "model_world_size_2_rank_1.pt is missing (rank 1 of 2): the weights cannot be loaded"]
    (folder / "model_world_size_2_rank_0.pt").unlink()  # before 0.5 it saved the model alone, and no tracker
    seen = look(tmp_path, 0.0, Expectation())
    assert (seen.checkpoints[0].missing, seen.tracker_problem) == ((), "")


def test_what_cannot_be_read_is_not_called_missing() -> None:
    with unprivileged(), tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "exp"
        folder = save(directory, 2)
        (folder / "critic" / "model_world_size_2_rank_0.pt").unlink()
        assert len(missing(directory)) == 1
        (folder / "critic").chmod(0)
        try:
            assert missing(directory) == []
        finally:
            (folder / "critic").chmod(0o755)


def test_a_directory_that_cannot_be_looked_at_says_why(tmp_path: Path) -> None:
    seen = look(tmp_path / "none" / "exp", 0.0, GAE)
    assert (seen.problem, seen.checkpoints) == ("No such file or directory", ())
    (tmp_path / "global_step_1").write_text("a file")
    assert look(tmp_path, 0.0, GAE).checkpoints[0].missing[0] == "actor/ is missing: verl cannot load the actor"


def test_only_the_newest_are_looked_at(tmp_path: Path) -> None:
    for step in range(1, 31):
        (tmp_path / f"global_step_{step}").mkdir()
    seen = look(tmp_path, 0.0, GAE)
    assert [c.step for c in seen.checkpoints] == list(range(31 - MOST_CHECKPOINTS, 31))
    (tmp_path / TRACKER).write_text("3")  # and the one that verl goes on from
    seen = look(tmp_path, 0.0, GAE)
    assert [c.step for c in seen.checkpoints] == [3, *range(31 - MOST_CHECKPOINTS, 31)]


def test_very_many_files_are_not_all_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)  # 21 entries each
    monkeypatch.setattr(checkpoints, "MOST_FILES", 50)
    assert [c.step for c in look(tmp_path, 0.0, GAE).checkpoints] == [4, 6]
    (tmp_path / "global_step_6" / "data.pt").unlink()
    assert len(missing(tmp_path)) == 1
    monkeypatch.setattr(checkpoints, "MOST_FILES", 10)
    assert [(c.step, c.missing) for c in look(tmp_path, 0.0, GAE).checkpoints] == [(6, ())]


def test_where_a_runs_checkpoints_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    directory = work / "checkpoints" / "math" / "exp"
    save(directory, 2)
    log = str(work / "math" / "exp.jsonl")
    monkeypatch.chdir(tmp_path)
    assert find({}, [log], None) == directory  # beside the log, as verl's defaults have it
    config = flatten({"trainer": {"default_local_dir": "checkpoints/math/exp"}})
    assert find(config, [], None) is None
    later = flatten({"trainer": {"default_local_dir": "checkpoints/math/exp-2"}})
    assert find(later, [str(work / "run.log")], None) == directory.parent / "exp-2"  # before its first save
    assert [other.name for other in look(find(later, [], str(work)) or work, 0.0, GAE).siblings] == ["exp"]
    assert find(config, [str(work / "run.log")], None) == directory
    assert find(config, [], str(work)) == directory  # given: the job's working directory
    assert find({}, [], str(directory)) == directory  # or the directory itself
    assert find({**config, "verl_monitor.cwd": str(work)}, [], None) == directory
    assert find(flatten({"trainer": {"default_local_dir": str(directory)}}), [], None) == directory
    monkeypatch.chdir(work)
    assert find(config, [], None) == Path.cwd() / "checkpoints" / "math" / "exp"


def test_the_watch_stays_with_a_directory_whose_tracker_goes_and_knows_the_models_size(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", 2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").write_bytes(b"x" * 30)
    config = flatten({"trainer": {"default_local_dir": str(tmp_path / "ckpt")},
                      "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}}})
    watch = CheckpointWatch(lambda: 5.0)
    places = {"run": RunPlace(config, (), "run"), "other": RunPlace()}
    seen, sizes = watch.look(places)
    assert (set(seen), sizes) == ({"run"}, {"run": 30})
    (tmp_path / "ckpt" / TRACKER).unlink()
    shutil.rmtree(tmp_path / "ckpt" / "global_step_2")
    assert watch.look(places)[0]["run"].checkpoints == ()
    assert model_bytes("someone/a-model") == 0


def test_a_directory_that_appears_late_is_found_in_the_end(tmp_path: Path) -> None:
    watch = CheckpointWatch(lambda: 5.0)
    config = flatten({"trainer": {"default_local_dir": str(tmp_path / "ckpt" / "exp")}})
    assert watch.look({"run": RunPlace(config, (), "run")})[0] == {}
    (tmp_path / "ckpt" / "exp").mkdir(parents=True)
    save(tmp_path / "ckpt" / "exp", 2)
    found = [bool(watch.look({"run": RunPlace(config, (), "run")})[0]) for _ in range(10)]
    assert found.index(True) == 8
    assert found[9]


def test_siblings_are_the_projects_other_experiments(tmp_path: Path) -> None:
    save(tmp_path / "exp-1", 20, when=1000.0)
    save(tmp_path / "exp-1", 40, when=1060.0)
    save(tmp_path / "exp-2", 2)
    (tmp_path / "exp-3").mkdir()
    (tmp_path / "a file").write_text("x")
    [other] = siblings(tmp_path / "exp-2")
    assert (other.name, other.step, other.modified_seconds, other.interval_seconds) == ("exp-1", 40, 1060.0, 60.0)
    assert siblings(tmp_path / "none" / "exp") == ()
