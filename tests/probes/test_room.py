"""The probes of a service: they hold nothing up, what is old is marked so, and checkpoints reach their run."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from monitor.demo_machine import Recording, recorded_room
from monitor.facts import NodeFacts, RayFacts
from monitor.probes.loop import Loop
from monitor.probes.room import Room, RunPlace
from monitor.probes.worker import HungError, Worker
from tests.helpers import wait_for
from tests.probes.test_checkpoints import save
from tests.servers import get_json, monitor


class Node:
    """A node source under a test's control."""

    def __init__(self, name: str = "own") -> None:
        self.name, self.hang, self.looks = name, threading.Event(), 0
        self.hang.set()

    def read(self) -> NodeFacts:
        self.looks += 1
        self.hang.wait(30)
        return NodeFacts(node=self.name, time_seconds=float(self.looks))

    def close(self) -> None:
        self.hang.set()


class Nodes:
    """A cluster source under a test's control."""

    dashboard, detail = "", "expected the package ray, got none"

    def __init__(self, *nodes: NodeFacts) -> None:
        self.nodes = nodes

    def start(self) -> None:
        return

    def close(self) -> None:
        return


def test_a_look_that_raises_costs_itself() -> None:
    results: list[Any] = [1, ValueError("odd"), 3]

    def look() -> int:
        value = results.pop(0) if results else 4
        if isinstance(value, Exception):
            raise value
        return int(value)

    loop = Loop(look, "a probe", 0.01)
    assert (loop.latest, loop.age) == (None, float("inf"))
    loop.start()
    wait_for(lambda: loop.latest == 4, 5, "the looks after the one that raised")
    loop.close()
    assert loop.age < 5


def test_one_call_that_hangs_is_the_only_one_out() -> None:
    release, calls = threading.Event(), []

    def call() -> int:
        calls.append(1)
        release.wait(20)
        return 5

    worker = Worker(call, "the driver")
    with pytest.raises(HungError, match="the driver: no answer within"):
        worker.ask(0.05)
    for _ in range(3):
        with pytest.raises(HungError, match="no answer for"):
            worker.ask(0.05)
    assert (len(calls), worker.outstanding) == (1, True)
    release.set()
    wait_for(lambda: not worker.outstanding, 5, "the call's end")
    assert worker.ask(5) == 5
    assert len(calls) == 2  # the late answer was thrown away
    with pytest.raises(ZeroDivisionError):
        Worker(lambda: 1 // 0, "x").ask(5)


def test_a_probe_that_hangs_holds_up_neither_facts_nor_end() -> None:
    node = Node()
    node.hang.clear()
    room = Room("node:own", time.monotonic, every_seconds=0.02, node=node)
    room.start()
    wait_for(lambda: node.looks == 1, 5, "the look")
    begun = time.monotonic()
    assert room.facts().nodes == ()
    room.close()
    assert time.monotonic() - begun < 0.5


def test_this_host_is_told_once_whether_ray_has_it_too_or_has_lost_it() -> None:
    own = Node("own")
    there = NodeFacts(node="own", time_seconds=1.0, detail="by Ray")
    other = NodeFacts(node="other", time_seconds=1.0)
    cluster = Nodes(there, other)
    room = Room("ray:x", time.monotonic, every_seconds=0.02, node=own, cluster=cluster)
    room.start()
    wait_for(lambda: room.facts().nodes and own.looks > 1, 5, "a look")
    assert [(n.node, n.detail) for n in room.facts().nodes] == [("own", "by Ray"), ("other", "")]
    told = room.facts().ray
    assert told is not None
    assert (told.reachable, told.detail) == (False, "expected the package ray, got none")
    cluster.nodes = (NodeFacts(node="own", time_seconds=1.0, reachable=False, detail="by Ray"), other)
    assert [(n.node, n.reachable, n.detail) for n in room.facts().nodes] == [("own", True, ""), ("other", True, "")]
    room.close()


def test_running_tasks_are_asked_for_once_a_run_is_silent() -> None:
    asked = []

    class Ray:
        def read(self, *, tasks: bool) -> RayFacts:
            asked.append(tasks)
            return RayFacts(time_seconds=0.0)

    room = Room("ray:x", time.monotonic, every_seconds=30, dashboard="http://h", make_ray=lambda _: Ray())
    before = room.facts().ray
    assert before is not None
    assert (before.reachable, before.detail) == (False, "not reached yet")
    room.start()
    wait_for(lambda: asked == [False], 5, "the first look")
    room.see_runs({"run": RunPlace()}, wants_tasks=True)
    wait_for(lambda: asked == [False, True], 5, "a look at once, with tasks")
    room.close()


def test_a_service_finds_a_runs_checkpoints_and_says_what_they_lack(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_MONITOR_SERVE_PROBES__EVERY_SECONDS", "0.5")
    log = tmp_path / "logs" / "math" / "exp.jsonl"
    log.parent.mkdir(parents=True)
    directory = tmp_path / "checkpoints" / "math" / "exp"
    folder = save(directory, 2)
    with log.open("w") as file, monitor(tmp_path / "logs", log=tmp_path / "monitor.log") as url:
        for step in range(1, 4):
            file.write(f'{{"step": {step}, "data": {{"actor/pg_loss": 0.1, "critic/vf_loss": 0.2}}}}\n')
        file.flush()

        def said() -> str:
            run = get_json(f"{url}/api/v1/runs/exp") or {"detectors": []}
            return next((d["reason"] for d in run["detectors"] if d["detector"] == "checkpoint_incomplete"), "")

        wait_for(lambda: "checkpoint_last_step is 2" in said(), 20, "the checkpoint's being found")
        machine = get_json(f"{url}/api/v1/machine")
        assert machine["checkpoints"]["exp"]["tracker_step"] == 2
        shutil.rmtree(folder / "critic")
        shutil.rmtree(directory / "global_step_2" / "actor")
        wait_for(lambda: "global_step_2: actor/ is missing" in said(), 60, "what it lacks")


def test_the_demos_machine_is_recorded_and_says_so() -> None:
    now = [0.0]
    recording = Recording(lambda: now[0], 15.0)
    seen = []
    for now[0] in (0.0, 7.0, 14.9, 16.0, 60.0, 600.0):
        node = recording.read()
        ray = recording.ray().read(tasks=True)
        assert node.recorded
        assert ray.recorded
        assert abs(node.time_seconds - now[0]) < 1e-6
        titles = {p.title: now[0] - p.title_since_seconds for gpu in node.gpus for p in gpu.processes or ()}
        seen.append((now[0], titles.get("ray::HFCpuServer.generate"), len(ray.tasks or ())))
    assert [tasks for _, _, tasks in seen] == [0, 0, 0, 33, 33, 33]
    assert [age for _, age, _ in seen[3:]] == [1.0, 45.0, 585.0]  # it has hung since the 15th second
    room = recorded_room(time.monotonic, 15.0)
    assert room is None or room.name == "node:recorded"  # None where this machine has GPUs of its own
