"""Detectors that judge machines: groups, actors, GPUs, and the room that is left on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from monitor.detectors import MACHINE_DETECTORS
from monitor.detectors.actor_dead import ActorDead
from monitor.detectors.gpu_headroom import GpuHeadroom
from monitor.detectors.gpu_lost import GpuLost
from monitor.detectors.placement_group_infeasible import PlacementGroupInfeasible
from monitor.detectors.placement_group_leak import PlacementGroupLeak
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
    RayNode,
    Role,
)
from monitor.model import Status, Verdict
from tests.helpers import observation

GIB = 2**30


def cluster(*, now: float = 0.0, stepping: bool = False, gpus: float = 8.0, cpus: float = 8.0, **values: Any) -> Facts:
    node = RayNode(id="n", resources={"GPU": gpus, "CPU": cpus})
    known = {"nodes": (node,), "active_jobs": ("02",), **values}
    return Facts(time_seconds=now, ray=RayFacts(time_seconds=now, **known), stepping=stepping)


def status(verdict: Verdict | None) -> Status | None:
    return verdict.status if verdict else None


# --- placement groups

LEAKED = PlacementGroup(id="a", name="pool", state="CREATED", detached=True, created_by_job="01", job_ended=True,
                        age_seconds=1800, bundles=({"GPU": 8.0},))
PENDING = PlacementGroup(id="b", name="pool", state="PENDING", created_by_job="02", age_seconds=1800,
                         bundles=({"CPU": 1.0},) * 8)


def test_a_leak_is_told_after_its_grace_with_what_it_holds() -> None:
    detector = PlacementGroupLeak()
    assert status(detector.probed(cluster(groups=(LEAKED,)))) is Status.OK
    verdict = detector.probed(cluster(now=61, groups=(LEAKED, replace(PENDING, bundles=({"GPU": 4.0},)))))
    assert verdict is not None
    assert verdict.reason == ("1 placement group of jobs that are over still holds 8 of 8 GPUs, pool (8 GPU; job 01, "
                              "created 30 min ago): 1 group(s) of living jobs wait at this moment.")
    assert status(detector.probed(cluster(now=70))) is Status.OK


@pytest.mark.parametrize("group", [
    replace(LEAKED, job_ended=False), replace(LEAKED, detached=False), replace(LEAKED, state="REMOVED")])
def test_what_is_no_leak(group: PlacementGroup) -> None:
    detector = PlacementGroupLeak()
    detector.probed(cluster(groups=(group,)))
    assert status(detector.probed(cluster(now=600, groups=(group,)))) is Status.OK


def test_a_cluster_that_does_not_answer_changes_nothing() -> None:
    silent = cluster(groups=(LEAKED,), reachable=False)
    for kind in (PlacementGroupLeak, PlacementGroupInfeasible, ActorDead):
        assert kind().probed(silent) is None
        assert kind().probed(Facts(time_seconds=0.0)) is None


def test_42_eight_cpus_of_which_the_job_itself_holds_one() -> None:
    """Reported in public: nine CPUs needed, eight there; the numbers of the group alone would fit."""
    verdict = PlacementGroupInfeasible().probed(cluster(groups=(PENDING,), used={"CPU": 1.0}))
    assert verdict is not None
    assert verdict.status is Status.CRITICAL
    assert "it asks for 8 CPU and the cluster has 8, 1 of which the job's own actors hold" in verdict.reason
    holder = Actor(id="t", class_name="TaskRunner", state="ALIVE", job="02", resources={"CPU": 1.0})
    assert status(PlacementGroupInfeasible().probed(
        cluster(groups=(PENDING,), active_jobs=("02", "03"), actors=(holder,)))) is Status.CRITICAL
    elsewhere = replace(holder, job="03")
    assert status(PlacementGroupInfeasible().probed(
        cluster(groups=(PENDING,), active_jobs=("02", "03"), actors=(elsewhere,)))) is Status.WARNING  # it waits


def test_a_group_that_is_being_placed_or_only_queues() -> None:
    young = replace(PENDING, age_seconds=20, scheduling="INFEASIBLE")
    assert status(PlacementGroupInfeasible().probed(cluster(groups=(young,)))) is Status.OK
    large = replace(PENDING, bundles=({"GPU": 4.0},), age_seconds=600, scheduling="NO_RESOURCES")
    assert status(PlacementGroupInfeasible().probed(cluster(groups=(large,)))) is Status.OK
    verdict = PlacementGroupInfeasible().probed(cluster(groups=(replace(large, age_seconds=1000), LEAKED)))
    assert verdict is not None
    assert verdict.status is Status.WARNING
    assert "others hold, 8 GPUs of it by leaked groups of jobs that are over" in verdict.reason
    over = replace(PENDING, job_ended=True)
    assert status(PlacementGroupInfeasible().probed(cluster(groups=(over,)))) is Status.OK


def test_a_bundle_that_no_node_can_hold() -> None:
    spread = replace(PENDING, bundles=({"GPU": 8.0},), scheduling="INFEASIBLE")
    verdict = PlacementGroupInfeasible().probed(cluster(groups=(spread,), gpus=16.0))
    assert verdict is not None
    assert "no node can hold a bundle of 8 GPU" in verdict.reason


# --- actors

DEAD = Actor(id="x", class_name="vLLMHttpServer", name="vllm_server_0_0", state="DEAD", job="02",
             death="its constructor failed: ValueError")


def dead(*actors: Actor, after: float = 60.0, stepping: bool = False) -> Verdict | None:
    detector = ActorDead()
    detector.probed(cluster(actors=actors))
    return detector.probed(cluster(now=after, actors=actors, stepping=stepping))


def test_44_a_dead_actor_is_told_with_class_and_reason_and_is_critical_without_progress() -> None:
    verdict = dead(DEAD)
    assert verdict is not None
    assert verdict.status is Status.WARNING
    assert "vLLMHttpServer vllm_server_0_0 of job 02 (its constructor failed: ValueError) died" in verdict.reason
    assert status(dead(DEAD, after=700)) is Status.CRITICAL
    assert status(dead(DEAD, after=700, stepping=True)) is Status.WARNING
    assert status(dead(DEAD, after=10)) is Status.OK


@pytest.mark.parametrize("actor", [
    replace(DEAD, intended=True), replace(DEAD, job_ended=True), replace(DEAD, class_name="Preprocess"),
    replace(DEAD, state="ALIVE"), replace(DEAD, state="RESTARTING")])
def test_deaths_that_are_none_of_ours(actor: Actor) -> None:
    assert status(dead(actor)) is Status.OK


# --- GPUs

WELL = Gpu(index=0, uuid="GPU-0", memory_total=80 * GIB, memory_used=10 * GIB, processes=())


def machine(*gpus: Gpu, now: float = 0.0, **values: Any) -> Facts:
    node = NodeFacts(**{"node": "n", "time_seconds": now, "gpu_state": GpuState.OK, "gpus": gpus, **values})
    return Facts(time_seconds=now, nodes=(node,))


def test_a_gpu_that_is_lost_and_one_that_reports_a_fatal_xid() -> None:
    assert status(GpuLost().probed(machine(WELL))) is Status.OK
    verdict = GpuLost().probed(machine(WELL, replace(WELL, index=3, uuid="GPU-3", lost="GPU is lost")))
    assert verdict is not None
    assert (verdict.status, verdict.reason) == (
        Status.CRITICAL, "GPU 3 of node n (GPU-3) does not answer any more: GPU is lost.")
    assert "Xid 79: the GPU has fallen off the bus" in (GpuLost().probed(machine(replace(WELL, xid=79))) or Verdict(
        Status.OK)).reason
    assert status(GpuLost().probed(machine(replace(WELL, xid=31)))) is Status.OK  # a fault of the program
    detector = GpuLost()
    told = [status(detector.probed(machine(replace(WELL, xid=79), now=now))) for now in (0.0, 3000.0, 4000.0)]
    assert told == [Status.CRITICAL, Status.CRITICAL, Status.OK]  # it answers, so it was reset since


def test_48_a_monitor_that_lost_its_access_says_only_that() -> None:
    verdict = GpuLost().probed(machine(gpu_state=GpuState.LOST, detail="recreate the container"))
    assert verdict is not None
    assert verdict.status is Status.WARNING
    assert "Training itself may be untouched" in verdict.reason


def test_54_a_driver_that_hangs_is_told_after_a_minute() -> None:
    detector = GpuLost()
    detector.probed(machine(WELL))
    assert status(detector.probed(machine(now=30, gpu_state=GpuState.HUNG))) is not Status.WARNING
    assert status(detector.probed(machine(now=90, gpu_state=GpuState.HUNG))) is Status.WARNING


def test_52_a_machine_without_gpus_is_not_judged() -> None:
    assert GpuLost().probed(machine(gpu_state=GpuState.NONE)) is None


def test_a_node_that_leaves_with_a_job_on_it_and_one_that_leaves_idle() -> None:
    worker = Process(pid=1, title="ray::WorkerDict", role=Role.TRAINER)
    detector = GpuLost()
    detector.probed(machine(WELL, processes=(worker,)))
    gone = Facts(time_seconds=30.0, nodes=(NodeFacts(node="n", time_seconds=0.0, reachable=False, detail="it left"),))
    verdict = detector.probed(gone)
    assert verdict is not None
    assert verdict.status is Status.CRITICAL
    assert "Node n has not answered for 30 s while a job was on it (it left)" in verdict.reason
    idle = GpuLost()
    idle.probed(machine(WELL))
    assert idle.probed(gone) is None


def headroom(gpu: Gpu, *, model_gib: int = 40, steps: int = 0, parallel: int = 1) -> Verdict | None:
    detector = GpuHeadroom()
    detector.configured({"actor_rollout_ref.rollout.tensor_model_parallel_size": parallel})
    for step in range(steps):
        detector.update(observation(step, {"policy_loss": 0.1}))
    facts = replace(machine(gpu), model_bytes={"run": model_gib * GIB}, run="run")
    return detector.probed(facts)


def test_memory_that_others_hold_is_told_before_the_run_needs_it() -> None:
    other = Process(pid=7, title="python old_job.py", role=Role.OTHER, gpu_bytes=35 * GIB)
    mine = Process(pid=8, title="ray::WorkerDict", role=Role.TRAINER, gpu_bytes=20 * GIB)
    gpu = replace(WELL, memory_used=55 * GIB, processes=(other, mine))
    verdict = headroom(gpu)
    assert verdict is not None
    assert verdict.status is Status.WARNING
    assert "has 45 GiB for this run, of 80 GiB, because others hold 35 GiB (pid 7 python old_job.py" in verdict.reason
    assert "its model needs 52 GiB there (1.3 times 40 GiB)" in verdict.reason
    assert status(headroom(gpu, parallel=2)) is Status.OK
    assert status(headroom(gpu, steps=10)) is Status.OK  # it has proved that it fits
    alone = replace(gpu, memory_used=20 * GIB, processes=(mine,))
    assert status(headroom(alone, model_gib=70)) is Status.OK  # its own size is no matter of others
    hidden = replace(gpu, processes=(mine,))
    assert "no process that is visible here" in (headroom(hidden) or Verdict(Status.OK)).reason


# --- the engine

def test_the_machine_room_confirms_tells_and_clears_without_any_run() -> None:
    engine = Engine()
    for now in (0.0, 61.0, 66.0):
        engine.probe(cluster(now=now, groups=(LEAKED,)), "ray:head:6379")
    view = engine.snapshot().machine
    assert view is not None
    assert [d.spec.id for d in view.detectors if d.severity] == ["placement_group_leak"]
    assert view.incidents[0].raised_seconds == 66.0
    assert {d.spec.id for d in view.detectors} == {kind.spec.id for kind in MACHINE_DETECTORS} - {"gpu_lost"}
    for now in (70.0, 75.0):
        engine.probe(cluster(now=now), "ray:head:6379")
    view = engine.snapshot().machine
    assert view is not None
    assert view.severity is None
    assert view.incidents[0].ended == "it cleared"
