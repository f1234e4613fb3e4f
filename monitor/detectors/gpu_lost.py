"""GPU lost: a GPU, its driver, or its node does not answer any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import MachineDetector, Settings, setting
from monitor.facts import Facts, Gpu, GpuState, NodeFacts, Role
from monitor.model import DetectorSpec, Severity, Status, Verdict
from monitor.units import Unit, quantity

LOST = "gpu_lost"
_FATAL_XID = {48: "a memory error that cannot be corrected", 79: "the GPU has fallen off the bus",
              94: "a contained memory error", 95: "an uncontained memory error",
              119: "the GPU's system processor does not answer", 120: "the GPU's system processor failed"}
_MOST_NODES = 2_000


@dataclass(frozen=True, kw_only=True)
class GpuLostSettings(Settings):
    """Limits of ``gpu_lost``."""

    hung_seconds: float = setting(60.0, "s", "Time without an answer of the driver's from which it hangs.")
    xid_seconds: float = setting(
        3600.0, "s", "How long a fatal Xid is told while its GPU answers: it may have been reset since.")
    node_seconds: float = setting(10.0, "s", "Time without an answer of a node's probe from which the node is lost.")


SPEC = DetectorSpec(
    id="gpu_lost",
    title="GPU lost",
    severity=Severity.CRITICAL,
    required=(),
    facts=("gpu",),
    machine=True,
    wake="A sight of the GPUs: the monitor on the same host or in a container that has them, verl-monitor node, or "
         "--ray-address.",
    meaning="A GPU that was there does not answer any more: it has fallen off the bus or reports a fatal error "
            "(critical), its node is gone while a job was on it (critical), or only this monitor has lost its access "
            "to the driver (warning).",
    impact="Work on that GPU is lost, and the job hangs in its next collective operation until a time-out, or for "
           "ever. Where only the monitor's access is lost, training goes on and is not seen.",
    diagnosis=(
        "nvidia-smi on the host: does it list the GPU, does it answer at all?",
        "dmesg | grep -i xid: the driver's own word; the number decides.",
        "Only in the container and not on the host: a reload of systemd takes devices away from running containers.",
        "ray status: is the node still part of the cluster?",
    ),
    actions=(
        "stop the job, take the node out of the cluster, and resume elsewhere (trainer.resume_mode=auto)",
        "reset the GPU or reboot the node; after a second time have it replaced",
        "only the monitor lost access: recreate its container (docker compose up -d --force-recreate), training is "
        "not touched",
    ),
    misses="A GPU that is slow but answers; GPUs that are not NVIDIA's.",
    source="NVML's GPU_IS_LOST; NVIDIA's list of Xid errors (48, 79, 94, 95, 119, 120 end the work on a GPU).",
    guide="-",
    panel=(LOST,),
    rise_steps=2,
    clear_steps=2,
)


class GpuLost(MachineDetector):
    """Answers of each GPU, each driver and each node.

    A false alarm would take a node out of service, so a monitor that cannot ask any more says only that, and a node
    that leaves the cluster without a job on it says nothing.

    >>> gpu = Gpu(index=0, uuid="GPU-0", lost="GPU is lost")
    >>> node = NodeFacts(node="a", time_seconds=0.0, gpu_state=GpuState.OK, gpus=(gpu,))
    >>> GpuLost().probed(Facts(time_seconds=0.0, nodes=(node,))).status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = GpuLostSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(GpuLostSettings, self._settings)
        self._well: dict[str, float] = {}  # node -> when its GPUs last answered
        self._xids: dict[tuple[str, int], float] = {}  # GPU, Xid -> when it was first seen
        self._worked: dict[str, bool] = {}  # node -> whether a job was on it when its probe last answered

    def probed(self, facts: Facts) -> Verdict | None:
        """Judge all nodes; the worst decides."""
        present = {node.node for node in facts.nodes}
        self._well = {name: time for name, time in self._well.items() if name in present}
        self._worked = {name: worked for name, worked in self._worked.items() if name in present}
        reported = {(gpu.uuid, gpu.xid) for node in facts.nodes for gpu in node.gpus if gpu.xid is not None}
        self._xids = {key: self._xids.get(key, facts.time_seconds) for key in reported}
        verdicts = [verdict for node in facts.nodes[:_MOST_NODES] for verdict in self._judge(node, facts.time_seconds)]
        if not verdicts:
            seen = any(node.gpu_state is not GpuState.NONE for node in facts.nodes)
            return Verdict(Status.OK, signal=LOST, value=0.0) if seen else None
        worst = max(verdicts, key=lambda verdict: (verdict.status, verdict.score))
        others = len(verdicts) - 1
        more = f" {others} more of this kind elsewhere." if others else ""
        return worst._replace(value=float(len(verdicts)), reason=worst.reason + more)

    def _judge(self, node: NodeFacts, now: float) -> list[Verdict]:
        if not node.reachable:
            silence = now - node.time_seconds
            if silence < self._s.node_seconds or not self._worked.get(node.node):
                return []
            return [self._found(Status.CRITICAL, f"Node {node.node} has not answered for "
                                f"{quantity(silence, Unit.SECONDS)} while a job was on it "
                                f"({node.detail or 'no reason'}): its part of the job is lost.")]
        self._worked[node.node] = any(p.role in (Role.TRAINER, Role.ROLLOUT) for p in node.processes) or any(
            p.role in (Role.TRAINER, Role.ROLLOUT) for gpu in node.gpus for p in gpu.processes or ())
        if node.gpu_state in (GpuState.NONE, GpuState.OK):
            self._well[node.node] = now
        if node.gpu_state is GpuState.LOST:
            return [self._found(Status.WARNING, f"GPUs of node {node.node} cannot be asked any more: {node.detail}. "
                                "Training itself may be untouched.")]
        if node.gpu_state is GpuState.HUNG:
            silence = now - self._well.setdefault(node.node, now)
            if silence < self._s.hung_seconds:
                return []
            return [self._found(Status.WARNING, f"The GPU driver of node {node.node} has not answered for "
                                f"{quantity(silence, Unit.SECONDS)}: a GPU may be sick, and nvidia-smi would hang "
                                "too.")]
        return [verdict for gpu in node.gpus for verdict in self._judge_gpu(node, gpu, now)]

    def _judge_gpu(self, node: NodeFacts, gpu: Gpu, now: float) -> list[Verdict]:
        name = f"GPU {gpu.index} of node {node.node} ({gpu.uuid})"
        if gpu.lost:
            return [self._found(Status.CRITICAL, f"{name} does not answer any more: {gpu.lost}.")]
        if gpu.xid in _FATAL_XID and now - self._xids[gpu.uuid, gpu.xid] <= self._s.xid_seconds:
            return [self._found(Status.CRITICAL, f"{name} reports Xid {gpu.xid}: {_FATAL_XID[gpu.xid]}.")]
        return []

    @staticmethod
    def _found(status: Status, reason: str) -> Verdict:
        return Verdict(status, score=2.0 if status is Status.CRITICAL else 1.0, reason=reason, signal=LOST, value=1.0,
                       threshold=0.0)
