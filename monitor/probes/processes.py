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
"""Processes kept, newest first; kernel threads, of which a large host has thousands, are not among them."""

MAX_TITLE = 200
_DEEPEST = 20

# Classes of verl 0.2 to 0.9.1, and vLLM's and TensorRT-LLM's own worker on Ray.
_TRAINER = re.compile(r"ray::\w*WorkerDict.*|ray::FusedWorker.*|"
                      r"ray::(?:Async|Detach|Tinker)?(?:Actor|Critic|Training)\w*Worker\b.*")
_ROLLOUT = re.compile(r"ray::\w*(?:Server|Replica|Rollouter)(?![a-z]).*|ray::(?:\w*Rollout\w*Worker|v?LLM\w*|SGLang\w*|"
                      r"CheckpointEngineWorker|RayWorkerWrapper)\b.*|VLLM::.*|sglang::.*")
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
    """Visible processes, by pid; those that end meanwhile are left out. Empty where there is no such directory."""
    found: dict[int, ProcessInfo] = {}
    try:
        pids = [int(name) for name in os.listdir(root) if name.isdigit()]
    except OSError:
        return found
    for pid in sorted(pids, reverse=True):
        info = _read(root, pid)
        if info is not None:
            found[pid] = info
        if len(found) >= MAX_PROCESSES:
            break
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
    title = title_of(line)
    return ProcessInfo(pid, parent, title) if title else None


def title_of(command_line: bytes) -> str:
    """What a process calls itself. Of a program that sets no title only its name is told, and the script that a Python
    runs: arguments may hold a key or a password."""
    words = [" ".join(word.decode("utf-8", "replace").split()) for word in command_line.split(b"\0")]
    words = [word for word in words if word]
    if not words:
        return ""  # a kernel thread, or a process that has ended
    # Ray overwrites the command line with its title and leaves the rest empty.
    told = words if words[0].startswith(_ENGINES) else words[:1] + _script(words)
    return " ".join(told)[:MAX_TITLE]


def _script(words: list[str]) -> list[str]:
    if not words[0].rpartition("/")[2].startswith("python"):
        return []
    for place, word in enumerate(words[1:], 1):
        if word == "-m":
            return words[place:place + 2]
        if not word.startswith("-"):
            return [word]
        if word[:2] in ("-c", "-W", "-X"):  # code, or an option with a value
            return []
    return []


def role_of(pid: int, processes: Mapping[int, ProcessInfo]) -> Role:
    """Which part of a verl job a process is, by its own title or the nearest ancestor's that tells.

    A ``WorkerDict`` holds actor, critic and reference in one process, so these cannot be told apart from outside: its
    role is ``trainer``. So it is with a rollout up to verl 0.7.0, which lives there, too. An engine's workers are its
    server's children. The server of a reward model has the same title as one of the rollout and counts as such.
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
