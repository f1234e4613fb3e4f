"""A run's checkpoint directory as verl lays it out, and what each checkpoint lacks to be resumed from.

verl 0.4 to 0.9.1 with FSDP: ``global_step_N/actor/{model,optim,extra_state}_world_size_W_rank_R.pt``, the same under
``critic`` in a run that has one, ``data.pt``, and at last ``latest_checkpointed_iteration.txt``, which names N.
Megatron's shards lie in other ways, which differ by version and settings; of those only what both have is checked.
The SFT trainer has no roles: its shards lie in ``global_step_N`` itself, and only all ranks of them are asked for.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from monitor.facts import Checkpoint, CheckpointFacts, Sibling
from monitor.verl_config import Value

TRACKER = "latest_checkpointed_iteration.txt"
MOST_CHECKPOINTS = 20
MOST_FILES = 20_000
"""Directory entries of all checkpoints together; 256 ranks with a critic have some 1,550 in each."""

_MOST_SIBLINGS = 50
_STEP = re.compile(r"global_step_([0-9]{1,12})")
_TRACKED = re.compile(r"[0-9]{1,12}")
_SHARD = re.compile(r"(model|optim|extra_state)_world_size_([0-9]{1,6})_rank_([0-9]{1,6})\.pt")
_KINDS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""What verl's ``checkpoint.save_contents`` calls a kind of file, and how the file is called."""

_WHY = {"model": "the weights cannot be loaded", "optim": "verl fails when it loads the optimizer",
        "extra_state": "verl fails when it loads the scheduler and the random state"}
_OF_ROLES = frozenset(["actor", "critic", "data.pt", "transfer_queue"])
"""All that verl's RL trainers put into ``global_step_N``."""

_SCRATCH = "the next start begins from scratch, in silence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a run's configuration says of its checkpoints; None where it does not say.

    ``world_size``: ranks that are to load them. Only for who knows it; a role may have a pool of its own.
    """

    critic: bool | None = None
    contents: frozenset[str] = frozenset(_KINDS)
    critic_contents: frozenset[str] = frozenset(_KINDS)
    tracker: bool = True
    world_size: int | None = None


def expectation(config: Mapping[str, Value]) -> Expectation:
    """What this configuration will save."""
    estimator = str(config.get("algorithm.adv_estimator") or "").rpartition(".")[2].lower()
    enabled = config.get("critic.enable")
    critic = enabled if isinstance(enabled, bool) else estimator == "gae" if estimator else None
    # An asynchronous save leaves the tracker to Megatron, which writes it when it has finished. FSDP never does.
    late = config.get("actor_rollout_ref.actor.checkpoint.async_save") is True
    fsdp = str(config.get("actor_rollout_ref.actor.strategy") or "").lower().startswith("fsdp")
    return Expectation(critic=critic, contents=_contents(config, "actor_rollout_ref.actor"),
                       critic_contents=_contents(config, "critic"), tracker=fsdp or not late)


def _contents(config: Mapping[str, Value], role: str) -> frozenset[str]:
    contents = config.get(f"{role}.checkpoint.save_contents")
    return frozenset(str(contents).split(",")) if contents else frozenset(_KINDS)


def look(directory: Path, now: float, expected: Expectation) -> CheckpointFacts:
    """The directory now: the newest twenty checkpoints and the one that the tracker names. Blocking; what vanishes
    meanwhile is left out, and so are the oldest beyond ``MOST_FILES``."""
    try:
        # It is made by the first save; until then its place is beside those of the project's other experiments.
        names = os.listdir(directory) if directory.exists() or not directory.parent.is_dir() else []
        free: int | None = shutil.disk_usage(directory if directory.exists() else directory.parent).free
    except OSError as error:
        return CheckpointFacts(directory=str(directory), time_seconds=now, problem=error.strerror or str(error))
    steps = sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
    tracked, problem = _tracker(directory)
    kept = {step for step in steps if step == tracked or step in steps[-MOST_CHECKPOINTS:]}
    folders = _folders(directory, sorted(kept, key=lambda step: (step != tracked, -step)))
    # A critic in one of them shows that the run has one, whatever the configuration says.
    if expected.critic is None and any("critic" in folder.parts for folder in folders):
        expected = replace(expected, critic=True)
    found = [_checkpoint(folder, expected) for folder in folders]
    if tracked is None and not problem and expected.tracker and TRACKER not in names and any(
            folder.known and not checkpoint.missing for folder, checkpoint in zip(folders, found, strict=True)):
        problem = f"{TRACKER} is missing: {_SCRATCH}"
    return CheckpointFacts(directory=str(directory), time_seconds=now, tracker_step=tracked, tracker_problem=problem,
                           checkpoints=tuple(found), free_bytes=free, siblings=siblings(directory))


def _tracker(directory: Path) -> tuple[int | None, str]:
    """The step that the tracker names, and what is wrong with it. Of one that cannot be read nothing is said."""
    try:
        with open(directory / TRACKER, encoding="ascii", errors="replace") as file:
            text = file.read(100).strip()
    except OSError:
        return None, ""
    if not _TRACKED.fullmatch(text):
        return None, f"{TRACKER}: expected a step, got {text[:20]!r}: the next start fails"
    step = int(text)
    if not (directory / f"global_step_{step}").is_dir():
        return step, f"{TRACKER} names step {step}, and there is no global_step_{step}: {_SCRATCH}"
    return step, ""


@dataclass(frozen=True, slots=True)
class _Folder:
    """A ``global_step_N``: names by the first part of their paths, which is the name itself for a file at its top.
    ``whole``: no part of it stayed unseen."""

    step: int
    path: Path
    parts: Mapping[str, set[str]]
    size: int
    modified: float
    entries: int
    whole: bool

    @property
    def of_roles(self) -> bool:
        """Whether an RL trainer wrote it."""
        return "actor" in self.parts or self.parts.keys() <= _OF_ROLES

    @property
    def known(self) -> bool:
        """Whether it is of a layout that has a tracker: the SFT trainer before 0.5 wrote none."""
        return self.of_roles or any(_SHARD.fullmatch(name) for name in self.parts)


def _folders(directory: Path, steps: Iterable[int]) -> list[_Folder]:
    """Those of these steps that are there, the first ones of very many files, by step."""
    found: list[_Folder] = []
    room = MOST_FILES
    for step in steps:
        folder = _folder(directory / f"global_step_{step}", step, room)
        if folder is None:
            continue
        room -= folder.entries
        if room < 0 and found:
            break
        found.append(folder)
    return sorted(found, key=lambda folder: folder.step)


def _folder(path: Path, step: int, most: int) -> _Folder | None:
    """What lies below a folder; None: it is gone."""
    try:
        made = path.stat().st_mtime
    except OSError:
        return None
    parts: dict[str, set[str]] = {}
    size, modified, entries, whole = 0, 0.0, 0, True
    pending = [("", str(path))]
    while pending and entries <= most:
        prefix, below = pending.pop()
        try:
            with os.scandir(below) as listed:
                for entry in listed:
                    entries += 1
                    if entries > most:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        pending.append((f"{prefix}{entry.name}/", entry.path))
                        continue
                    part, _, name = f"{prefix}{entry.name}".partition("/")
                    parts.setdefault(part, set()).add(name)
                    stat = entry.stat(follow_symlinks=False)
                    size, modified = size + stat.st_size, max(modified, stat.st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            whole = False
    return _Folder(step, path, parts, size, modified or made, entries, whole and entries <= most)


def _checkpoint(folder: _Folder, expected: Expectation) -> Checkpoint:
    missing: list[str] = []
    if not folder.whole:
        pass  # what was not seen may be there
    elif not folder.of_roles:
        missing = _shards("", set(folder.parts), frozenset(), expected.world_size)
    else:
        missing = _role("actor", folder, expected.contents, expected.world_size)
        if expected.critic:
            missing += _role("critic", folder, expected.critic_contents, expected.world_size)
        if "data.pt" not in folder.parts:
            missing.append("data.pt is missing: after a resume the data begin anew, in silence")
    return Checkpoint(step=folder.step, path=str(folder.path), missing=tuple(missing), critic="critic" in folder.parts,
                      modified_seconds=folder.modified, bytes=folder.size)


def _role(role: str, folder: _Folder, contents: frozenset[str], ranks: int | None) -> list[str]:
    names = folder.parts.get(role)
    if not names:
        return [f"{role}/ is missing: verl cannot load the {role}"]
    return _shards(f"{role}/", names, contents, ranks)


def _shards(place: str, names: set[str], contents: frozenset[str], wanted: int | None) -> list[str]:
    """What FSDP's files lack; nothing where there are none, which is another layout."""
    ranks: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            ranks.setdefault((match[1], int(match[2])), set()).add(int(match[3]))
    if not ranks:
        return []
    # A directory that was gone on with on other ranks holds files of both; the fuller set is judged.
    world = max((size for _, size in ranks), key=lambda size: sum(len(found) for key, found in ranks.items()
                                                                 if key[1] == size))
    missing = []
    if wanted is not None and world != wanted:
        missing.append(f"{place or 'it'} was written by {world} ranks and is to be loaded by {wanted}: verl finds no "
                       "file of theirs")
    for content, kind in _KINDS.items():
        found = ranks.get((kind, world), set())
        if not found and content not in contents:
            continue
        lost = sorted(set(range(world)) - found)
        if lost:
            shown = ", ".join(map(str, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            missing.append(f"{place}{kind}_world_size_{world}_rank_{lost[0]}.pt is missing (rank {shown} of {world}): "
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
