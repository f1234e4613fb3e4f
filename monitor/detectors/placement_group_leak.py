"""Placement group leak: a job that is over still holds GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import MachineDetector, Settings, setting
from monitor.facts import Facts, PlacementGroup
from monitor.model import DetectorSpec, Severity, Status, Verdict
from monitor.units import Unit, quantity

BLOCKED = "ray_placement_group_blocked_gpus"
_SHOWN = 3
_MOST_KNOWN = 10_000


@dataclass(frozen=True, kw_only=True)
class PlacementGroupLeakSettings(Settings):
    """Limits of ``placement_group_leak``."""

    grace_seconds: float = setting(
        60.0, "s", "Time after the end of its creator's job for which a group is no leak yet: a launcher may be "
                   "cleaning up.")


SPEC = DetectorSpec(
    id="placement_group_leak",
    title="Placement group leak",
    severity=Severity.WARNING,
    required=(),
    facts=("ray",),
    machine=True,
    wake="The address of Ray's dashboard: verl-monitor serve --ray-address.",
    meaning="A detached placement group of a job that is over still exists. Ray keeps what it reserves for it, and "
            "nothing will ever give that back by itself.",
    impact="Its GPUs are idle and cannot be had. The next job waits for them without a message, since verl waits for "
           "its placement groups without a time-out, and one that asks for the same name fails.",
    diagnosis=(
        "verl-monitor placement-groups lists all groups with their age, their creator's job and whether that is over.",
        "ray list placement-groups --detail shows the same as Ray has it.",
        "Look how the job ended: a driver that is killed cleans nothing up.",
    ),
    actions=(
        "run `verl-monitor placement-groups --remove-leaked`, which shows what it would remove and asks",
        "let the launcher end jobs with SIGTERM and some time to clean up, before it kills them",
        "start the next job only then; with trainer.resume_mode=auto it goes on from the last checkpoint",
    ),
    misses="A group that is not detached, which Ray removes itself; one whose creator's job Ray has forgotten; a group "
           "that is meant to outlive its job is called a leak, too.",
    source="A killed driver leaves its detached group CREATED, while its job gets an end time (seen with Ray 2.60).",
    guide="3.3",
    panel=(BLOCKED,),
    rise_steps=2,
    clear_steps=2,
)


class PlacementGroupLeak(MachineDetector):
    """Groups that are detached and created, and whose creator's job has ended for longer than the grace.

    A false alarm would have somebody remove a group that is in use, so the job's end must be told by Ray itself; a
    cluster that does not answer changes nothing.

    >>> from monitor.facts import Facts, PlacementGroup, RayFacts
    >>> group = PlacementGroup(id="a", state="CREATED", detached=True, job_ended=True, bundles=({"GPU": 8.0},))
    >>> detector = PlacementGroupLeak()
    >>> for now in (0.0, 60.0):
    ...     verdict = detector.probed(Facts(time_seconds=now, ray=RayFacts(time_seconds=now, groups=(group,))))
    >>> verdict.status.name
    'WARNING'
    """

    spec = SPEC
    settings_type = PlacementGroupLeakSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(PlacementGroupLeakSettings, self._settings)
        self._since: dict[str, float] = {}  # group -> when it was first seen leaked

    def probed(self, facts: Facts) -> Verdict | None:
        """Judge the groups."""
        ray = facts.ray
        if ray is None or not ray.reachable:
            return None
        leaked = [group for group in ray.groups if group.leaked][:_MOST_KNOWN]
        self._since = {group.id: self._since.get(group.id, facts.time_seconds) for group in leaked}
        old = [g for g in leaked if facts.time_seconds - self._since[g.id] >= self._s.grace_seconds]
        blocked = sum(group.asked().get("GPU", 0.0) for group in old)
        if not old:
            return Verdict(Status.OK, signal=BLOCKED, value=0.0)
        total = ray.total().get("GPU", 0.0)
        waiting = sum(group.state == "PENDING" and not group.job_ended for group in ray.groups)
        return Verdict(
            Status.WARNING, score=1.0 + (blocked / total if total else 0.0), signal=BLOCKED, value=blocked,
            threshold=0.0, reason=_reason(old, blocked, total, waiting),
            evidence={"groups": float(len(old)), "blocked_gpus": blocked, "gpus": total, "waiting": float(waiting)})


def _reason(old: list[PlacementGroup], blocked: float, total: float, waiting: int) -> str:
    def told(group: PlacementGroup) -> str:
        held = ", ".join(f"{amount:g} {name}" for name, amount in sorted(group.asked().items(), reverse=True))
        return (f"{group.name or group.id} ({held}; job {group.created_by_job}, created "
                f"{quantity(group.age_seconds / 60, Unit.NUMBER)} min ago)")

    many = f" and {len(old) - _SHOWN} more" if len(old) > _SHOWN else ""
    plural = "s" if len(old) > 1 else ""
    end = f": {waiting} group(s) of living jobs wait at this moment." if waiting else \
        ": a job that needs them will wait without a message."
    return (f"{len(old)} placement group{plural} of jobs that are over still hold{'' if plural else 's'} "
            f"{blocked:g} of {total:g} GPUs, {'; '.join(map(told, old[:_SHOWN]))}{many}{end}")
