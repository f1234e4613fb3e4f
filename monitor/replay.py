"""A recorded log through the real source and engine: what `verl-monitor check` does.

A recording has no times, so what depends on time (a stall) is not judged; everything else is judged as it would have
been while the run was alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from monitor.config import Config, RunRules
from monitor.engine import Engine, EngineSettings
from monitor.model import RawStep, RunStarted
from monitor.run import RunView
from monitor.sources.formats import JSONL, PATTERNS, Format
from monitor.sources.recording import format_of, read_file
from monitor.sources.walk import walk

_SETTINGS = EngineSettings(max_runs=100_000)


class UnreadableError(Exception):
    """Nothing could be read from a path; the message says what was expected."""


def recorded_files(path: Path) -> list[Path]:
    """The logs that a path stands for.

    Raises:
        UnreadableError: there are none.
    """
    if path.is_dir():
        found = (Path(entry[0]) for entry in walk(str(path), PATTERNS, lambda *_: None) if entry is not None)
        files = sorted(file for file in found if file.suffix == ".jsonl" or known_format(file) is not None)
        if not files:
            raise UnreadableError(
                f"{path}: no log in this directory; expected *.jsonl of verl's file logger, *.log or *.out with its "
                "console output, TensorBoard's *tfevents* or W&B's *.wandb")
        return files
    if not path.exists():
        raise UnreadableError(f"{path}: no such file; expected a log of verl's file logger or a directory of them")
    return [path]


def known_format(path: Path) -> Format | None:
    """The format that a file is read as, by its content; None for anything else, and for what cannot be read."""
    try:
        return format_of(path)
    except OSError:
        return None


def replay(*paths: Path, config: Config | None = None) -> tuple[RunView, ...]:
    """Judge every run of one recorded file, or of several that one run wrote one after the other.

    ``config``: names and detectors that differ from the defaults.

    Raises:
        UnreadableError: there is not one row.
    """
    rules = RunRules(config or Config())
    engine = Engine(_SETTINGS, rules.detectors, rules.rename)
    rows = 0
    for path in paths:
        known: set[str] = set()  # runs that this file has told of
        try:
            for event in read_file(path):
                rows += isinstance(event, RawStep)
                if isinstance(event, RunStarted) and event.run not in known:
                    known.add(event.run)
                    event = replace(event, restarted=path is not paths[0])
                engine.handle(event, "file")
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror or error}") from error
    if not rows:
        kind = known_format(paths[0])
        expected = ('lines like {"step": 1, "data": {"actor/pg_loss": 0.1}}' if kind in (None, JSONL) else
                    f"rows of {kind.name}")
        raise UnreadableError(f"{paths[0]}: not one row; expected {expected}")
    return engine.snapshot().runs


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded log, of one file or of those that its runs wrote one after the other, and what was found in it."""

    files: tuple[Path, ...]
    kind: Format
    runs: tuple[RunView, ...]


def replay_all(paths: Iterable[Path], config: Config | None = None) -> tuple[list[Recording], list[str]]:
    """Judge the runs of several files; what cannot be read is told and costs the others nothing."""
    logs: dict[str, tuple[Format, list[Path]]] = {}
    for path in paths:
        kind = known_format(path) or JSONL
        logs.setdefault(kind.unit(str(path)), (kind, []))[1].append(path)
    recordings: list[Recording] = []
    errors: list[str] = []
    for kind, files in logs.values():
        try:
            recordings.append(Recording(tuple(files), kind, replay(*files, config=config)))
        except UnreadableError as error:
            errors.append(str(error))
    return recordings, errors
