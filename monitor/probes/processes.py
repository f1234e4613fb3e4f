"""Processes of this machine by what they call themselves, and which part of a verl job each is.

Ray sets the title of its workers to class and running method, ``ray::WorkerDict.critic_train_mini_batch``; vLLM and
SGLang name their engine processes. Another PID namespace hides them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from monitor.facts import Role

MAX_PROCESSES = 4_000
MAX_TITLE = 200
_DEEPEST = 20

_TRAINER = re.compile(r"ray::\w*WorkerDict.*|ray::(?:Actor|Critic|ActorRollout)\w*Worker.*")
_ROLLOUT = re.compile(r"ray::\w*(?:Server|Replica|Rollouter)\b.*|ray::v?LLM.*|VLLM::.*|vllm\b.*|sglang::.*|sglang\b.*",
                      re.I)
_REWARD = re.compile(r"ray::\w*Reward.*")
_DRIVER = re.compile(r"ray::(?:TaskRunner|FullyAsync|OneStep|AgentLoop)\w*.*")
_ROLES = ((_TRAINER, Role.TRAINER), (_REWARD, Role.REWARD), (_ROLLOUT, Role.ROLLOUT), (_DRIVER, Role.DRIVER))
_ENGINES = ("ray::", "VLLM::", "sglang::")
_IDLE = re.compile(r"ray::(?:IDLE|DashboardAgent|RuntimeEnvAgent|NodeActor|RayletWrapper)\b.*")


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A visible process."""

    pid: int
    parent: int
    title: str


def scan(root: str = "/proc") -> dict[int, ProcessInfo]:
    """All visible processes, by pid; those that end meanwhile are left out. Empty where there is no such directory."""
    found: dict[int, ProcessInfo] = {}
    try:
        pids = [int(name) for name in os.listdir(root) if name.isdigit()]
    except OSError:
        return found
    for pid in sorted(pids)[-MAX_PROCESSES:]:
        info = _read(root, pid)
        if info is not None:
            found[pid] = info
    return found


def _read(root: str, pid: int) -> ProcessInfo | None:
    try:
        with open(f"{root}/{pid}/cmdline", "rb") as file:
            line = file.read(4096)
        with open(f"{root}/{pid}/stat", "rb") as file:
            # The name in brackets may hold anything, so what follows is counted from the last bracket.
            parent = int(file.read(4096).rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
    # Ray overwrites the command line with its title and leaves the rest empty.
    title = " ".join(line.replace(b"\0", b" ").decode("utf-8", "replace").split())
    return ProcessInfo(pid, parent, title[:MAX_TITLE])


def role_of(pid: int, processes: Mapping[int, ProcessInfo]) -> Role:
    """Which part of a verl job a process is, by its own title or the nearest ancestor's that tells.

    A ``WorkerDict`` holds actor, critic and reference in one process, so these cannot be told apart from outside: its
    role is ``trainer``. An engine's workers are its server's children.
    """
    info = processes.get(pid)
    if info is None:
        return Role.UNATTRIBUTED
    seen = 0
    current: ProcessInfo | None = info
    while current is not None and seen < _DEEPEST:
        for pattern, role in _ROLES:
            if pattern.fullmatch(current.title):
                return role
        current, seen = processes.get(current.parent), seen + 1
    return Role.OTHER


def of_a_job(processes: Mapping[int, ProcessInfo]) -> list[ProcessInfo]:
    """What Ray and the rollout engines run, without what only waits for work."""
    return [info for info in processes.values() if info.title.startswith(_ENGINES) and not _IDLE.fullmatch(info.title)]
