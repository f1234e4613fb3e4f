"""GPU headroom: others hold the GPU memory that the run's model will need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from monitor.catalog import TRAINING_SERIES
from monitor.detectors.base import Detector, Settings, setting
from monitor.facts import Facts, Gpu, Process, Role
from monitor.model import DetectorSpec, Observation, Severity, Status, Verdict
from monitor.units import Unit, quantity
from monitor.verl_config import Value

FREE = "gpu_memory_free_bytes"
_OURS = (Role.TRAINER, Role.ROLLOUT, Role.REWARD, Role.DRIVER)


@dataclass(frozen=True, kw_only=True)
class GpuHeadroomSettings(Settings):
    """Limits of ``gpu_headroom``."""

    model_factor: float = setting(1.3, "ratio", "Memory that a GPU must have for its part of the model, over its size.")
    judged_steps: float = setting(5.0, "steps", "Steps of a run after which it has proved that it fits.")


SPEC = DetectorSpec(
    id="gpu_headroom",
    title="GPU memory held by others",
    severity=Severity.WARNING,
    required=(),
    optional=(),
    facts=("gpu",),
    wake="A sight of the run's GPUs (the monitor on their host, or --ray-address), and a model "
         "directory (actor_rollout_ref.model.path) that the monitor can read.",
    meaning="A run has begun on a GPU whose memory is partly held by processes that are not of its job, and what is "
            "left is less than its model needs.",
    impact="The run fails for lack of memory when its engines start or at its first long batch; with the placement "
           "strategy STRICT_PACK one such GPU is enough to fail the whole job.",
    diagnosis=(
        "nvidia-smi on the node: which processes hold memory, and since when.",
        "Engine processes of a job that was killed (VLLM::EngineCore, sglang::*) outlive it.",
        "A process that does not show here is in another container: ask the host.",
    ),
    actions=(
        "end the processes that are left of earlier jobs, by pid",
        "lower actor_rollout_ref.rollout.gpu_memory_utilization to what is really free",
        "raise actor_rollout_ref.rollout.tensor_model_parallel_size, so that each GPU holds a smaller part",
    ),
    misses="Peaks within a step; memory that the job's own roles take from each other (see the dashboard's roles).",
    source="The guide's rule for STRICT_PACK: free memory of a single GPU above 1.3 times the model. The model counts "
           "divided by the tensor parallel size.",
    guide="5",
    panel=(FREE,),
    rise_steps=2,
    clear_steps=2,
)


class GpuHeadroom(Detector):
    """What each GPU has, less what processes of others hold, against the run's model, until the run has shown steps.

    A false alarm would send somebody after another one's processes, so only memory that the driver attributes to
    visible processes that are not Ray's, verl's or an engine's, or that no process accounts for, counts as others'.

    >>> GpuHeadroom().probed(Facts(time_seconds=0.0)) is None
    True
    """

    spec = SPEC
    settings_type = GpuHeadroomSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(GpuHeadroomSettings, self._settings)
        self._steps = 0
        self._parallel = 1.0

    def configured(self, config: Mapping[str, Value]) -> None:
        """Take in over how many GPUs the rollout spreads the model."""
        value = config.get("actor_rollout_ref.rollout.tensor_model_parallel_size")
        if isinstance(value, (int, float)) and value >= 1:
            self._parallel = float(value)

    def update(self, observation: Observation) -> Verdict | None:
        """Count steps: a run that has shown some fits."""
        if not TRAINING_SERIES.isdisjoint(observation.values):
            self._steps += 1
        return None

    def restarted(self, time_seconds: float) -> None:
        """A new start must fit anew."""
        self._steps = 0

    def probed(self, facts: Facts) -> Verdict | None:
        """Judge the GPUs."""
        size = facts.model_bytes.get(facts.run, 0)
        gpus = [(node.node, gpu) for node in facts.nodes if node.reachable for gpu in node.gpus
                if gpu.memory_total and gpu.memory_used is not None and gpu.processes is not None]
        if not gpus or not size:
            return None
        needed = self._s.model_factor * size / self._parallel
        rooms = [(gpu.memory_total - _others(gpu), node, gpu) for node, gpu in gpus if gpu.memory_total]
        room, node, gpu = min(rooms, key=lambda item: item[0])
        taken = _others(gpu)
        if self._steps > self._s.judged_steps or room >= needed or not taken:
            return Verdict(Status.OK, signal=FREE, value=float(room), threshold=needed)
        alien = sorted((p for p in gpu.processes or () if _alien(p)), key=lambda p: -(p.gpu_bytes or 0))[:3]
        who = ", ".join(f"pid {p.pid} {p.title or '(not visible here)'} {quantity(float(p.gpu_bytes or 0), Unit.BYTES)}"
                        for p in alien) or "no process that is visible here"
        return Verdict(
            Status.WARNING, score=needed / max(1.0, float(room)), signal=FREE, value=float(room), threshold=needed,
            reason=f"GPU {gpu.index} of node {node} has {quantity(float(room), Unit.BYTES)} for this run, of "
                   f"{quantity(float(gpu.memory_total or 0), Unit.BYTES)}, because others hold "
                   f"{quantity(float(taken), Unit.BYTES)} ({who}); its model needs {quantity(needed, Unit.BYTES)} "
                   f"there ({self._s.model_factor:g} times {quantity(size / self._parallel, Unit.BYTES)}).",
            evidence={"room_bytes": float(room), "others_bytes": float(taken), "model_bytes": float(size)})


def _alien(process: Process) -> bool:
    return process.role not in _OURS and not process.title.startswith("ray::") and bool(process.gpu_bytes)


def _others(gpu: Gpu) -> int:
    """Bytes on a GPU that are not of a job of verl's."""
    ours = sum(p.gpu_bytes or 0 for p in gpu.processes or () if not _alien(p))
    return max(0, (gpu.memory_used or 0) - ours)
