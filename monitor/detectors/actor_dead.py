"""Actor dead: a part of a living job has died, and the others may wait for it for ever."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import MachineDetector, Settings, setting
from monitor.facts import Actor, Facts
from monitor.model import DetectorSpec, Severity, Status, Verdict
from monitor.units import Unit, quantity

ACTORS = "ray_actors/dead"
_VERL = re.compile(r".*WorkerDict.*|TaskRunner.*|AgentLoop.*|RewardLoop.*|.*Trainer|.*HttpServer|.*Server(?:Adapter)?"
                   r"|.*Rollouter|.*Replica")
_SHOWN = 3
_MOST_KNOWN = 10_000


@dataclass(frozen=True, kw_only=True)
class ActorDeadSettings(Settings):
    """Limits of ``actor_dead``."""

    grace_seconds: float = setting(
        20.0, "s", "Time after a death in which the job may come down by itself, as it should.")
    no_step_seconds: float = setting(
        600.0, "s", "Time after a death without any run having shown a step, from which it is critical.")


SPEC = DetectorSpec(
    id="actor_dead",
    title="Actor dead",
    severity=Severity.CRITICAL,
    required=(),
    facts=("ray",),
    machine=True,
    wake="The address of Ray's dashboard: verl-monitor serve --ray-address.",
    meaning="A Ray actor of a job that still runs has died and will not be restarted, and nobody ended it on purpose.",
    impact="The others may wait for it without end: all resources stay reserved, no demand is open, and Ray's status "
           "looks as it should.",
    diagnosis=(
        "Ray's reason stands in the finding; `ray list actors --filter state=DEAD --detail` has all of it.",
        "The worker's own log: `ray logs actor --id ID`, or worker-*.err in the session's logs on its node.",
        "An exit without a reason is often the kernel's OOM killer: `dmesg` on the node, verl_node_memory_available_"
        "bytes.",
    ),
    actions=(
        "stop the job and resume it from its last checkpoint (trainer.resume_mode=auto)",
        "out of memory on the host: lower data.dataloader_num_workers or actor_rollout_ref.rollout.agent.num_workers, "
        "or turn param_offload off",
        "a rollout engine that fails at its start: lower actor_rollout_ref.rollout.gpu_memory_utilization and check "
        "tensor_model_parallel_size against the GPUs that each node has",
    ),
    misses="Actors of jobs that are not verl's; an actor that lives but does nothing (that is rollout_stall).",
    source="Ray tells the reason of a death: killed by its job, out of scope and owner died are ends on purpose.",
    guide="3.3",
    panel=("ray_actors",),
    rise_steps=1,
    clear_steps=2,
)


class ActorDead(MachineDetector):
    """Dead actors of living jobs of verl, without those that were ended on purpose.

    A warning; critical when no run has shown a step although the death is long past, since a run that has is judged by
    its steps. A false alarm would page for every job that is torn down, so a death counts only once its job has
    outlived it.

    >>> from monitor.facts import Facts, RayFacts
    >>> actor = Actor(id="a", class_name="WorkerDict", state="DEAD", death="its process has died")
    >>> detector = ActorDead()
    >>> for now in (0.0, 60.0):
    ...     verdict = detector.probed(Facts(time_seconds=now, ray=RayFacts(time_seconds=now, actors=(actor,))))
    >>> verdict.status.name
    'WARNING'
    """

    spec = SPEC
    settings_type = ActorDeadSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(ActorDeadSettings, self._settings)
        self._since: dict[str, float] = {}  # actor -> when its death was first seen

    def probed(self, facts: Facts) -> Verdict | None:
        """Judge the actors."""
        ray = facts.ray
        if ray is None or not ray.reachable:
            return None
        ours = {actor.job for actor in ray.actors if _VERL.fullmatch(actor.class_name)}
        dead = [actor for actor in ray.actors if actor.state == "DEAD" and not actor.intended and not actor.job_ended
                and actor.job in ours][:_MOST_KNOWN]
        now = facts.time_seconds
        self._since = {actor.id: self._since.get(actor.id, now) for actor in dead}
        old = [actor for actor in dead if now - self._since[actor.id] >= self._s.grace_seconds]
        if not old:
            return Verdict(Status.OK, signal=ACTORS, value=0.0)
        age = now - min(self._since[actor.id] for actor in old)
        stuck = age >= self._s.no_step_seconds and not facts.stepping
        return Verdict(
            Status.CRITICAL if stuck else Status.WARNING, score=1.0 + len(old) / 10 + (1.0 if stuck else 0.0),
            signal=ACTORS, value=float(len(old)), threshold=0.0, reason=_reason(old, age, stuck=stuck),
            evidence={"dead_actors": float(len(old)), "seconds": age})


def _reason(old: list[Actor], age: float, *, stuck: bool) -> str:
    def told(actor: Actor) -> str:
        name = f" {actor.name}" if actor.name else ""
        restarts = f", restarted {actor.restarts} times before" if actor.restarts else ""
        return f"{actor.class_name}{name} of job {actor.job}{restarts} ({actor.death or 'Ray gives no reason'})"

    many = f" and {len(old) - _SHOWN} more" if len(old) > _SHOWN else ""
    end = (f"no step has come for {quantity(age, Unit.SECONDS)} since: the job waits for it" if stuck else
           "the job still runs and may wait for it")
    return f"{'; '.join(map(told, old[:_SHOWN]))}{many} died {quantity(age, Unit.SECONDS)} ago; {end}."
