"""A recorded log through the real source and engine: what `verl-monitor check` does.

A recording has no times, so what depends on time (a stall) is not judged; everything else is judged as it would have
been while the run was alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from monitor.engine import Engine, EngineSettings
from monitor.model import RawStep
from monitor.run import RunView
from monitor.sources.formats import CONSOLE
from monitor.sources.recording import format_of, read_file

_SETTINGS = EngineSettings(max_runs=100_000)


class UnreadableError(Exception):
    """Nothing could be read from a path; the message says what was expected."""


def recorded_files(path: Path) -> list[Path]:
    """The logs that a path stands for.

    Raises:
        UnreadableError: there are none.
    """
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and (p.suffix == ".jsonl" or _is_console(p)))
        if not files:
            raise UnreadableError(f"{path}: no log of verl in this directory; expected *.jsonl of its file logger, or "
                                  "*.log or *.out with its console output")
        return files
    if not path.exists():
        raise UnreadableError(f"{path}: no such file; expected a log of verl's file logger or a directory of them")
    return [path]


def _is_console(path: Path) -> bool:
    try:
        return path.suffix in (".log", ".out") and format_of(path) is CONSOLE
    except OSError:
        return False


def replay(path: Path) -> tuple[RunView, ...]:
    """Judge every run of one recorded file.

    Raises:
        UnreadableError: the file holds not one row.
    """
    engine = Engine(_SETTINGS)
    rows = 0
    try:
        for event in read_file(path):
            rows += isinstance(event, RawStep)
            engine.handle(event, "file")
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror or error}") from error
    if not rows:
        expected = '{"step": 1, "data": {"actor/pg_loss": 0.1}}'
        raise UnreadableError(f"{path}: not one row; expected lines like {expected}")
    return engine.snapshot().runs


def replay_all(paths: Iterable[Path]) -> tuple[list[RunView], list[str]]:
    """Judge the runs of several files; what cannot be read is told and costs the others nothing."""
    views: list[RunView] = []
    errors: list[str] = []
    for path in paths:
        try:
            views.extend(replay(path))
        except UnreadableError as error:
            errors.append(str(error))
    return views, errors
