"""What a node probe told on a real H200, and what it makes of processes; recorded facts and their travel as JSON."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monitor.facts import Gpu, GpuState, NodeFacts, PlacementGroup, Process, RayFacts, Role, Task
from monitor.probes.exchange import pack, shifted, unpack_node, unpack_ray
from monitor.probes.node import host_memory
from monitor.probes.processes import ProcessInfo, of_a_job, role_of, scan, title_of
from monitor.probes.recorded import read_series
from tests.helpers import REPOSITORY, shared

SNAPSHOT = REPOSITORY / "tests" / "data" / "gpu" / "h200.json"
MIB = 2**20


def test_figures_of_a_real_h200_agree_with_nvidia_smi_and_with_what_was_allocated() -> None:
    """Recorded by tests/probes/record_gpu.py. nvidia-smi rounds to MiB, upwards for sums."""
    told: dict[str, Any] = json.loads(SNAPSHOT.read_text())
    node = unpack_node(told["node"], 0.0)
    [gpu] = node.gpus
    _, total, used, reserved, free, busy, power, warm = told["smi"][0]
    for ours, theirs in ((gpu.memory_total, total), (gpu.memory_used, used), (gpu.memory_reserved, reserved),
                         (gpu.memory_free, free)):
        assert ours is not None
        assert abs(ours / MIB - int(theirs)) <= 1
    assert gpu.utilization == pytest.approx(int(busy) / 100, abs=0.05)  # two moments
    assert gpu.utilization is not None
    assert gpu.utilization > 0.9
    assert gpu.power_watts == pytest.approx(float(power), rel=0.1)  # two moments
    assert gpu.temperature_celsius == pytest.approx(float(warm), abs=3)
    assert gpu.unsupported == ()
    smi = {int(pid): int(mib) for pid, mib in told["smi_processes"]}
    assert {p.pid: (p.gpu_bytes or 0) // MIB for p in gpu.processes or ()} == smi
    held = {entry["pid"]: entry["reserved"] for entry in told["held"].values()}
    for process in gpu.processes or ():
        context = (process.gpu_bytes or 0) - held[process.pid]
        assert 300 * MIB < context < 1200 * MIB  # CUDA's context and libraries, on top of PyTorch's own
    assert gpu.memory_of(Role.TRAINER) == held_by(gpu, "ray::WorkerDict")
    assert gpu.memory_of(Role.ROLLOUT) == held_by(gpu, "VLLM::EngineCore")
    assert gpu.memory_of(Role.UNATTRIBUTED) < 64 * MIB
    assert unpack_node(told["before"], 0.0).gpus[0].memory_used == 0
    assert unpack_node(told["after"], 0.0).gpus[0].memory_used == 0
    assert told["read_seconds"] < 0.5


def held_by(gpu: Gpu, title: str) -> int:
    return sum(p.gpu_bytes or 0 for p in gpu.processes or () if p.title.startswith(title))


@pytest.mark.parametrize(("title", "role"), [
    ("ray::WorkerDict", Role.TRAINER), ("ray::WorkerDict.actor_rollout_ref_update", Role.TRAINER),
    ("ray::vLLMHttpServer", Role.ROLLOUT), ("ray::SGLangHttpServer.generate", Role.ROLLOUT),
    ("ray::HFCpuServer.generate", Role.ROLLOUT), ("VLLM::EngineCore", Role.ROLLOUT),
    ("VLLM::Worker_TP0", Role.ROLLOUT), ("sglang::scheduler_TP1", Role.ROLLOUT),
    ("ray::RewardLoopWorker.compute_score", Role.REWARD), ("ray::RewardModelWorker", Role.REWARD),
    ("ray::TaskRunnerV1.run", Role.DRIVER), ("ray::AgentLoopWorker.generate_sequences", Role.DRIVER),
    ("ray::FullyAsyncTrainer", Role.DRIVER), ("ray::Something.else", Role.OTHER), ("python train.py", Role.OTHER),
    ("ray::FusedWorker_Actor_Critic", Role.TRAINER), ("ray::DetachActorWorker.update_actor", Role.TRAINER),
    ("ray::TrainingWorker", Role.TRAINER), ("ray::AsyncActorRolloutRefWorker.init_model", Role.TRAINER),
    ("ray::AsyncvLLMServer", Role.ROLLOUT), ("ray::SGLangHttpServerForPartial", Role.ROLLOUT),
    ("ray::TRTLLMHttpServer", Role.ROLLOUT), ("ray::ServerAdapter", Role.ROLLOUT),
    ("ray::CheckpointEngineWorker.update_weights", Role.ROLLOUT), ("ray::RayWorkerWrapper", Role.ROLLOUT),
    ("ray::FullyAsyncRollouter.fit", Role.ROLLOUT), ("ray::FullyAsyncTaskRunner", Role.DRIVER),
    ("ray::RewardComputeWorker.compute", Role.REWARD), ("ray::AgentLoopWorker.compute_reward", Role.DRIVER),
])
def test_roles_by_title(title: str, role: Role) -> None:
    assert role_of(5, {5: ProcessInfo(5, 1, title), 1: ProcessInfo(1, 0, "init")}) is role


def test_a_child_has_the_role_of_its_nearest_ancestor_that_tells() -> None:
    tree = {1: ProcessInfo(1, 0, "init"), 2: ProcessInfo(2, 1, "ray::vLLMHttpServer"), 3: ProcessInfo(3, 2, "python"),
            4: ProcessInfo(4, 3, "python"), 5: ProcessInfo(5, 5, "its own parent")}
    assert [role_of(pid, tree) for pid in (2, 3, 4, 5, 9)] == [
        Role.ROLLOUT, Role.ROLLOUT, Role.ROLLOUT, Role.OTHER, Role.UNATTRIBUTED]


def test_real_processes_are_read_and_idle_ones_of_ray_left_out() -> None:
    command = ["bash", "-c", 'exec -a "$1" sleep 30', "bash"]
    titles = ["ray::WorkerDict.critic_train_mini_batch", "ray::IDLE", "VLLM::EngineCore"]
    children = [subprocess.Popen([*command, title]) for title in titles]
    try:
        wanted = {child.pid for child in children}
        for _ in range(100):
            seen = scan()
            if all(seen.get(pid) and "sleep" not in seen[pid].title.split()[0] and "bash" not in seen[pid].title
                   for pid in wanted):
                break
        assert [seen[child.pid].title.split(" 30")[0] for child in children] == titles
        assert seen[children[0].pid].parent == os.getpid()
        assert {info.pid for info in of_a_job(seen)} & wanted == {children[0].pid, children[2].pid}
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert not wanted & scan().keys()


@pytest.mark.parametrize(("words", "title"), [
    (["ray::WorkerDict.update  actor", "", ""], "ray::WorkerDict.update actor"), (["VLLM::Worker 0"], "VLLM::Worker 0"),
    (["/usr/bin/python3.11", "-u", "train.py", "--key=hidden"], "/usr/bin/python3.11 train.py"),
    (["python", "-m", "verl.trainer.main_ppo", "trainer.token=hidden"], "python -m verl.trainer.main_ppo"),
    (["python", "-c", "key='hidden'"], "python"), (["python", "-X", "utf8", "-m", "x"], "python"),
    (["mysql", "-phidden", "hidden"], "mysql"), (["ray::" + 300 * "x"], "ray::" + 195 * "x"), (["", ""], ""),
])
def test_a_title_holds_no_argument_of_a_program(words: list[str], title: str) -> None:
    assert title_of("\0".join(words).encode()) == title


def test_odd_process_files_cost_themselves(tmp_path: Path) -> None:
    for pid, line, stat in ((1, b"good\0", b"1 (a) b) c) S 7 0"), (2, b"x", b"nonsense"),
                            (3, b"\xff\n\0", b"3 (z) S 1")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(line)
        (tmp_path / str(pid) / "stat").write_bytes(stat)
    (tmp_path / "4").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nMemAvailable: x\n")
    assert {pid: (info.parent, info.title) for pid, info in scan(str(tmp_path)).items()} == {
        1: (7, "good"), 3: (1, "\N{REPLACEMENT CHARACTER}")}
    assert host_memory(str(tmp_path)) == (None, None)
    assert scan(str(tmp_path / "none")) == {}
    total, available = host_memory()
    assert total is not None
    assert available is not None
    assert 0 < available <= total


def test_facts_travel_as_json_and_times_move_to_the_readers_clock() -> None:
    node = NodeFacts(node="a", time_seconds=100.0, gpu_state=GpuState.OK, gpus=(Gpu(index=0, uuid="u", processes=(
        Process(pid=1, title="ray::X.y", role=Role.ROLLOUT, title_since_seconds=90.0, gpu_bytes=5),)),),
        processes=(Process(pid=2, title_since_seconds=70.0),), host_memory_total=7)
    sent = json.loads(json.dumps(pack(node, 100.0)))
    assert unpack_node(sent, 500.0) == shifted(node, 400.0)
    assert unpack_node({**sent, "of a newer version": 1}, 100.0) == node
    ray = RayFacts(time_seconds=3.0, groups=(PlacementGroup(id="a", state="P", bundles=({"GPU": 1.0},)),),
                   tasks=(Task(name="x", age_seconds=3.0),), used={"CPU": 1.0})
    assert unpack_ray(json.loads(json.dumps(pack(ray, 3.0))), 9.0) == shifted(ray, 6.0)
    wrong: list[object] = [None, [], {"node": "a"}, {**sent, "gpus": 5}, {**sent, "gpu_state": "odd"},
                           {**sent, "node": 7}, {**sent, "node": {"a": 1}}, {**sent, "node": {}},
                           {**sent, "gpus": {"a": 1}}, {**sent, "reachable": "yes"}]
    for bad in wrong:
        with pytest.raises(ValueError):  # noqa: PT011 - the words differ
            unpack_node(bad, 0.0)


def test_the_recorded_series_of_a_real_run() -> None:
    series = list(read_series(shared("corpus", "lab", "gpu-ppo-hang.nvml.jsonl")))
    assert len(series) == 271
    assert all(node.recorded for node in series)
    last = series[-1].gpus[0]
    assert [(p.role, p.title) for p in last.processes or ()] == [
        (Role.TRAINER, "ray::WorkerDict"), (Role.ROLLOUT, "ray::HFCpuServer.generate")]
    since = (last.processes or ())[1].title_since_seconds
    assert 450 < since < 470  # step 46 ended at 454 s
    assert last.power_watts is not None
    assert math.isclose(last.power_watts, 117, abs_tol=3)


def test_a_recording_that_is_none_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "series").write_text('{"time": 0, "gpus": []}\n{"time": 1}\n')
    with pytest.raises(ValueError, match=r"series:2: expected a reading"):
        list(read_series(tmp_path / "series"))
    assert sys.version_info >= (3, 10)
