"""Checks of what the run saves, and of what it will go on from."""

from __future__ import annotations

import time
from pathlib import Path

from monitor.preflight.check import Check, Result, error, good, skipped, warning
from monitor.preflight.model import model_of
from monitor.preflight.setup import Setup
from monitor.probes.checkpoints import Expectation, look
from monitor.units import Unit, quantity

CHECKPOINT_DIR = "preflight.checkpoint_dir"
"""Key under which the command puts the directory that it was given."""

_NEEDED = ("model", "optimizer", "extra")


def _contents(setup: Setup) -> Result:
    for role, key in (("actor", "actor_rollout_ref.actor.checkpoint.save_contents"),
                      ("critic", "critic.checkpoint.save_contents")):
        value = setup.get(key)
        if not isinstance(value, list) or (role == "critic" and not setup.critic):
            continue
        missing = [name for name in _NEEDED if name not in value]
        if missing:
            return warning(f"{key} leaves out {', '.join(missing)}: a checkpoint cannot be resumed from as a whole",
                           f"{key}=[model,optimizer,extra]")
    roles = "actor and critic" if setup.critic else "actor"
    return good(f"verl saves model, optimizer and extra of {roles}")


def _saves(setup: Setup) -> Result:
    frequency = setup.number("trainer.save_freq")
    if frequency is None:
        return skipped("trainer.save_freq")
    if frequency <= 0:
        return warning(f"trainer.save_freq is {frequency:.0f}: nothing is saved, so the next start is from scratch",
                       "trainer.save_freq: steps of an hour or so")
    total = setup.number("trainer.total_training_steps")
    if total and frequency > total:
        return warning(f"trainer.save_freq is {frequency:.0f} and the run has {total:.0f} steps: only its end is saved",
                       "trainer.save_freq: lower")
    return good(f"a checkpoint every {frequency:.0f} steps")


def _resume(setup: Setup) -> Result:
    mode, directory = setup.text("trainer.resume_mode"), setup.get("trainer.default_local_dir")
    if mode == "disable":
        return good("trainer.resume_mode is disable: the run begins from scratch, as it was told")
    if mode == "resume_path":
        path = setup.get("trainer.resume_from_path")
        if not isinstance(path, str) or "global_step_" not in path:
            return error(f"trainer.resume_mode is resume_path, and resume_from_path is {path or 'not set'}",
                         "trainer.resume_from_path: the path of a global_step_N directory")
        if not Path(path).is_absolute():
            return warning(f"trainer.resume_from_path is relative ({path}): it begins in the job's working directory",
                           "trainer.resume_from_path: an absolute path")
        return good(f"it goes on from {path}")
    saves = (setup.number("trainer.save_freq") or -1) > 0
    if saves and isinstance(directory, str) and not Path(directory).is_absolute():
        return warning(f"trainer.default_local_dir is relative ({directory}): another working directory or experiment "
                       "name, and the next start begins from scratch, in silence",
                       "trainer.default_local_dir: an absolute path that all nodes see, the same for each start")
    return good("trainer.resume_mode is auto" + (f", in {directory}" if saves else ", and nothing is saved"))


def _directory(setup: Setup) -> Result:
    given = setup.get(CHECKPOINT_DIR)
    configured = setup.get("trainer.default_local_dir")
    folder = Path(str(given or configured or ""))
    if given is None and (not folder.is_absolute() or not folder.is_dir()):
        return good("no checkpoints yet where it can be seen (--checkpoint-dir shows where to look)")
    seen = look(folder, time.time(), Expectation(critic=setup.critic))
    if seen.problem:
        return warning(f"{folder}: {seen.problem}", "--checkpoint-dir, or trainer.default_local_dir")
    if setup.text("trainer.resume_mode") == "disable":
        return good(f"{folder} has {len(seen.checkpoints)} checkpoint(s), which are not gone on from")
    if seen.tracker_problem:
        return error(f"{folder}: {seen.tracker_problem}",
                     "write the step of a complete checkpoint into latest_checkpointed_iteration.txt")
    if not seen.checkpoints:
        return good(f"{folder} is empty: the run begins from scratch")
    tracked = next((c for c in seen.checkpoints if c.step == seen.tracker_step), seen.checkpoints[-1])
    if tracked.missing:
        return error(f"{folder}/global_step_{tracked.step}: {'; '.join(tracked.missing[:3])}",
                     "trainer.resume_mode=resume_path with trainer.resume_from_path of a complete one")
    return good(f"it goes on from step {tracked.step}, which is complete")


def _room(setup: Setup) -> Result:
    parameters = model_of(setup).parameters
    frequency = setup.number("trainer.save_freq") or -1
    if frequency <= 0:
        return good("nothing is saved")
    folder = Path(str(setup.get(CHECKPOINT_DIR) or setup.get("trainer.default_local_dir") or ""))
    while folder.is_absolute() and not folder.exists():
        folder = folder.parent
    # A path that begins nowhere on this machine is on another one's file system.
    seen = folder.is_absolute() and folder != folder.parent
    free = look(folder, time.time(), Expectation()).free_bytes if seen else None
    if not parameters or free is None:
        return skipped("the model's size, or the file system of the checkpoints (--checkpoint-dir)")
    # Weights and two moments of Adam in 32 bits, of each trained role.
    size = 12.0 * parameters * (2 if setup.critic else 1)
    kept = setup.number("trainer.max_actor_ckpt_to_keep")
    found = (f"a checkpoint has some {quantity(size, Unit.BYTES)}, {quantity(float(free), Unit.BYTES)} are free at "
             f"{folder}, " + (f"{kept:.0f} are kept" if kept else "all are kept"))
    if size > free:
        return error(found, "trainer.default_local_dir on a larger file system")
    if size * ((kept or 3) + 1) > free:
        return warning(found, "trainer.max_actor_ckpt_to_keep and trainer.max_critic_ckpt_to_keep, or more room")
    return good(found)


CHECKS = (
    Check(id="checkpoint_contents", title="What a checkpoint holds", guide="4.1", run=_contents,
          why="A checkpoint without its optimizer fails when it is loaded, without extra state its schedule repeats.",
          applies="0.4 to 0.9.1; the guide's save_pretrained and save_checkpoint arguments do not exist there",
          source="verl's checkpoint managers: save_contents and load_contents"),
    Check(id="save_frequency", title="Whether anything is saved", guide="4.1", run=_saves,
          why="verl saves nothing unless told to.", applies="all", source="verl's default trainer.save_freq is -1"),
    Check(id="resume", title="Whether the next start goes on", guide="4.2", run=_resume,
          why="verl begins from scratch in silence when it finds no checkpoint where it looks.",
          applies="0.4 to 0.9.1; the guide's resume_from_checkpoint is trainer.resume_mode",
          source="verl looks for its tracker in trainer.default_local_dir"),
    Check(id="checkpoint_directory", title="What the start will find", guide="4.2", run=_directory,
          why="A checkpoint that lacks a part fails after everything else has been loaded.", applies="FSDP",
          source="verl's layout; see the runbook VerlCheckpointIncomplete"),
    Check(id="disk", title="Room for checkpoints", guide="4.1", run=_room,
          why="A full disk ends a run at its save, and leaves half a checkpoint.", applies="all",
          source="12 bytes a trained parameter: weights and two moments in 32 bits"),
)
