"""`verl-monitor placement-groups`: what is placed, what waits, what is leaked; and, asked for, its removal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from monitor import api
from monitor.facts import PlacementGroup, RayFacts
from monitor.machine_report import group_report
from monitor.probes import ray_admin
from monitor.probes.ray_state import RayState, ray_token

EXIT_GOOD, EXIT_LEAKED, EXIT_FAILED = 0, 1, 3
_REMOVED_SECONDS = 15.0


def add_arguments(parser: argparse.ArgumentParser, address: Callable[[str], str]) -> None:
    """The command's options. ``address``: checks one."""
    parser.add_argument("--ray-address", type=address, metavar="ADDRESS", default=os.environ.get("RAY_ADDRESS", "auto"),
                        help="HOST:PORT of the cluster's head, auto, or for a list alone its dashboard's URL (the "
                             "variable RAY_ADDRESS, else auto)")
    parser.add_argument("--remove-leaked", action="store_true", help=(
        "remove groups that are detached, CREATED and whose creator's job is over, after showing them and asking"))
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--format", choices=["text", "json"], default="text")


def run(arguments: argparse.Namespace) -> int:
    """List, and remove where asked to; the exit status: 0 none leaked (any more), 1 some are, 3 it failed."""
    address = arguments.ray_address
    if arguments.remove_leaked and address.startswith("http"):
        return _fail("--remove-leaked: expected HOST:PORT of the cluster's head (or auto), got the URL of a dashboard, "
                     "which can only be asked")
    try:
        dashboard = address if address.startswith("http") else ray_admin.ask(address)
        if not dashboard:
            return _fail(f"Ray at {address} has no dashboard (ray start --include-dashboard=true)")
        state = RayState(dashboard, time.time, lambda: ray_token(os.environ), seconds=15.0)
        facts = state.read()
        if not facts.reachable:
            return _fail(facts.detail)
        shown = _json if arguments.format == "json" else _text
        print(shown(facts))
        leaked = [group for group in facts.groups if group.leaked]
        if not leaked or not arguments.remove_leaked:
            return EXIT_LEAKED if leaked else EXIT_GOOD
        if not arguments.yes and not _agreed(leaked):
            print("Nothing was removed.", file=sys.stderr)
            return EXIT_LEAKED
        return _remove(address, state, {group.id for group in leaked})
    except ray_admin.RayError as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    print(f"verl-monitor: {message}", file=sys.stderr)
    return EXIT_FAILED


def _json(facts: RayFacts) -> str:
    return api.dumps({
        "address": facts.address, "truncated": list(facts.truncated), "resources": facts.total(), "used": facts.used,
        "placement_groups": [group_report(group) for group in facts.groups]}, indent=True).decode()


def _text(facts: RayFacts) -> str:
    total, used = facts.total(), facts.used
    have = ", ".join(f"{used[name]:g} of {total[name]:g} {name} in use" if name in used else f"{total[name]:g} {name}"
                     for name in ("GPU", "CPU") if name in total)
    lines = [f"Ray at {facts.address}: {have}"]
    if facts.truncated:
        lines.append(f"Ray cut the list of {', '.join(facts.truncated)}: there is more than this.")
    rows = [("STATE", "RESOURCES", "JOB", "AGE", "NAME")]
    rows += [(_state(g), _resources(g), f"{g.created_by_job or '-'}{' (over)' if g.job_ended else ''}",
              _age(g.age_seconds), g.name or g.id) for g in facts.groups]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines += ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
              for row in rows]
    leaked = [group for group in facts.groups if group.leaked]
    if not facts.groups:
        lines[-1] = "No placement groups."
    if leaked:
        gpus = sum(group.asked().get("GPU", 0.0) for group in leaked)
        lines.append(f"{len(leaked)} leaked, holding {gpus:g} GPUs for jobs that are over.")
    return "\n".join(lines)


def _state(group: PlacementGroup) -> str:
    if group.leaked:
        return "leaked"
    return f"pending ({group.scheduling})" if group.state == "PENDING" else group.state.lower()


def _resources(group: PlacementGroup) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(group.asked().items(), reverse=True))


def _age(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def _agreed(leaked: Sequence[PlacementGroup]) -> bool:
    names = ", ".join(group.name or group.id for group in leaked)
    try:
        return input(f"Remove {len(leaked)} group(s): {names}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _remove(address: str, state: RayState, chosen: set[str]) -> int:
    """Remove those of the chosen groups that are still leaked, and see that they are gone."""
    now = state.read()
    if not now.reachable:
        return _fail(f"{now.detail}; nothing was removed")
    groups = {group.id: group for group in now.groups if group.leaked and group.id in chosen}
    if groups:
        ray_admin.ask(address, list(groups))
    deadline = time.monotonic() + _REMOVED_SECONDS
    left = dict(groups)
    while left and time.monotonic() < deadline:
        after = state.read()
        if after.reachable:
            left = {group.id: group for group in after.groups if group.id in groups}
        if left:
            time.sleep(0.5)
    for id_, group in groups.items():
        word = "still there" if id_ in left else "removed"
        print(f"{word}: {group.name or id_} ({_resources(group)})", file=sys.stderr)
    for _ in range(len(chosen) - len(groups)):
        print("left alone: a group that is not leaked any more", file=sys.stderr)
    return EXIT_FAILED if left else EXIT_GOOD
