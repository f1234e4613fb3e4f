"""Metrics of the machine room: what the probes see of GPUs, nodes, Ray and checkpoints. Declared once, as verl's are.

They carry no ``run``: a GPU belongs to no run, and several runs may share a cluster. Checkpoints do.
"""

from __future__ import annotations

from monitor.metric import Metric
from monitor.units import Unit

_GPU = ("node", "gpu", "uuid")


def _metric(name: str, unit: Unit, text: str, labels: tuple[str, ...], panel: str) -> Metric:
    return Metric(name=name, unit=unit, help=text, panel=panel, keys={}, labels=labels)


MACHINE: tuple[Metric, ...] = (
    _metric("gpu_memory_used_bytes", Unit.BYTES,
            "GPU memory in use, without what the driver reserves. No samples: no GPU is visible to this monitor.",
            _GPU, "gpu"),
    _metric("gpu_memory_total_bytes", Unit.BYTES, "GPU memory in all.", _GPU, "gpu"),
    _metric("gpu_memory_free_bytes", Unit.BYTES, "GPU memory that is free.", _GPU, "gpu"),
    _metric("gpu_memory_reserved_bytes", Unit.BYTES, "GPU memory that the driver reserves for itself.", _GPU, "gpu"),
    _metric("gpu_role_memory_bytes", Unit.BYTES,
            "GPU memory by the role of its processes: trainer (actor, critic and reference share a process), rollout, "
            "reward, driver, other; unattributed is what no visible process accounts for.", (*_GPU, "role"), "gpu"),
    _metric("gpu_utilization_ratio", Unit.RATIO,
            "Share of the last sample in which a kernel ran. A hung kernel shows 1.", _GPU, "gpu"),
    _metric("gpu_power_watts", Unit.WATTS, "Power drawn by the GPU.", _GPU, "gpu"),
    _metric("gpu_power_limit_watts", Unit.WATTS, "Power that the GPU may draw.", _GPU, "gpu"),
    _metric("gpu_temperature_celsius", Unit.CELSIUS, "Temperature of the GPU.", _GPU, "gpu"),
    _metric("gpu_sm_clock_hertz", Unit.HERTZ, "Clock of the streaming multiprocessors.", _GPU, "gpu"),
    _metric("gpu_ecc_uncorrected_errors", Unit.NUMBER, "Memory errors that ECC could not correct, since the driver "
            "was loaded.", _GPU, "gpu"),
    _metric("gpu_last_xid", Unit.NUMBER, "Number of the driver's last Xid error, while the monitor looked.", _GPU,
            "gpu"),
    _metric("gpu_lost", Unit.NUMBER, "1 when the GPU has stopped answering.", _GPU, "gpu"),
    _metric("gpu_state", Unit.NUMBER, "1 for how the node's GPUs answer: none, ok, lost, hung.", ("node", "state"),
            "gpu"),
    _metric("node_probe_up", Unit.NUMBER, "1 when the node's probe answers.", ("node",), "node"),
    _metric("node_probe_timestamp_seconds", Unit.SECONDS, "When the node's probe last answered.", ("node",), "node"),
    _metric("node_memory_total_bytes", Unit.BYTES, "Host memory in all.", ("node",), "node"),
    _metric("node_memory_available_bytes", Unit.BYTES, "Host memory that is available.", ("node",), "node"),
    _metric("ray_up", Unit.NUMBER, "1 when Ray's dashboard answers.", (), "ray"),
    _metric("ray_nodes", Unit.NUMBER, "Nodes of the cluster, alive or dead.", ("state",), "ray"),
    _metric("ray_actors", Unit.NUMBER, "Actors of jobs that run, by state.", ("state",), "ray"),
    _metric("ray_placement_groups", Unit.NUMBER, "Placement groups by state; leaked: created, detached, and their "
            "creator's job is over.", ("state",), "ray"),
    _metric("ray_placement_group_blocked_gpus", Unit.NUMBER, "GPUs that leaked placement groups block.", (), "ray"),
    _metric("ray_resources", Unit.NUMBER, "Resources of the living nodes.", ("resource",), "ray"),
    _metric("ray_pending_resources", Unit.NUMBER, "Resources that placement groups wait for.", ("resource",), "ray"),
    _metric("ray_list_truncated", Unit.NUMBER, "1 for a list that Ray's API cut.", ("list",), "ray"),
    _metric("checkpoint_last_step", Unit.NUMBER, "Step of the newest complete checkpoint.", ("run",), "checkpoint"),
    _metric("checkpoint_timestamp_seconds", Unit.SECONDS, "When it was written.", ("run",), "checkpoint"),
    _metric("checkpoint_bytes", Unit.BYTES, "Its size.", ("run",), "checkpoint"),
    _metric("checkpoint_free_bytes", Unit.BYTES, "Free space on its file system.", ("run",), "checkpoint"),
)
