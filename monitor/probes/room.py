"""All probes of a service together: they look in threads of their own, and the last of each makes the facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from monitor.facts import CheckpointFacts, Facts, NodeFacts, RayFacts
from monitor.probes.loop import Loop
from monitor.verl_config import Value

RUN_EVERY = 6.0
"""Looks at nodes for one at checkpoints, which change slowly and lie on file systems that are."""

SILENT_AFTER = 3.0
"""Looks that a probe may miss before what it told last counts as old."""


class NodeSource(Protocol):
    """What tells the facts of one node; blocking."""

    def read(self) -> NodeFacts:
        """The node now."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class RaySource(Protocol):
    """What tells the facts of a Ray cluster; blocking."""

    def read(self, *, tasks: bool) -> RayFacts:
        """The cluster now."""
        ...


class ClusterSource(Protocol):
    """What has probes on the nodes of a cluster; never blocks."""

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """The nodes, those that do not answer included."""
        ...

    @property
    def dashboard(self) -> str:
        """Address of Ray's dashboard, empty while it is not known."""
        ...

    @property
    def detail(self) -> str:
        """Why there are none, or why they are old."""
        ...

    def start(self) -> None:
        """Begin."""
        ...

    def close(self) -> None:
        """End."""
        ...


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What is known of where a run keeps its things."""

    config: Mapping[str, Value] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    name: str = ""


RunLook = Callable[[Mapping[str, RunPlace]], tuple[Mapping[str, CheckpointFacts], Mapping[str, int]]]
"""Checkpoints and model sizes of runs; blocking."""


class Room:
    """The probes of a service. One event loop asks it; nothing it is asked for blocks.

    Args:
        name: what it is called on /metrics: ``node:HOST`` or ``ray:HOST:PORT``.
        make_ray: a source of Ray's state for a dashboard's address.
    """

    def __init__(self, name: str, clock: Callable[[], float], *, every_seconds: float = 5.0,
                 node: NodeSource | None = None, cluster: ClusterSource | None = None, dashboard: str = "",
                 make_ray: Callable[[str], RaySource] | None = None, runs: RunLook | None = None) -> None:
        self.name = name
        self._clock, self._every = clock, every_seconds
        self._node, self._cluster, self._dashboard, self._make_ray = node, cluster, dashboard, make_ray
        self._ray: tuple[str, RaySource] | None = None
        self._wants_tasks = False
        self._places: Mapping[str, RunPlace] = {}
        self._facts: Facts | None = None
        self._none: tuple[Mapping[str, CheckpointFacts], Mapping[str, int]] = ({}, {})
        self._node_loop = Loop(node.read, "node probe", every_seconds) if node else None
        self._ray_loop = Loop(self._read_ray, "Ray probe", every_seconds) if cluster or dashboard else None
        self._run_loop = Loop(
            lambda: runs(self._places), "checkpoint probe", RUN_EVERY * every_seconds) if runs else None

    def start(self) -> None:
        """Begin to look."""
        if self._cluster:
            self._cluster.start()
        for loop in (self._node_loop, self._ray_loop, self._run_loop):
            if loop:
                loop.start()

    def close(self) -> None:
        """End, without waiting for a look that hangs."""
        for loop in (self._node_loop, self._ray_loop, self._run_loop):
            if loop:
                loop.close()
        if self._cluster:
            self._cluster.close()
        if self._node:
            self._node.close()

    def see_runs(self, places: Mapping[str, RunPlace], *, wants_tasks: bool) -> None:
        """Which runs there are. ``wants_tasks``: one of them is silent, so Ray's running tasks are asked for, too."""
        new = places.keys() - self._places.keys()
        self._places = dict(places)
        if new and self._run_loop:
            self._run_loop.hurry()
        if wants_tasks and not self._wants_tasks and self._ray_loop:
            self._ray_loop.hurry()
        self._wants_tasks = wants_tasks

    def _read_ray(self) -> RayFacts | None:
        address = self._dashboard or (self._cluster.dashboard if self._cluster else "")
        if address and self._make_ray and (self._ray is None or self._ray[0] != address):
            self._ray = (address, self._make_ray(address))  # a cluster that was started anew may have another one
        return self._ray[1].read(tasks=self._wants_tasks) if self._ray else None

    def facts(self) -> Facts:
        """What the probes last told, with what is old marked so; the same object as before while nothing is new."""
        now = self._clock()
        checkpoints, sizes = (self._run_loop.latest if self._run_loop else None) or self._none
        facts = Facts(time_seconds=now, nodes=tuple(self._nodes(now)), ray=self._ray_facts(now),
                      checkpoints=checkpoints, model_bytes=sizes)
        if self._facts is None or not _same(self._facts, facts):
            self._facts = facts
        return self._facts

    def _nodes(self, now: float) -> Sequence[NodeFacts]:
        cluster = self._cluster.nodes if self._cluster else ()
        own = self._node_loop.latest if self._node_loop else None
        if own is None or any(node.node == own.node and node.reachable for node in cluster):
            return cluster
        if self._node_loop and self._node_loop.age > SILENT_AFTER * self._every + 10:
            own = replace(own, reachable=False, detail="its probe has stopped answering")
        return (own, *(node for node in cluster if node.node != own.node))  # Ray may be gone while this host is not

    def _ray_facts(self, now: float) -> RayFacts | None:
        facts = self._ray_loop.latest if self._ray_loop else None
        if facts is None:
            if self._ray_loop is None:
                return None
            why = (self._cluster.detail if self._cluster else "") or "not reached yet"
            return RayFacts(time_seconds=now, address=self._dashboard, reachable=False, detail=why)
        if self._ray_loop and self._ray_loop.age > SILENT_AFTER * self._every + 60:
            return replace(facts, reachable=False, detail="the probe of Ray has stopped answering")
        return facts


def _same(one: Facts, other: Facts) -> bool:
    """Whether no probe has told anything new between them."""
    return (one.ray is other.ray and one.checkpoints is other.checkpoints and len(one.nodes) == len(other.nodes)
            and all(old is new for old, new in zip(one.nodes, other.nodes, strict=True)))
