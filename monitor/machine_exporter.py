"""Facts of the probes -> metric families. Names, units and helps are the catalogue's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prometheus_client.metrics_core import Metric as Family

from monitor.catalog import metric_of
from monitor.facts import Facts, Gpu, GpuState, NodeFacts, RayFacts, Role
from monitor.families import Families, add
from monitor.machine import MachineView

_GPU_FIELDS = (
    ("gpu_memory_used_bytes", "memory_used"), ("gpu_memory_total_bytes", "memory_total"),
    ("gpu_memory_free_bytes", "memory_free"), ("gpu_memory_reserved_bytes", "memory_reserved"),
    ("gpu_utilization_ratio", "utilization"), ("gpu_power_watts", "power_watts"),
    ("gpu_power_limit_watts", "power_limit_watts"), ("gpu_temperature_celsius", "temperature_celsius"),
    ("gpu_sm_clock_hertz", "sm_clock_hertz"), ("gpu_ecc_uncorrected_errors", "ecc_uncorrected"),
    ("gpu_last_xid", "xid"))


class _Machine:
    """Families of the machine room by their names in the catalogue."""

    def __init__(self) -> None:
        self._out = Families()
        self._gauge("gpu_memory_used_bytes")  # one of the guide's four: known where there is no GPU, too

    def _gauge(self, name: str) -> Family:
        metric = metric_of(name)
        return self._out.gauge(f"verl_{name}", metric.help, metric.labels)

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """A sample; None is no sample."""
        if value is not None:
            add(self._gauge(name), labels, float(value))

    def all(self) -> list[Family]:
        return self._out.all()


def machine_families(view: MachineView | None) -> list[Family]:
    """Every family of the machine room; their number does not depend on the runs, but for checkpoints."""
    out = _Machine()
    if view is not None:
        facts = view.facts
        for node in facts.nodes:
            _node(out, node)
        if facts.ray is not None:
            _ray(out, facts.ray)
        _checkpoints(out, facts)
    return out.all()


def _node(out: _Machine, node: NodeFacts) -> None:
    out.put("node_probe_up", node.reachable, node.node)
    out.put("node_probe_timestamp_seconds", node.time_seconds, node.node)
    if not node.reachable:
        return  # its last values would look like present ones
    for state in GpuState:
        out.put("gpu_state", node.gpu_state is state, node.node, state.value)
    out.put("node_memory_total_bytes", node.host_memory_total, node.node)
    out.put("node_memory_available_bytes", node.host_memory_available, node.node)
    for gpu in node.gpus:
        _gpu(out, gpu, (node.node, str(gpu.index), gpu.uuid))


def _gpu(out: _Machine, gpu: Gpu, labels: Sequence[str]) -> None:
    for name, field in _GPU_FIELDS:
        out.put(name, getattr(gpu, field), *labels)
    out.put("gpu_lost", bool(gpu.lost), *labels)
    if gpu.processes is not None and gpu.memory_used is not None:
        for role in Role:
            used = gpu.memory_of(role)
            if used:
                out.put("gpu_role_memory_bytes", used, *labels, role.value)


def _ray(out: _Machine, ray: RayFacts) -> None:
    out.put("ray_up", ray.reachable)
    if not ray.reachable:
        return
    for state, alive in (("alive", True), ("dead", False)):
        out.put("ray_nodes", sum(node.alive is alive for node in ray.nodes), state)
    for state, count in sorted(Counter(actor.state.lower() for actor in ray.actors if not actor.job_ended).items()):
        out.put("ray_actors", count, state)
    leaked = [group for group in ray.groups if group.leaked]
    states = Counter(group.state.lower() for group in ray.groups)
    for state in ("created", "pending", "rescheduling"):
        out.put("ray_placement_groups", states[state], state)
    out.put("ray_placement_groups", len(leaked), "leaked")
    out.put("ray_placement_group_blocked_gpus", sum(group.asked().get("GPU", 0.0) for group in leaked))
    for name, amount in sorted(ray.total().items()):
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            out.put("ray_resources", amount, name)
    for name in ("CPU", "GPU"):
        out.put("ray_pending_resources", sum(
            group.asked().get(name, 0.0) for group in ray.groups if group.state == "PENDING"), name)
    for name in ray.truncated:
        out.put("ray_list_truncated", 1, name)


def _checkpoints(out: _Machine, facts: Facts) -> None:
    for run, seen in facts.checkpoints.items():
        out.put("checkpoint_free_bytes", seen.free_bytes, run)
        good = [checkpoint for checkpoint in seen.checkpoints if not checkpoint.missing]
        if good:
            last = max(good, key=lambda checkpoint: checkpoint.step)
            out.put("checkpoint_last_step", last.step, run)
            out.put("checkpoint_timestamp_seconds", last.modified_seconds, run)
            out.put("checkpoint_bytes", last.bytes, run)


