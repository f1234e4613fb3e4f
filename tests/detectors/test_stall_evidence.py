"""Where a run hangs, by what the probes see; a real PPO run on an H200 whose rollout never answered among it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from monitor.detectors.rollout_stall import RolloutStall
from monitor.detectors.stall_evidence import CULPRITS, explain, look
from monitor.engine import Engine
from monitor.facts import (
    Actor,
    Facts,
    Gpu,
    GpuState,
    NodeFacts,
    PlacementGroup,
    Process,
    RayFacts,
    Role,
    Task,
)
from monitor.model import RawStep, RunState
from monitor.probes.recorded import read_series
from tests.helpers import LAB, observation, rows, shared

NOW, SILENCE = 1000.0, 100.0


def said(facts: Facts, phase: str = "", job: str = "") -> str:
    """The sentence, after 100 s of silence."""
    return explain(look(facts, job), phase, SILENCE, NOW)[0]


def ray(*tasks: Task, **values: Any) -> Facts:
    return Facts(time_seconds=NOW, ray=RayFacts(time_seconds=NOW, tasks=tasks, **values), active_runs=1)


def node(*processes: Process, gpu: Gpu | None = None) -> Facts:
    gpus = (gpu,) if gpu else ()
    facts = NodeFacts(node="n", time_seconds=NOW, gpu_state=GpuState.OK, processes=processes, gpus=gpus)
    return Facts(time_seconds=NOW, nodes=(facts,), active_runs=1)


def test_the_recorded_hang_names_the_stage_and_the_rollout_server() -> None:
    """Recorded: step 46 ended 454 s into the recording of the GPU, then the rollout hung until its end at 540 s."""
    series = list(read_series(shared("corpus", "lab", "gpu-ppo-hang.nvml.jsonl")))
    data = rows(LAB / "gpu-ppo-hang.jsonl")
    durations = [float(str(values.get("timing_s/step", 0.0))) for _, values in data]
    ends = [454.0 - sum(durations[number + 1:]) for number in range(len(data))]
    engine, place, told = Engine(), 0, ""
    for now in range(541):
        while place < len(data) and ends[place] <= now:
            engine.handle(RawStep("run", data[place][0], max(0.0, ends[place]), data[place][1]), "test")
            place += 1
        facts = max((entry for entry in series if entry.time_seconds <= now), key=lambda entry: entry.time_seconds)
        engine.probe(Facts(time_seconds=now, nodes=(facts,)), "node:recorded")
        engine.tick(float(now))
        view = engine.snapshot().find("run")
        stall = next((d for d in view.detectors if d.spec.id == "rollout_stall"), None) if view else None
        if view is not None and stall is not None and stall.severity:
            assert view.state is RunState.STALLED
            assert now >= 514
            told = stall.verdict.reason
            assert stall.verdict.evidence["oldest_task_seconds"] > 50
            assert stall.verdict.evidence["gpu_utilization"] == 0
    assert place == len(data)
    assert "Most likely the rollout engine, in the stage gen: HFCpuServer.generate (pid" in told
    assert "has been running for" in told
    assert "The GPU is at 0% utilisation and 11" in told
    assert "of 700 W, so nothing computes" in told
    machine = engine.snapshot().machine
    assert machine is not None
    assert machine.severity is None  # the GPU itself is well
    view = engine.snapshot().find("run")
    assert view is not None
    assert [d.spec.id for d in view.detectors if d.severity] == ["rollout_stall"]


@pytest.mark.parametrize(("name", "culprit"), [
    ("HFCpuServer.generate", "the rollout engine"), ("vLLMHttpServer.generate", "the rollout engine"),
    ("SGLangHttpServer.generate", "the rollout engine"), ("WorkerDict.actor_rollout_generate_sequences",
                                                          "the rollout engine"),
    ("RewardLoopWorker.compute_score", "reward scoring"), ("RewardModelWorker.compute_rm_score", "reward scoring"),
    ("WorkerDict.actor_rollout_ref_update_weights", "weight sync"), ("vLLMHttpServer.wake_up", "weight sync"),
    ("WorkerDict.actor_rollout_save_checkpoint", "checkpoint write"),
    ("WorkerDict.actor_rollout_ref_update_actor", "the actor's update"),
    ("WorkerDict.critic_train_mini_batch", "the critic's update"),
    ("WorkerDict.actor_rollout_compute_log_prob", "log-probabilities or values"),
])
def test_each_part_of_a_step_is_known_by_its_task_and_by_a_process_title(name: str, culprit: str) -> None:
    by_task = said(ray(Task(name="TaskRunnerV1.run", age_seconds=900), Task(name=name, age_seconds=98, pid=7)))
    assert f"Most likely {culprit}" in by_task
    assert f"{name} (pid 7) has been running for 98 s" in by_task
    title = Process(pid=8, title=f"ray::{name}", role=Role.OTHER, title_since_seconds=NOW - 98)
    assert f"Most likely {culprit}" in said(node(title))


def test_whoever_waits_is_not_the_culprit_and_many_at_once_are_counted() -> None:
    waiting = Task(name="AgentLoopWorker.generate_sequences", age_seconds=99)
    calls = [Task(name="vLLMHttpServer.generate", age_seconds=age, pid=7) for age in (60, 99, 80)]
    assert "Most likely the rollout engine" in said(ray(waiting, *calls))
    assert "running for 99 s, 3 at once" in said(ray(waiting, *calls))
    scoring = Task(name="RewardLoopWorker.compute_score", age_seconds=99)
    assert "Most likely reward scoring" in said(ray(waiting, scoring))
    assert "Running for as long: AgentLoopWorker.generate_sequences" in said(ray(waiting))


def test_what_began_after_half_of_the_silence_did_not_cause_it() -> None:
    assert "Most likely" not in said(ray(Task(name="vLLMHttpServer.generate", age_seconds=10)))


def test_a_dead_actor_and_a_group_that_cannot_be_placed_come_first() -> None:
    task = Task(name="vLLMHttpServer.generate", age_seconds=99)
    dead = Actor(id="a", class_name="WorkerDict", name="w", state="DEAD", death="out of memory")
    assert said(ray(task, actors=(dead,))).startswith("Most likely a dead actor: WorkerDict w (out of memory)")
    assert "dead actor" not in said(ray(task, actors=(replace(dead, intended=True),)))
    group = PlacementGroup(id="g", name="pool", state="PENDING", bundles=({"GPU": 8.0},))
    assert "Most likely resources: it waits for the placement group pool, which asks for 8 GPU" in said(
        ray(task, groups=(group,)))


def test_another_jobs_tasks_do_not_count_where_the_runs_job_is_known() -> None:
    mine, other = Task(name="RewardLoopWorker.compute_score", age_seconds=99, job="2"), Task(
        name="vLLMHttpServer.generate", age_seconds=99, job="1")
    assert "Most likely reward scoring" in said(ray(mine, other), job="2")
    both = replace(ray(mine), active_runs=2)
    assert "2 runs share these machines" in said(both)


def test_full_utilisation_at_idle_power_is_a_sign_of_a_hang() -> None:
    gpu = Gpu(index=0, uuid="u", memory_used=2**34, utilization=1.0, power_watts=120.0, power_limit_watts=700.0)
    assert "100% utilisation and 120 of 700 W, which is how a kernel that waits for ever looks" in said(node(gpu=gpu))
    assert "waits for ever" not in said(node(gpu=replace(gpu, power_watts=500.0)))


def test_the_stage_alone_says_what_it_can_and_what_is_missing() -> None:
    nothing = Facts(time_seconds=NOW)
    assert said(nothing, "reward").startswith("By its stage it is reward scoring.")
    assert "the reward scoring that newer versions of verl do in the same stage" in said(nothing, "gen")
    assert "the monitor lacks Ray's running tasks and actors (--ray-address) and the processes of its nodes" in said(
        nothing, "gen")
    assert said(nothing).startswith("To tell more, the monitor lacks")
    unreachable = Facts(time_seconds=NOW, ray=RayFacts(time_seconds=NOW, reachable=False))
    assert "Ray's running tasks" in said(unreachable)


def test_evidence_neither_makes_a_stall_nor_vetoes_one() -> None:
    busy = Gpu(index=0, uuid="u", memory_used=2**34, utilization=1.0, power_watts=690.0, power_limit_watts=700.0)
    detector = RolloutStall()
    for step in range(20):
        detector.update(observation(step, {"stage_duration_seconds/step": 20.0}, now=20.0 * step))
    detector.probed(node(gpu=busy))  # everything computes, and still no step comes
    before, after = detector.tick(380 + 90), detector.tick(380 + 101)
    assert before is not None
    assert after is not None
    assert (before.status.name, after.status.name) == ("OK", "CRITICAL")
    assert len({culprit.stage for culprit in CULPRITS}) == len(CULPRITS)
