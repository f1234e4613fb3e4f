"""A driver that connects once to a Ray cluster: to learn its dashboard's address, or to remove placement groups.

Run as ``python -m monitor.probes.ray_admin ADDRESS [GROUP_ID ...]`` in a process of its own, because Ray's client may
hang for minutes where a head has died. Prints one JSON object: ``{"dashboard": URL}`` or ``{"error": WHY}``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from monitor.probes.ray_driver import connect

DEADLINE_SECONDS = 60.0


class RayError(Exception):
    """The cluster could not be reached, or did not do what it was asked; the message says why."""


def ask(address: str, groups: Sequence[str] = ()) -> str:
    """Have these placement groups removed; the dashboard's address, empty where there is none.

    Raises:
        RayError: the cluster does not answer within a minute, or the package ray is missing here.
    """
    command = [sys.executable, "-m", "monitor.probes.ray_admin", address, *groups]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
                              timeout=DEADLINE_SECONDS)
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise RayError(f"Ray at {address} did not answer within {DEADLINE_SECONDS:.0f} s") from None
    except ValueError:
        raise RayError(f"Ray's client for {address} ended without a word (status {done.returncode})") from None
    if "error" in told:
        raise RayError(f"Ray at {address}: {told['error']}")
    url = str(told["dashboard"])
    return url if not url or url.startswith("http") else f"http://{url}"


def _remove(ray: Any, groups: Sequence[str]) -> None:
    from ray._raylet import PlacementGroupID  # the one way to name a group that this process did not make
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for group in groups:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))


def main(address: str, groups: Sequence[str]) -> int:
    """Connect, remove, tell; the exit status."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray, told = connect(address)
    if ray is not None:
        try:
            _remove(ray, groups)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds
            told = {"error": str(error)[:300]}
    print(json.dumps(told), file=out, flush=True)
    return 1 if "error" in told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
