"""One real run of verl 0.9.1 (PPO, 30 steps, CPU), recorded at once through every way out: all tell the same.

Recorded with verl's console, file, TensorBoard and W&B (0.31, offline) backends and the plugin's requests. Paths are
replaced, and what W&B says of the machine and its file system is left out; rows, configuration and ends are untouched.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from monitor import api
from monitor.engine import Engine
from monitor.model import RawStep, RunConfig, RunEnded, RunState, SourceEvent
from monitor.replay import replay_all
from monitor.sources import tail as tail_module
from monitor.sources.push import PushSource
from monitor.sources.recording import read_file
from tests.helpers import REPOSITORY
from tests.sources.following import following

FIVE = REPOSITORY / "tests" / "data" / "five"
PLACES = {  # as verl lays them out
    "file": ("cpu/five.jsonl", "five.jsonl"),
    "console": ("train.log", "console.log"),
    "tensorboard": ("tensorboard_log/cpu/five/events.out.tfevents.1796116889.h.1.0", "events.out.tfevents"),
    "wandb": ("wandb/offline-run-20261201_092127-l0ixw0pz/run-l0ixw0pz.wandb", "run.wandb"),
}


def lay(folder: Path, way: str) -> Path:
    place, name = PLACES[way]
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.decompress((FIVE / f"{name}.gz").read_bytes()))
    return path


def pushed() -> Iterator[SourceEvent]:
    """What the plugin sent, through the service's own way in."""
    source = PushSource(lambda: 0.0)
    for line in gzip.decompress((FIVE / "push.jsonl.gz").read_bytes()).splitlines():
        request = json.loads(line)
        *_, run, what = request["path"].split("/")
        answer = getattr(source, what)(run, request["body"])
        assert answer is None or not answer["errors"]
    source._wake.set()
    while source._events:
        yield source._events.popleft()


def told(way: str, folder: Path) -> list[SourceEvent]:
    return list(pushed()) if way == "plugin" else list(read_file(lay(folder, way)))


def as_written(way: str, value: object) -> object:
    """A value of the file log as another format can hold it."""
    if way == "tensorboard" and isinstance(value, (int, float)):
        return struct.unpack("<f", struct.pack("<f", value))[0]
    return value


@pytest.mark.parametrize("way", ["console", "tensorboard", "wandb", "plugin"])
def test_steps_and_values_are_those_of_the_file_log(way: str, tmp_path: Path) -> None:
    expected = [(event.step, event.values) for event in told("file", tmp_path) if isinstance(event, RawStep)]
    events = told(way, tmp_path)
    rows = [(event.step, event.values) for event in events if isinstance(event, RawStep)]
    assert [step for step, _ in rows] == [step for step, _ in expected] == list(range(31))
    compared = 0
    for (_, values), (step, wanted) in zip(rows, expected, strict=True):
        known = {key: value for key, value in values.items() if not key.startswith("console/")}
        assert known.keys() == wanted.keys(), step
        for key, value in wanted.items():
            assert same(known[key], as_written(way, value)), (step, key, known[key], value)
            compared += 1
    assert compared == 3263
    assert {event.run for event in events} == {"five"}
    assert {event.project for event in events if isinstance(event, RawStep)} == {"cpu"}


def same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one == other


@pytest.mark.parametrize("way", ["console", "wandb", "plugin"])
def test_the_configuration_and_the_end_are_told(way: str, tmp_path: Path) -> None:
    events = told(way, tmp_path)
    (config,) = [event for event in events if isinstance(event, RunConfig)]
    algorithm = config.values["algorithm"]
    assert isinstance(algorithm, Mapping)
    assert (config.run, config.project, algorithm["adv_estimator"]) == ("five", "cpu", "gae")
    ends = [event.state for event in events if isinstance(event, RunEnded)]
    assert ends == ([] if way == "console" else [RunState.FINISHED])


def verdict(events: list[SourceEvent]) -> Mapping[str, object]:
    engine = Engine()
    for event in events:
        engine.handle(event)
    (view,) = engine.snapshot().runs
    report = api.check_report(view)
    return {**report, "detectors": {item.spec.id: item.verdict.status for item in view.detectors}}


def test_all_give_the_same_verdicts(tmp_path: Path) -> None:
    expected = verdict(told("file", tmp_path))
    assert (expected["run"], expected["steps"], expected["algorithm"]) == ("five", 30, "ppo")
    for way in ("console", "tensorboard", "wandb", "plugin"):
        assert verdict(told(way, tmp_path)) == expected, way


def test_check_of_the_jobs_folder_reports_each_file(tmp_path: Path) -> None:
    files = [lay(tmp_path, way) for way in PLACES]
    recordings, errors = replay_all(files)
    assert errors == []
    runs = [view for recording in recordings for view in recording.runs]
    assert [(view.run, view.project, view.steps) for view in runs] == [("five", "cpu", 30)] * 4


@pytest.mark.parametrize("late", PLACES)
def test_a_jobs_folder_is_one_run(late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "_QUIET_SECONDS", 0.1)
    for way in PLACES:
        if way != late:
            lay(tmp_path, way)
    (tmp_path / "wandb" / "offline-run-20261201_092127-l0ixw0pz").mkdir(parents=True, exist_ok=True)
    # W&B keeps a copy of the console, and a second way to a run's folder.
    (wandb,) = (tmp_path / "wandb").iterdir()
    (wandb / "files").mkdir()
    (wandb / "files" / "output.log").write_bytes(gzip.decompress((FIVE / "console.log.gz").read_bytes()))
    (tmp_path / "wandb" / "latest-run").symlink_to(wandb)

    async def follow() -> Engine:
        async with following(tmp_path) as follow:
            await follow.until(lambda: len(follow.steps) == 3 * 31)
            lay(tmp_path, late)
            await follow.until(lambda: len(follow.steps) == 4 * 31)
            await follow.polls(5)
            assert sorted(follow.steps) == sorted([*range(31)] * 4)
        engine = Engine()
        for event in follow.events:
            engine.handle(event, follow.source.stats.name)
        return engine

    snapshot = asyncio.run(follow()).snapshot()
    (view,) = snapshot.runs
    assert (view.run, view.project, view.steps, view.restarts) == ("five", "cpu", 30, 0)
    assert snapshot.repeated_rows > 80
    assert view.algorithm == "ppo"
