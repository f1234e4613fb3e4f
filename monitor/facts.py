"""What the probes see beside verl's metrics: GPUs, Ray, checkpoints. All immutable; none knows how it was had.

Times are on the engine's clock. What a driver or an API does not tell is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Role(str, Enum):
    """Which part of a verl job a process is, as far as the system shows it.

    verl puts actor, critic and reference into one process a GPU (``WorkerDict``), which cannot be told apart from
    outside: that is ``TRAINER``. ``UNATTRIBUTED``: the process is not visible here, or is nothing of verl's.
    """

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    REWARD = "reward"
    DRIVER = "driver"
    OTHER = "other"
    UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the job on a node. ``title``: what it calls itself, which Ray sets to class and running method
    (``ray::WorkerDict.critic_train_mini_batch``); empty where it is not visible. ``title_since_seconds``: since when it
    has had this title. ``gpu_bytes``: GPU memory it holds on the GPU under which it is listed, in bytes."""

    pid: int
    title: str = ""
    role: Role = Role.UNATTRIBUTED
    title_since_seconds: float = 0.0
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG slice (then ``parent`` is the uuid of its GPU).

    ``memory_*``: bytes; ``used`` is without what the driver reserves for itself, where it tells them apart.
    ``utilization``: share of the last sample in which a kernel ran, 0 to 1. ``unsupported``: names of the fields above
    that this GPU does not answer. ``processes``: None where the driver does not list them. ``lost``: it has stopped
    answering, and why.
    """

    index: int
    uuid: str
    name: str = ""
    parent: str = ""
    memory_total: int | None = None
    memory_used: int | None = None
    memory_reserved: int | None = None
    memory_free: int | None = None
    utilization: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    ecc_uncorrected: int | None = None
    xid: int | None = None
    processes: tuple[Process, ...] | None = None
    unsupported: tuple[str, ...] = ()
    lost: str = ""

    def memory_of(self, role: Role) -> int:
        """Bytes held by processes of a role. What no process accounts for is ``UNATTRIBUTED``."""
        listed = [p for p in self.processes or () if p.gpu_bytes is not None]
        if role is Role.UNATTRIBUTED:
            known = sum(p.gpu_bytes or 0 for p in listed if p.role is not Role.UNATTRIBUTED)
            return max(0, (self.memory_used or 0) - known)
        return sum(p.gpu_bytes or 0 for p in listed if p.role is role)


class GpuState(str, Enum):
    """How a node's GPUs answer. ``NONE``: it has none that this project can ask, which is no fault. ``LOST``: the
    driver answered before and does not any more. ``HUNG``: a call of the driver's does not come back."""

    NONE = "none"
    OK = "ok"
    LOST = "lost"
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One machine. ``time_seconds``: when it was read. ``processes``: what Ray and the rollout engines run there,
    with or without a GPU. ``reachable``: false when its probe does not answer; then the rest is the last known.
    ``recorded``: these are facts of a recording, not of this machine."""

    node: str
    time_seconds: float
    gpu_state: GpuState = GpuState.NONE
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[Process, ...] = ()
    host_memory_total: int | None = None
    host_memory_available: int | None = None
    detail: str = ""
    reachable: bool = True
    recorded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGroup:
    """A Ray placement group. ``created_by_job``: its creator's job; ``job_ended``: that job has an end time.
    ``scheduling``: why it is not placed (``NO_RESOURCES``, ``INFEASIBLE``). ``age_seconds``: since it was first seen in
    its present state, by Ray's own time stamps where it has them. ``nodes``: ids of the nodes of its bundles."""

    id: str
    state: str
    name: str = ""
    detached: bool = False
    created_by_job: str = ""
    job_ended: bool = False
    age_seconds: float = 0.0
    bundles: tuple[Mapping[str, float], ...] = ()
    strategy: str = ""
    scheduling: str = ""
    nodes: tuple[str, ...] = ()

    def asked(self) -> dict[str, float]:
        """Resources of all bundles together."""
        total: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    @property
    def leaked(self) -> bool:
        """Whether it blocks resources for a job that is over: nothing will ever remove it."""
        return self.detached and self.state == "CREATED" and self.job_ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A Ray actor. ``death``: why it is dead, in Ray's words; ``intended``: it was ended by its own job, or with it.
    ``resources``: what it holds outside of any placement group, whose id is ``group``."""

    id: str
    class_name: str
    state: str
    name: str = ""
    job: str = ""
    job_ended: bool = False
    node: str = ""
    pid: int = 0
    restarts: int = 0
    death: str = ""
    intended: bool = False
    group: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node as Ray sees it. ``resources``: what it offers in all."""

    id: str
    address: str = ""
    hostname: str = ""
    alive: bool = True
    head: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A running Ray task. ``name``: ``Class.method``; ``age_seconds``: for how long it has been running."""

    name: str
    age_seconds: float
    job: str = ""
    node: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFacts:
    """A Ray cluster, as its dashboard's API tells it. ``reachable``: false when it does not answer, which is neither
    "no actors" nor "all well"; then the rest is the last known. ``truncated``: lists that Ray cut.
    ``tasks``: those that run, None where they were not asked for. ``used``: resources in use, groups included."""

    time_seconds: float
    address: str = ""
    reachable: bool = True
    detail: str = ""
    groups: tuple[PlacementGroup, ...] = ()
    actors: tuple[Actor, ...] = ()
    nodes: tuple[RayNode, ...] = ()
    tasks: tuple[Task, ...] | None = None
    used: Mapping[str, float] = field(default_factory=dict)
    active_jobs: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()
    recorded: bool = False

    def total(self) -> dict[str, float]:
        """What all living nodes offer together."""
        total: dict[str, float] = {}
        for node in self.nodes:
            if node.alive:
                for name, amount in node.resources.items():
                    total[name] = total.get(name, 0.0) + amount
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One ``global_step_N``. ``missing``: what it lacks, in words; empty: it can be resumed from. ``critic``: it holds
    one. ``modified_seconds``: when its last file was written, Unix time. ``bytes``: its size."""

    step: int
    path: str
    missing: tuple[str, ...] = ()
    critic: bool = False
    modified_seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """Another experiment of the same project: its last checkpoint's step and time (Unix), and the time between its last
    two (0 where there is but one)."""

    name: str
    step: int
    modified_seconds: float
    interval_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """A run's checkpoint directory. ``tracker_step``: what ``latest_checkpointed_iteration.txt`` names, None without
    one; ``tracker_problem``: what is wrong with it. ``checkpoints``: by step. ``free_bytes``: on that file system.
    ``problem``: why the directory could not be looked at; then the rest says nothing."""

    directory: str
    time_seconds: float
    tracker_step: int | None = None
    tracker_problem: str = ""
    checkpoints: tuple[Checkpoint, ...] = ()
    free_bytes: int | None = None
    siblings: tuple[Sibling, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the probes know now. ``checkpoints`` and ``model_bytes`` (size of its weights): by run.
    ``active_runs``: how many runs share this machine or cluster; ``stepping``: one of them has shown a step.
    ``run``: the run that is judged by them, empty for the machine itself."""

    time_seconds: float
    nodes: tuple[NodeFacts, ...] = ()
    ray: RayFacts | None = None
    checkpoints: Mapping[str, CheckpointFacts] = field(default_factory=dict)
    model_bytes: Mapping[str, int] = field(default_factory=dict)
    active_runs: int = 0
    stepping: bool = False
    run: str = ""

    @property
    def kinds(self) -> frozenset[str]:
        """What there are facts of: ``gpu``, ``ray``, ``checkpoints``."""
        kinds = {"gpu"} if any(node.gpu_state is not GpuState.NONE for node in self.nodes) else set()
        return frozenset(kinds | ({"ray"} if self.ray else set()) | ({"checkpoints"} if self.checkpoints else set()))
