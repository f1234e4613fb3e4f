"""A run's checkpoint directory as verl lays it out, and what each checkpoint lacks to be resumed from.

verl 0.4 to 0.9.1 with FSDP: ``global_step_N/actor/{model,optim,extra_state}_world_size_W_rank_R.pt``, the same under
``critic`` in a run that has one, ``data.pt``, and at last ``latest_checkpointed_iteration.txt``, which names N.
Megatron lays out its shards in other ways that differ by version and settings; of those only what both have is checked.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monitor.facts import Checkpoint, CheckpointFacts, Sibling
from monitor.verl_config import Value

TRACKER = "latest_checkpointed_iteration.txt"
MOST_CHECKPOINTS = 20
MOST_FILES = 20_000
_MOST_SIBLINGS = 50
_STEP = re.compile(r"global_step_(\d{1,12})")
_SHARD = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_KINDS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""What verl's ``checkpoint.save_contents`` calls a kind of file, and how the file is called."""

_WHY = {"model": "the weights cannot be loaded", "optim": "verl fails when it loads the optimizer",
        "extra_state": "verl fails when it loads the scheduler and the random state"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a run's configuration says of its checkpoints; None where it does not say."""

    critic: bool | None = None
    contents: frozenset[str] = frozenset(_KINDS)
    tracker: bool = True


def expectation(config: Mapping[str, Value]) -> Expectation:
    """What this configuration will save."""
    estimator = str(config.get("algorithm.adv_estimator") or "").rpartition(".")[2].lower()
    enabled = config.get("critic.enable")
    critic = enabled if isinstance(enabled, bool) else estimator == "gae" if estimator else None
    contents = config.get("actor_rollout_ref.actor.checkpoint.save_contents")
    kinds = frozenset(str(contents).split(",")) if contents else frozenset(_KINDS)
    # An asynchronous save leaves the tracker to whoever finishes it.
    return Expectation(critic=critic, contents=kinds,
                       tracker=config.get("actor_rollout_ref.actor.checkpoint.async_save") is not True)


def look(directory: Path, now: float, expected: Expectation) -> CheckpointFacts:
    """The directory now, the newest twenty checkpoints. Blocking; what vanishes meanwhile is left out."""
    try:
        # It is made by the first save; until then its place is beside those of the project's other experiments.
        names = os.listdir(directory) if directory.exists() or not directory.parent.is_dir() else []
        free: int | None = shutil.disk_usage(directory if directory.exists() else directory.parent).free
    except OSError as error:
        return CheckpointFacts(directory=str(directory), time_seconds=now, problem=error.strerror or str(error))
    steps = sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))[-MOST_CHECKPOINTS:]
    found = [_checkpoint(directory / f"global_step_{step}", step, expected) for step in steps]
    # A critic in one of them shows that the run has one, whatever the configuration says.
    if expected.critic is None and any(checkpoint.critic for checkpoint in found):
        expected = Expectation(critic=True, contents=expected.contents, tracker=expected.tracker)
        found = [_checkpoint(directory / f"global_step_{step}", step, expected) for step in steps]
    tracked, problem = _tracker(directory, found, expected)
    return CheckpointFacts(directory=str(directory), time_seconds=now, tracker_step=tracked, tracker_problem=problem,
                           checkpoints=tuple(found), free_bytes=free, siblings=siblings(directory))


def _tracker(directory: Path, found: Sequence[Checkpoint], expected: Expectation) -> tuple[int | None, str]:
    try:
        text = (directory / TRACKER).read_text("ascii", "replace").strip()
    except OSError:
        complete = any(not checkpoint.missing for checkpoint in found)
        return None, (f"{TRACKER} is missing: the next start begins from scratch, in silence"
                      if complete and expected.tracker else "")
    if not (text.isascii() and text.isdigit()):
        return None, f"{TRACKER}: expected a step, got {text[:20]!r}: the next start fails"
    step = int(text)
    if not (directory / f"global_step_{step}").is_dir():
        return step, f"{TRACKER} names step {step}, and there is no global_step_{step}: the next start fails"
    return step, ""


def _checkpoint(folder: Path, step: int, expected: Expectation) -> Checkpoint:
    size, modified, roles = 0, 0.0, dict[str, set[str]]()
    data = False
    for path, entry in _files(folder):
        try:
            stat = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        size, modified = size + stat.st_size, max(modified, stat.st_mtime)
        data |= path == "data.pt"
        role, _, name = path.partition("/")
        roles.setdefault(role, set()).add(name)
    if not modified:
        try:
            modified = folder.stat().st_mtime
        except OSError:
            modified = 0.0
    missing = _role("actor", roles.get("actor"), expected)
    if expected.critic or (expected.critic is None and "critic" in roles):
        missing += _role("critic", roles.get("critic"), expected)
    if not data:
        missing.append("data.pt is missing: after a resume the data begin anew, in silence")
    return Checkpoint(step=step, path=str(folder), missing=tuple(missing), critic="critic" in roles,
                      modified_seconds=modified, bytes=size)


def _files(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files below a folder, with their paths in it; the first ones of very many."""
    pending, count = [("", str(folder))], 0
    while pending:
        prefix, path = pending.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    count += 1
                    if count > MOST_FILES:
                        return
                    if entry.is_dir(follow_symlinks=False):
                        pending.append((f"{prefix}{entry.name}/", entry.path))
                    else:
                        yield prefix + entry.name, entry
        except OSError:
            continue


def _role(role: str, names: set[str] | None, expected: Expectation) -> list[str]:
    """What a role's part lacks."""
    if not names:
        return [f"{role}/ is missing: verl cannot load the {role}"]
    ranks: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            ranks.setdefault((match[1], int(match[2])), set()).add(int(match[3]))
    if not ranks:
        return []  # not FSDP's layout
    world = max((size for _, size in ranks), key=lambda size: sum(len(found) for key, found in ranks.items()
                                                                 if key[1] == size))
    missing = []
    for content, kind in _KINDS.items():
        found = ranks.get((kind, world), set())
        if not found and content not in expected.contents:
            continue
        lost = sorted(set(range(world)) - found)
        if lost:
            shown = ", ".join(map(str, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            missing.append(f"{role}/{kind}_world_size_{world}_rank_{lost[0]}.pt is missing (rank {shown} of {world}): "
                           f"{_WHY[kind]}")
    return missing


def siblings(directory: Path) -> tuple[Sibling, ...]:
    """The other experiments of the project, beside this one: the newest checkpoint that each one's tracker names."""
    found = []
    try:
        with os.scandir(directory.parent) as entries:
            names = [entry.name for entry in entries if entry.name != directory.name][:_MOST_SIBLINGS]
    except OSError:
        return ()
    for name in names:
        other = directory.parent / name
        try:
            step = int((other / TRACKER).read_text("ascii", "replace"))
            written = sorted((other / f"global_step_{step}").stat().st_mtime for step in _steps(other))
        except (OSError, ValueError):
            continue
        if written:
            interval = written[-1] - written[-2] if len(written) > 1 else 0.0
            found.append(Sibling(name=name, step=step, modified_seconds=written[-1], interval_seconds=interval))
    return tuple(found)


def _steps(directory: Path) -> list[int]:
    return sorted(int(match[1]) for name in os.listdir(directory) if (match := _STEP.fullmatch(name)))[-2:]


def find(config: Mapping[str, Value], logs: Sequence[str], given: str | None) -> Path | None:
    """A run's checkpoint directory, where it can be told and seen: the one given or, below the job's working directory,
    the configuration's; without one verl's default for the project and experiment that the log's path shows."""
    for candidate in candidates(config, logs, given):
        try:
            if any(name == TRACKER or _STEP.fullmatch(name) for name in os.listdir(candidate)):
                return candidate
        except OSError:
            continue
    configured = config.get("trainer.default_local_dir")
    for candidate in candidates(config, logs, given):
        if configured and candidate.parts[-1:] == Path(str(configured)).parts[-1:] and siblings(candidate):
            return candidate  # nothing was saved yet, but other experiments of the project have been
    return None


def candidates(config: Mapping[str, Value], logs: Sequence[str], given: str | None) -> list[Path]:
    """Where the directory may lie, likeliest first."""
    configured = config.get("trainer.default_local_dir")
    names: list[Path] = [Path(configured)] if isinstance(configured, str) and configured else []
    for log in logs:
        path = Path(log)
        if path.suffix == ".jsonl":  # verl's file log: ROOT/PROJECT/EXPERIMENT.jsonl
            names.append(Path("checkpoints") / path.parent.name / path.stem)
    bases: list[Path] = [Path(given)] if given else []
    cwd = config.get("verl_monitor.cwd")
    if isinstance(cwd, str) and cwd:
        bases.append(Path(cwd))
    for log in logs:
        bases += list(Path(log).absolute().parents)[:4]
    bases.append(Path.cwd())
    found = [Path(given), *(Path(given) / name.name for name in names)] if given else []
    for name in names:
        found += [name] if name.is_absolute() else [base / name for base in bases]
    return list(dict.fromkeys(found))
