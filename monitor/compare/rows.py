"""Reads of recorded logs what a comparison needs: a few series, a value a step, in bounded memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from monitor.catalog import TRAINING_SERIES, parse
from monitor.model import NAN, Incident, RawStep, RunStarted
from monitor.replay import UnreadableError, known_format, recorded_files, replay_all
from monitor.sources.formats import JSONL
from monitor.sources.recording import read_file

MOST_ROWS = 200_000
"""Rows kept of the logs that a path stands for; the rest is left out, and told."""

MOST_SERIES = 300
"""Series kept of a run. The catalogue has room for any number of validation sets."""

_SHOWN = 12


@dataclass(slots=True)
class Columns:
    """Values of one run by series and step. ``warm``: steps that were the first of a start, which compile and warm up.
    ``not_finite``: values that were no number, by series. They take no part."""

    places: dict[int, int] = field(default_factory=dict)
    series: dict[str, array[float]] = field(default_factory=dict)
    warm: set[int] = field(default_factory=set)
    not_finite: dict[str, int] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)

    def put(self, step: int, name: str, value: float) -> None:
        """Keep a value. The last of a step wins: what is repeated after a restart is what the run went on from."""
        column = self.series.get(name)
        if column is None:
            if len(self.series) >= MOST_SERIES:
                return
            column = self.series[name] = array("d")
        place = self.places.setdefault(step, len(self.places))
        if len(column) <= place:
            column.extend([NAN] * (place + 1 - len(column)))
        column[place] = value
        if value != value:
            self.not_finite[name] = self.not_finite.get(name, 0) + 1

    def add(self, other: Columns) -> None:
        """Take from another log of the same run what this one has not."""
        own = {name: self.values(name) for name in self.series}
        for name in other.series:
            for step, value in other.values(name).items():
                if step not in own.get(name, ()):
                    self.put(step, name, value)
        self.warm |= other.warm - self.trained
        self.trained |= other.trained

    def values(self, name: str) -> dict[int, float]:
        """Finite values of a series by step, in the order of steps."""
        column = self.series.get(name, array("d"))
        return {step: column[place] for step, place in sorted(self.places.items())
                if place < len(column) and column[place] == column[place]}


@dataclass(frozen=True, slots=True)
class Record:
    """One run as it was recorded. ``notes``: what was left out of it."""

    name: str
    files: tuple[Path, ...]
    columns: Columns
    incidents: tuple[Incident, ...]
    titles: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> list[int]:
        """Training steps, in order."""
        return sorted(self.columns.trained)


def read_record(path: Path, wanted: Callable[[str], bool], name: str = "", option: str = "--run") -> Record:
    """The run that a file or directory holds; ``name`` picks it where there are several.

    ``wanted``: whether a series is kept. ``option``: that by which the user gives ``name``, for the message.

    Raises:
        UnreadableError: nothing can be read, or it is not one run.
    """
    logs: dict[str, list[Path]] = {}
    for file in recorded_files(path):
        logs.setdefault((known_format(file) or JSONL).unit(str(file)), []).append(file)
    found: dict[str, list[tuple[list[Path], Columns]]] = {}
    room, problems = MOST_ROWS, []
    for files in logs.values():
        try:
            rows, runs = _read_log(files, wanted, room)
        except OSError as error:
            problems.append(f"{files[0]}: {error.strerror or error}")
            continue
        room -= rows
        for run, columns in runs.items():
            if columns.trained:
                found.setdefault(run, []).append((files, columns))
    chosen = _choose(path, found, name, option, problems)
    parts = sorted(found[chosen], key=lambda part: -len(part[1].trained))
    columns = parts[0][1]
    for _, more in parts[1:]:
        columns.add(more)
    notes = [f"left out: {problem}" for problem in problems]
    if room <= 0:
        notes.append(f"figures are of the first {MOST_ROWS} rows alone")
    files = [file for part, _ in parts for file in part]
    incidents, titles = _findings(files, chosen)
    return Record(chosen, tuple(files), columns, incidents, titles, tuple(notes))


def _choose(path: Path, found: Iterable[str], name: str, option: str, problems: Sequence[str]) -> str:
    names = sorted(found)
    if not names:
        raise UnreadableError("; ".join(problems) or f"{path}: expected rows of training steps, got none")
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if name:
        if name not in names:
            raise UnreadableError(f"{path}: expected a run named {name!r} ({option}), got {listed}")
        return name
    if len(names) > 1:
        raise UnreadableError(f"{path}: expected one run, got {len(names)}: {listed}; choose with {option} NAME")
    return names[0]


def _read_log(files: Sequence[Path], wanted: Callable[[str], bool], room: int) -> tuple[int, dict[str, Columns]]:
    """Rows kept, and the runs, of one log in its parts."""
    runs: dict[str, Columns] = {}
    last: dict[str, int] = {}
    rows = 0
    for file in files:
        for event in read_file(file):
            if isinstance(event, RunStarted) and event.restarted:
                last.pop(event.run, None)
            if not isinstance(event, RawStep):
                continue
            if rows >= room:
                return rows, runs
            rows += 1
            columns = runs.setdefault(event.run, Columns())
            values = parse(event).values
            if not TRAINING_SERIES.isdisjoint(values):
                if event.step < last.get(event.run, event.step + 1):
                    columns.warm.add(event.step)
                last[event.run] = event.step
                columns.trained.add(event.step)
            for series, value in values.items():
                if wanted(series):
                    columns.put(event.step, series, value)
    return rows, runs


def _findings(files: Iterable[Path], name: str) -> tuple[tuple[Incident, ...], dict[str, str]]:
    """Incidents of a run, those that several logs tell of once, and the titles of their detectors."""
    incidents: dict[tuple[str, int], Incident] = {}
    titles: dict[str, str] = {}
    recordings, _ = replay_all(files)
    for recording in recordings:
        for view in recording.runs:
            if view.run == name:
                titles |= {item.spec.id: item.spec.title for item in view.detectors}
                for incident in view.incidents:
                    incidents.setdefault((incident.detector, incident.first_step), incident)
    return tuple(incidents.values()), titles
