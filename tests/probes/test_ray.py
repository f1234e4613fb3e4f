"""The Ray probe, the probes on nodes and `placement-groups` on a real Ray cluster with token authentication."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import REPOSITORY, wait_for
from tests.servers import get, get_json, monitor

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the package ray is not installed")
TOKEN = "a-token-of-sixteen-or-more-characters"
QUICK = {
    "VERL_MONITOR_SERVE_DETECTORS__PLACEMENT_GROUP_LEAK__GRACE_SECONDS": "2",
    "VERL_MONITOR_SERVE_DETECTORS__PLACEMENT_GROUP_INFEASIBLE__IMPOSSIBLE_SECONDS": "5",
    "VERL_MONITOR_SERVE_DETECTORS__ACTOR_DEAD__GRACE_SECONDS": "2",
    "VERL_MONITOR_SERVE_PROBES__EVERY_SECONDS": "2",
}


class Ray:
    """A cluster, told what to do."""

    def __init__(self, process: subprocess.Popen[str], address: str, dashboard: str) -> None:
        self._process, self.address, self.dashboard = process, address, dashboard

    def tell(self, command: str) -> None:
        """Have it obey, and wait for that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert json.loads(self._process.stdout.readline()) == {"done": command}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ray]:
    """A cluster of one node with 8 CPUs and 4 GPUs."""
    (tmp_path / "token").write_text(TOKEN)
    for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), **QUICK}.items():
        monkeypatch.setenv(name, value)
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # Ray's sockets want a short path
    log = (tmp_path / "cluster.log").open("w")
    process = subprocess.Popen([sys.executable, "-m", "tests.probes.ray_cluster", folder], cwd=REPOSITORY, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline() or "{}")
        assert told, (tmp_path / "cluster.log").read_text()
        yield Ray(process, told["address"], f"http://{told['dashboard']}")
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def job(address: str, *wanted: str) -> Iterator[subprocess.Popen[str]]:
    """A driver that has asked for these."""
    process = subprocess.Popen([sys.executable, "-m", "tests.probes.ray_job", address, *wanted], cwd=REPOSITORY,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        assert any(line == "ready\n" for line in process.stdout)  # among what Ray prints
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`verl-monitor placement-groups`."""
    return subprocess.run([sys.executable, "-m", "monitor.cli", "placement-groups", *arguments], cwd=REPOSITORY,
                          text=True, capture_output=True, check=False, timeout=120, stdin=subprocess.DEVNULL)


def found(url: str) -> dict[str, dict[str, Any]]:
    """What the machine room's detectors have found, by id."""
    machine = get_json(f"{url}/api/v1/machine") or {"detectors": []}
    return {item["detector"]: item for item in machine["detectors"] if item["severity"]}


def test_leaks_infeasible_groups_and_dead_actors(ray: Ray, tmp_path: Path) -> None:
    with job(ray.address, "leak") as leaking:
        assert "created" in command("--ray-address", ray.dashboard).stdout  # of a job that lives: no leak
        leaking.send_signal(signal.SIGKILL)  # as a launcher does it: nothing is cleaned up
        leaking.wait()
    with job(ray.address, "live", "large", "dead", "broken"), \
            monitor(log=tmp_path / "monitor.log", options=["--ray-address", ray.address]) as url:
        wait_for(lambda: found(url).keys() >= {"placement_group_leak", "placement_group_infeasible", "actor_dead"}, 60,
                 "the findings")
        said = found(url)
        assert "still holds 2 of 4 GPUs, global_poolverl_group_2:0" in said["placement_group_leak"]["reason"]
        assert "asks for 64 GPU and the cluster has 4" in said["placement_group_infeasible"]["reason"]
        assert said["placement_group_infeasible"]["severity"] == "critical"
        assert get_json(f"{url}/api/v1/runs") == {"runs": []}  # all before any run has shown a step
        wait_for(lambda: "2 more" in found(url)["actor_dead"]["reason"]
                 or "engine core died" in found(url)["actor_dead"]["reason"], 20, "both dead actors")
        assert "WorkerDict abWorkerDict_0:0 of job" in found(url)["actor_dead"]["reason"]
        assert found(url)["actor_dead"]["severity"] == "warning"
        assert b'verl_ray_placement_groups{state="leaked"} 1.0' in get(f"{url}/metrics")[1]

        listed = command("--ray-address", ray.address)
        assert listed.returncode == 1
        assert "1 leaked, holding 2 GPUs" in listed.stdout
        refused = command("--ray-address", ray.address, "--remove-leaked")  # nobody there to say yes
        assert (refused.returncode, "Nothing was removed" in refused.stderr) == (1, True)
        removed = command("--ray-address", ray.address, "--remove-leaked", "--yes")
        assert removed.returncode == 0, removed.stderr
        assert "removed: global_poolverl_group_2:0 (2 GPU, 2 CPU)" in removed.stderr
        after = command("--ray-address", ray.dashboard, "--format", "json")
        groups = {g["name"]: g["state"] for g in json.loads(after.stdout)["placement_groups"]}
        assert groups == {"live_group": "CREATED", "too_large": "PENDING"}
        wait_for(lambda: "placement_group_leak" not in found(url), 20, "the leak's end")
    assert command("--ray-address", ray.dashboard, "--remove-leaked").returncode == 3  # a dashboard removes nothing


def test_a_wrong_token_is_told_and_is_no_empty_cluster(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another-token-that-is-wrong")
    refused = command("--ray-address", ray.dashboard)
    assert refused.returncode == 3
    assert "expected a token that Ray accepts, got 40" in refused.stderr


def test_probes_follow_the_nodes_and_a_dead_head_hangs_nothing(ray: Ray, tmp_path: Path) -> None:
    with monitor(log=tmp_path / "monitor.log", options=["--ray-address", ray.address]) as url:
        def nodes() -> list[bool]:
            return [node["reachable"] for node in (get_json(f"{url}/api/v1/machine") or {"nodes": []})["nodes"]]

        def all_gone() -> bool:  # all but this host, which is looked at without Ray, too
            return sorted(nodes()) == [False, False, True]

        wait_for(lambda: nodes() == [True], 60, "the head's probe")
        ray.tell("add")
        ray.tell("add")
        wait_for(lambda: nodes() == [True] * 3, 60, "three probes")
        # The nodes' probes and Ray's dashboard are asked one by one, so the second may be a look behind the first.
        wait_for(lambda: get_json(f"{url}/api/v1/machine")["ray"]["resources"]["CPU"]["total"] == 12.0, 20, "Ray")
        machine = get_json(f"{url}/api/v1/machine")
        assert len({node["node"] for node in machine["nodes"]}) == 3  # all on one host, each with a name of its own
        assert all(node["host_memory_total_bytes"] for node in machine["nodes"])
        # No resource is held by the probes, and they are no actors of anybody's job.
        assert machine["ray"]["resources"]["CPU"] == {"total": 12.0, "used": 0.0}
        assert machine["ray"]["actors"] == []

        ray.tell("kill")
        killed = time.monotonic()
        wait_for(lambda: sorted(nodes()) == [False, True, True], 15, "the killed node's being told")
        assert time.monotonic() - killed < 15

        ray.tell("kill-head")
        slowest, deadline = 0.0, time.monotonic() + 45
        while time.monotonic() < deadline:
            begun = time.monotonic()
            assert get(f"{url}/metrics")[0] == 200
            slowest = max(slowest, time.monotonic() - begun)
            machine = get_json(f"{url}/api/v1/machine")
            if not machine["ray"]["reachable"] and all_gone():
                break
            time.sleep(0.5)
        assert slowest < 2
        assert not machine["ray"]["reachable"]
        assert all_gone()
        assert b"verl_ray_up 0.0" in get(f"{url}/metrics")[1]
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 5  # nor is the service's end held up


def test_a_cluster_that_is_not_there_is_told_soon() -> None:
    begun = time.monotonic()
    answer = command("--ray-address", "127.0.0.1:1")
    assert (answer.returncode, time.monotonic() - begun < 30) == (3, True)
    assert "Ray at 127.0.0.1:1: [Errno 111] Connection refused" in answer.stderr
    assert "RAY_ADDRESS" not in os.environ
