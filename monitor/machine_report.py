"""The machine room as plain JSON values: what the API and its page show."""

from __future__ import annotations

from typing import Any

from monitor import api
from monitor.facts import CheckpointFacts, Gpu, NodeFacts, PlacementGroup, Process, RayFacts, Role
from monitor.machine import MachineView
from monitor.units import Unit, quantity

_MOST_ACTORS = 200


def machine_report(view: MachineView) -> dict[str, Any]:
    """All of the machine room: nodes with their GPUs, Ray, checkpoints, verdicts, incidents."""
    facts = view.facts
    named = _actors(facts.ray)
    return {
        "machine": view.name, "verdict": api.verdict_word(view.severity), "time_seconds": facts.time_seconds,
        "recorded": any(node.recorded for node in facts.nodes) or bool(facts.ray and facts.ray.recorded),
        "findings": [d.spec.id for d in view.detectors if d.severity],
        "nodes": [_node(node, facts.time_seconds, named) for node in facts.nodes],
        "ray": _ray(facts.ray, facts.time_seconds) if facts.ray else None,
        "checkpoints": {run: _checkpoints(seen) for run, seen in facts.checkpoints.items()},
        "detectors": [api.detector_detail(item) for item in view.detectors],
        "incidents": [api.incident_detail(incident) for incident in reversed(view.incidents)],
    }


def _bytes(value: int | None) -> str | None:
    return None if value is None else quantity(float(value), Unit.BYTES)


def _actors(ray: RayFacts | None) -> dict[int, str]:
    """Names of living actors by the pid of their process; a pid that two nodes have names none."""
    names: dict[int, str] = {}
    for actor in ray.actors if ray is not None else ():
        if actor.state == "ALIVE" and actor.pid:
            names[actor.pid] = "" if actor.pid in names else actor.name
    return names


def _node(node: NodeFacts, now: float, named: dict[int, str]) -> dict[str, Any]:
    return {
        "node": node.node, "reachable": node.reachable, "age_seconds": max(0.0, now - node.time_seconds),
        "gpu_state": node.gpu_state.value, "detail": node.detail, "recorded": node.recorded,
        "host_memory_total_bytes": node.host_memory_total, "host_memory_available_bytes": node.host_memory_available,
        "host_memory": f"{_bytes(node.host_memory_available)} of {_bytes(node.host_memory_total)} available"
                       if node.host_memory_total else None,
        "gpus": [_gpu(gpu, now, named) for gpu in node.gpus],
        "processes": [_process(p, now, named) for p in node.processes],
    }


def _gpu(gpu: Gpu, now: float, named: dict[int, str]) -> dict[str, Any]:
    roles = {role.value: gpu.memory_of(role) for role in Role} if gpu.processes is not None else {}
    return {
        "gpu": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "parent": gpu.parent or None, "lost": gpu.lost or None,
        "memory_total_bytes": gpu.memory_total, "memory_used_bytes": gpu.memory_used,
        "memory_reserved_bytes": gpu.memory_reserved, "memory_free_bytes": gpu.memory_free,
        "memory": f"{_bytes(gpu.memory_used)} of {_bytes(gpu.memory_total)}" if gpu.memory_total else None,
        "utilization_ratio": gpu.utilization, "power_watts": gpu.power_watts,
        "power_limit_watts": gpu.power_limit_watts, "temperature_celsius": gpu.temperature_celsius,
        "ecc_uncorrected": gpu.ecc_uncorrected, "xid": gpu.xid, "unsupported": list(gpu.unsupported),
        "memory_by_role_bytes": {role: used for role, used in roles.items() if used},
        "memory_by_role": {role: _bytes(used) for role, used in roles.items() if used},
        "processes": None if gpu.processes is None else [_process(p, now, named) for p in gpu.processes],
    }


def _process(process: Process, now: float, named: dict[int, str]) -> dict[str, Any]:
    return {"pid": process.pid, "title": process.title, "actor": named.get(process.pid) or None,
            "role": process.role.value,
            "title_age_seconds": max(0.0, now - process.title_since_seconds) if process.title else None,
            "gpu_memory_bytes": process.gpu_bytes, "gpu_memory": _bytes(process.gpu_bytes)}


def group_report(group: PlacementGroup) -> dict[str, Any]:
    """A placement group, as the API, the page and `verl-monitor placement-groups` show it."""
    return {
        "id": group.id, "name": group.name, "state": group.state, "scheduling": group.scheduling,
        "detached": group.detached, "job": group.created_by_job, "job_ended": group.job_ended,
        "age_seconds": group.age_seconds, "resources": group.asked(), "bundles": len(group.bundles),
        "leaked": group.leaked,
    }


def _ray(ray: RayFacts, now: float) -> dict[str, Any]:
    actors = [a for a in ray.actors if not a.job_ended]
    return {
        "address": ray.address, "reachable": ray.reachable, "detail": ray.detail, "recorded": ray.recorded,
        "age_seconds": max(0.0, now - ray.time_seconds), "truncated": list(ray.truncated),
        "active_jobs": list(ray.active_jobs),
        "resources": {name: {"total": total, "used": ray.used.get(name)} for name, total in sorted(ray.total().items())
                      if name in ("CPU", "GPU")},
        "nodes": [{"id": n.id, "address": n.address, "alive": n.alive, "head": n.head, "detail": n.detail,
                   "resources": {k: v for k, v in n.resources.items() if k in ("CPU", "GPU")}} for n in ray.nodes],
        "placement_groups": [group_report(group) for group in ray.groups],
        "actors": [{"class": a.class_name, "name": a.name, "state": a.state, "job": a.job, "pid": a.pid,
                    "restarts": a.restarts, "death": a.death or None, "intended": a.intended}
                   for a in actors[:_MOST_ACTORS]],
        "actors_cut": max(0, len(actors) - _MOST_ACTORS),
        "running_tasks": None if ray.tasks is None else [
            {"name": t.name, "age_seconds": t.age_seconds, "job": t.job, "pid": t.pid}
            for t in sorted(ray.tasks, key=lambda task: -task.age_seconds)[:_MOST_ACTORS]],
    }


def _checkpoints(seen: CheckpointFacts) -> dict[str, Any]:
    return {
        "directory": seen.directory, "problem": seen.problem or None, "tracker_step": seen.tracker_step,
        "tracker_problem": seen.tracker_problem or None, "free_bytes": seen.free_bytes, "free": _bytes(seen.free_bytes),
        "checkpoints": [{"step": c.step, "missing": list(c.missing), "bytes": c.bytes, "size": _bytes(c.bytes),
                         "critic": c.critic, "modified_timestamp_seconds": c.modified_seconds}
                        for c in seen.checkpoints],
    }
