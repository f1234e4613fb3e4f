"""Where a run hangs: what the probes see of it, as one sentence that names the likeliest culprit or what is missing.

Evidence explains a stall of steps; it never makes one and never vetoes one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from monitor.facts import Facts, Gpu, NodeFacts
from monitor.units import Unit, quantity

_MOST = 20


class Culprit(NamedTuple):
    """A part of a step that can hang: its name, verl's stage, and the names ``Class.method`` that show it."""

    name: str
    stage: str
    pattern: re.Pattern[str]


CULPRITS = (
    # Innermost first: what others wait for names the culprit, whoever waits does not.
    Culprit("reward scoring", "reward",
            re.compile(r".*Reward.*\.\w+|.*\.(?:compute_score|compute_rm_score|run_single)\w*", re.I)),
    Culprit("weight sync", "update_weights", re.compile(
        r".*\.\w*(?:update_weights|sync_rollout_weights|wake_up|sleep|load_weights|receive_weights)\w*"
        r"|.*Server\w*\.(?:load|resume|release)\w*")),
    Culprit("the rollout engine", "gen", re.compile(
        r".*(?:Server|Replica|Rollouter|vLLM|VLLM|SGLang|sglang)\w*\.\w*(?:generate|chat|complet)\w*"
        r"|.*WorkerDict\.\w*(?:rollout_generate|generate_sequences)\w*")),
    Culprit("checkpoint write", "save_checkpoint", re.compile(r".*\.\w*save_checkpoint\w*")),
    Culprit("the critic's update", "update_critic", re.compile(r".*WorkerDict\.\w*(?:critic_train|update_critic)\w*")),
    Culprit("the actor's update", "update_actor",
            re.compile(r".*WorkerDict\.\w*(?:update_actor|rollout_ref_update|actor_train)\w*")),
    Culprit("log-probabilities or values", "old_log_prob",
            re.compile(r".*WorkerDict\.\w*(?:log_prob|compute_values|infer)\w*")),
)
_BY_STAGE = {culprit.stage: culprit.name for culprit in CULPRITS} | {
    "ref": "log-probabilities or values", "values": "log-probabilities or values",
    "gen": "the rollout engine, or the reward scoring that newer versions of verl do in the same stage"}
_WAITS = re.compile(r"TaskRunner.*|AgentLoop.*|FullyAsync.*|OneStep.*")


class Activity(NamedTuple):
    """A method that has been running: ``Class.method``, since when, how often at once, where."""

    name: str
    since_seconds: float
    running: int
    node: str
    pid: int


class Seen(NamedTuple):
    """What the probes saw that bears on a stall. ``missing``: what could not be looked at; ``shared``: runs there."""

    activities: tuple[Activity, ...] = ()
    gpus: str = ""
    dead: str = ""
    pending: str = ""
    missing: tuple[str, ...] = ()
    shared: int = 1
    numbers: tuple[tuple[str, float], ...] = ()


def look(facts: Facts, job: str) -> Seen:
    """What is to be kept of the facts; little, whatever the cluster's size. ``job``: the run's Ray job, empty where it
    is not known."""
    ray = facts.ray if facts.ray and facts.ray.reachable else None
    nodes = [node for node in facts.nodes if node.reachable]
    activities = _activities(facts, job)
    missing = []
    if ray is None:
        missing.append("Ray's running tasks and actors (--ray-address)")
    elif ray.tasks is None and not activities:
        missing.append("Ray's running tasks")
    if not any(node.processes or node.gpus for node in nodes):
        missing.append("the processes of its nodes (verl-monitor on the same host, or --ray-address)")
    dead, pending = "", ""
    if ray is not None:
        lost = [a for a in ray.actors if a.state == "DEAD" and not a.intended and not a.job_ended
                and (not job or a.job == job)]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            dead = f"{lost[0].class_name} {lost[0].name}".strip() + f"{more} ({lost[0].death or 'no reason given'})"
        waiting = [g for g in ray.groups if g.state == "PENDING" and not g.job_ended and (
            not job or g.created_by_job == job)]
        if waiting:
            asked = ", ".join(f"{amount:g} {name}" for name, amount in sorted(waiting[0].asked().items(), reverse=True))
            pending = f"{waiting[0].name or waiting[0].id}, which asks for {asked}"
    gpus, numbers = _gpus(nodes)
    return Seen(activities, gpus, dead, pending, tuple(missing), max(1, facts.active_runs), numbers)


def _activities(facts: Facts, job: str) -> tuple[Activity, ...]:
    """Running methods, oldest first: Ray's tasks where they are known, and what processes call themselves."""
    found: dict[str, Activity] = {}

    def add(name: str, since: float, node: str, pid: int) -> None:
        known = found.get(name)
        if known is None:
            found[name] = Activity(name, since, 1, node, pid)
        else:
            oldest = known if known.since_seconds <= since else Activity(name, since, 1, node, pid)
            found[name] = oldest._replace(running=known.running + 1)

    ray = facts.ray
    if ray is not None and ray.reachable:
        for task in ray.tasks or ():
            if not job or task.job == job:
                add(task.name, ray.time_seconds - task.age_seconds, task.node, task.pid)
    told = set(found)
    for node in facts.nodes:
        if not node.reachable:
            continue
        pids = {p.pid: p for p in (*node.processes, *(q for gpu in node.gpus for q in gpu.processes or ()))}
        for process in pids.values():
            name = process.title.removeprefix("ray::").split(" ", 1)[0]
            if process.title.startswith("ray::") and "." in name and name not in told:
                add(name, process.title_since_seconds, node.node, process.pid)
    ranked = sorted(found.values(), key=lambda activity: activity.since_seconds)
    named = [activity for activity in ranked if not _WAITS.fullmatch(activity.name)]
    return tuple((named + [activity for activity in ranked if _WAITS.fullmatch(activity.name)])[:_MOST])


def _gpus(nodes: Iterable[NodeFacts]) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The GPUs in a few words, and the largest utilisation with its power."""
    gpus = [gpu for node in nodes for gpu in node.gpus if not gpu.lost and (gpu.memory_used or 0) > 2**28]
    shown = [gpu for gpu in gpus if gpu.utilization is not None and gpu.power_watts is not None]
    if not shown:
        return "", ()
    busy = max(shown, key=lambda gpu: gpu.utilization or 0.0)
    share, power = busy.utilization or 0.0, busy.power_watts or 0.0
    numbers = (("gpu_utilization", share), ("gpu_power_watts", power))
    return _gpu_words(busy, len(shown)), numbers


def _gpu_words(gpu: Gpu, count: int) -> str:
    share, power, limit = gpu.utilization or 0.0, gpu.power_watts or 0.0, gpu.power_limit_watts or 0.0
    of = f" of {limit:.0f}" if limit else ""
    which = f"the busiest of {count} GPUs" if count > 1 else "the GPU"
    what = f"{which} is at {share:.0%} utilisation and {power:.0f}{of} W"
    # A kernel that spins keeps the utilisation at 100 % while next to no power is drawn.
    if share >= 0.9 and limit and power < 0.35 * limit:
        return f"{what}, which is how a kernel that waits for ever looks"
    return f"{what}, so nothing computes" if share <= 0.05 else what


def explain(seen: Seen, phase: str, silence: float, now: float) -> tuple[str, dict[str, float]]:
    """One or two sentences that name the likeliest culprit, and the numbers for it.

    A method counts when it has been running for at least half of the silence: what began later did not cause it.
    """
    old = [activity for activity in seen.activities if now - activity.since_seconds >= 0.5 * silence]
    numbers = dict(seen.numbers)
    share = f" ({seen.shared} runs share these machines, so this may be another one's)" if seen.shared > 1 else ""
    if seen.dead:
        return f"Most likely a dead actor: {seen.dead}.{_more(seen)}{share}", numbers
    if seen.pending:
        return f"Most likely resources: it waits for the placement group {seen.pending}.{_more(seen)}{share}", numbers
    for culprit in CULPRITS:
        held = [activity for activity in old if culprit.pattern.fullmatch(activity.name)]
        if held:
            first, count = held[0], sum(activity.running for activity in held)
            age = now - first.since_seconds
            numbers |= {"running_tasks": float(count), "oldest_task_seconds": age}
            many = f", {count} at once" if count > 1 else ""
            where = f" (pid {first.pid})" if first.pid else ""
            stage = f", in the stage {culprit.stage}" if not phase else ""
            return (f"Most likely {culprit.name}{stage}: {first.name}{where} has been running for "
                    f"{quantity(age, Unit.SECONDS)}{many}.{_more(seen)}{share}", numbers)
    if phase in _BY_STAGE:
        return f"By its stage it is {_BY_STAGE[phase]}.{_more(seen)}{_lack(seen)}{share}", numbers
    if old:
        return (f"Running for as long: {', '.join(activity.name for activity in old[:3])}.{_more(seen)}{_lack(seen)}"
                f"{share}", numbers)
    return f"{_more(seen)}{_lack(seen)}".strip(), numbers


def _more(seen: Seen) -> str:
    return f" {seen.gpus[0].upper()}{seen.gpus[1:]}." if seen.gpus else ""


def _lack(seen: Seen) -> str:
    return f" To tell more, the monitor lacks {' and '.join(seen.missing)}." if seen.missing else ""
