"""Placement group infeasible: the job asks for what the cluster does not have, and waits for ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from monitor.detectors.base import MachineDetector, Settings, setting
from monitor.facts import Facts, PlacementGroup, RayFacts
from monitor.model import DetectorSpec, Severity, Status, Verdict
from monitor.units import Unit, quantity

PENDING = "ray_pending_resources"


@dataclass(frozen=True, kw_only=True)
class PlacementGroupInfeasibleSettings(Settings):
    """Limits of ``placement_group_infeasible``."""

    impossible_seconds: float = setting(
        120.0, "s", "Age of a group that the cluster cannot hold, from which it is critical. An autoscaler that adds "
                    "nodes may need more.")
    waiting_seconds: float = setting(
        900.0, "s", "Age of a group that would fit an empty cluster, from which its waiting is a warning.")


SPEC = DetectorSpec(
    id="placement_group_infeasible",
    title="Placement group cannot be placed",
    severity=Severity.CRITICAL,
    required=(),
    facts=("ray",),
    machine=True,
    wake="The address of Ray's dashboard: verl-monitor serve --ray-address.",
    meaning="A job waits for a placement group that Ray cannot place: it asks for more than the cluster has (critical),"
            " or than is free for long (warning).",
    impact="The job hangs before its first step, with no message and no time-out, while what it has got already stays "
           "reserved.",
    diagnosis=(
        "verl-monitor placement-groups shows what each group asks for and what the cluster has.",
        "Who holds the rest: leaked groups of jobs that are over, other jobs, or the job's own driver, which takes one "
        "CPU before the group asks for all of them.",
        "A node that has left the cluster: ray status, verl_ray_nodes{state=\"dead\"}.",
    ),
    actions=(
        "make trainer.nnodes and trainer.n_gpus_per_node what the cluster has, or add the nodes that are missing",
        "give each node one CPU more than its GPUs for the driver (ray_kwargs.ray_init.num_cpus)",
        "run `verl-monitor placement-groups --remove-leaked` where leaked groups hold what is missing",
        "stop the other job, or wait for it, where that holds what is missing",
    ),
    misses="A strategy that no node can satisfy although the numbers would do, which Ray calls NO_RESOURCES: it is "
           "told as waiting, after 15 minutes.",
    source="Ray's own scheduling state INFEASIBLE, or more of a resource than all living nodes have, less what the "
           "job's own actors hold and will not give back. A group is shown pending for seconds while it is allocated.",
    guide="1.2",
    panel=(PENDING,),
    rise_steps=2,
    clear_steps=2,
)


class _Need(NamedTuple):
    """A resource of which a group asks for more than there can be: its name, what is asked for, what can be had."""

    name: str
    asked: float
    had: float
    own: float


class PlacementGroupInfeasible(MachineDetector):
    """Pending groups of jobs that are not over, by age and by what there is.

    A false alarm would page for a job that only queues, so waiting for others is a warning, and late; a cluster that
    does not answer changes nothing.

    >>> from monitor.facts import Facts, PlacementGroup, RayFacts, RayNode
    >>> group = PlacementGroup(id="a", state="PENDING", age_seconds=300.0, bundles=({"GPU": 8.0},))
    >>> ray = RayFacts(time_seconds=0.0, groups=(group,), nodes=(RayNode(id="n", resources={"GPU": 4.0}),))
    >>> PlacementGroupInfeasible().probed(Facts(time_seconds=0.0, ray=ray)).status.name
    'CRITICAL'
    """

    spec = SPEC
    settings_type = PlacementGroupInfeasibleSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(PlacementGroupInfeasibleSettings, self._settings)

    def probed(self, facts: Facts) -> Verdict | None:
        """Judge the groups that are not placed."""
        ray = facts.ray
        if ray is None or not ray.reachable:
            return None
        verdicts = [self._judge(group, ray) for group in ray.groups
                    if group.state in ("PENDING", "RESCHEDULING") and not group.job_ended]
        return max(verdicts, key=lambda verdict: (verdict.status, verdict.score),
                   default=Verdict(Status.OK, signal=PENDING, value=0.0))

    def _judge(self, group: PlacementGroup, ray: RayFacts) -> Verdict:
        need = _lacking(group, ray)
        impossible = need is not None or group.scheduling == "INFEASIBLE"
        limit = self._s.impossible_seconds if impossible else self._s.waiting_seconds
        name = f"{PENDING}/{need.name if need else 'GPU'}"
        asked = need.asked if need else group.asked().get("GPU", 0.0)
        had = need.had if need else ray.total().get("GPU", 0.0)
        evidence = {"age_seconds": group.age_seconds, "asked": asked, "had": had}
        if group.age_seconds < limit:
            return Verdict(Status.OK, score=min(0.99, group.age_seconds / limit), signal=name, value=asked,
                           threshold=had, evidence=evidence)
        return Verdict(
            Status.CRITICAL if impossible else Status.WARNING, score=group.age_seconds / limit, signal=name,
            value=asked, threshold=had, evidence=evidence, reason=_reason(group, need, ray, impossible=impossible))


def _lacking(group: PlacementGroup, ray: RayFacts) -> _Need | None:
    """The resource of which a group asks for more than there will ever be."""
    total = ray.total()
    own = [actor.resources for actor in ray.actors
           if actor.job == group.created_by_job and actor.state == "ALIVE" and not actor.group]
    alone = len(ray.active_jobs) <= 1 and all(other.state != "CREATED" for other in ray.groups)
    needs = []
    for name, asked in group.asked().items():
        held = sum(resources.get(name, 0.0) for resources in own)
        if alone:  # whatever is in use is this job's
            held = max(held, ray.used.get(name, 0.0))
        if asked > total.get(name, 0.0) - held + 1e-9:
            needs.append(_Need(name, asked, total.get(name, 0.0), held))
    return max(needs, key=lambda need: (need.name == "GPU", need.asked - need.had), default=None)


def _reason(group: PlacementGroup, need: _Need | None, ray: RayFacts, *, impossible: bool) -> str:
    who = f"Placement group {group.name or group.id} of job {group.created_by_job}"
    since = f"has been pending for {quantity(group.age_seconds / 60, Unit.NUMBER)} min"
    if need is not None:
        own = f", {need.own:g} of which the job's own actors hold" if need.own else ""
        what = f"it asks for {need.asked:g} {need.name} and the cluster has {need.had:g}{own}"
    elif impossible:
        largest = max(group.bundles, key=lambda bundle: sum(bundle.values()), default={})
        asked = ", ".join(f"{amount:g} {name}" for name, amount in largest.items())
        what = f"no node can hold a bundle of {asked}"
    else:
        leaked = sum(other.asked().get("GPU", 0.0) for other in ray.groups if other.leaked)
        asked = ", ".join(f"{amount:g} {name}" for name, amount in sorted(group.asked().items(), reverse=True))
        what = f"it asks for {asked}, which the cluster has but others hold"
        what += f", {leaked:g} GPUs of it by leaked groups of jobs that are over" if leaked else ""
    end = "it will never be placed, and the job waits for ever" if impossible else "the job waits in silence"
    return f"{who} {since}: {what}; {end}."
