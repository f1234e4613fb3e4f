"""Checks of the environment that a run will meet: PyTorch and CUDA, Ray and its placement groups.

Whatever may hang runs in a process of its own with a deadline, ended by its pid.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from monitor.preflight.check import Check, Result, error, good, skipped, warning
from monitor.preflight.setup import Setup
from monitor.probes.ray_state import RayState, ray_token

RAY_ADDRESS = "preflight.ray_address"
"""Key under which the command puts the cluster's address."""

DEADLINE_SECONDS = 60.0
_OLDEST_RAY = (2, 41)

_TORCH = """
import json, torch
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}))
"""
_DRIVER = """
import json, pynvml
pynvml.nvmlInit()
print(json.dumps({"driver": pynvml.nvmlSystemGetDriverVersion(), "cuda": pynvml.nvmlSystemGetCudaDriverVersion()}))
"""
# CPU 0.001: a group that asks for nothing is refused, and this one hinders nobody.
_PLACE = """
import json, sys, time
import ray
from ray.util.placement_group import placement_group, remove_placement_group
ray.init(address=sys.argv[1] if len(sys.argv) > 1 else "local", log_to_driver=False, logging_level=40,
         include_dashboard=None if len(sys.argv) > 1 else False)
begun = time.monotonic()
group = placement_group([{"CPU": 0.001}])
placed = group.wait(timeout_seconds=15)
told = {"placed": bool(placed), "seconds": time.monotonic() - begun, "resources": ray.cluster_resources()}
remove_placement_group(group)
print(json.dumps(told))
"""


def _asked(program: str, *arguments: str, seconds: float = DEADLINE_SECONDS) -> Mapping[str, Any] | str:
    """What a program printed as JSON, in a process of its own; or why there is nothing."""
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"no answer within {seconds:.0f} s"
    try:
        return dict(json.loads(out.strip().rpartition("\n")[2]))
    except (ValueError, TypeError):
        return (err.strip().rpartition("\n")[2] or f"exit status {process.returncode}")[:200]


def _version_of(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version(package))[:3])
    except importlib.metadata.PackageNotFoundError:
        return ()


def _cuda(setup: Setup) -> Result:
    if not _version_of("torch"):
        return skipped("PyTorch is not installed here (run this in the job's environment)")
    torch = _asked(_TORCH)
    if isinstance(torch, str):
        return error(f"PyTorch cannot be imported: {torch}", "the wheel for this driver's CUDA, from PyTorch's index")
    built = str(torch["cuda"] or "")
    if not built:
        return warning(f"PyTorch {torch['torch']} is built without CUDA", "a wheel of PyTorch's CUDA index")
    driver = _asked(_DRIVER)
    if isinstance(driver, str):
        return skipped(f"the driver's CUDA ({driver}); PyTorch {torch['torch']} is built for CUDA {built}")
    has = int(driver["cuda"]) // 1000
    told = f"PyTorch {torch['torch']} is built for CUDA {built}, the driver {driver['driver']} has {has}"
    # A driver runs what was built for its own major version and for older ones.
    if int(built.partition(".")[0]) > has:
        return error(told, f"a driver for CUDA {built}, or the PyTorch wheel for CUDA {has}")
    if not torch["gpus"]:
        return error(f"{told}, and PyTorch sees no GPU", "CUDA_VISIBLE_DEVICES, the container's --gpus")
    return good(f"{told}, {torch['gpus']} GPU(s) seen")


def _ray_version(setup: Setup) -> Result:
    version = _version_of("ray")
    if not version:
        return skipped("Ray is not installed here (run this in the job's environment)")
    told = f"Ray {'.'.join(map(str, version))}"
    if setup.version >= (0, 7) and version < _OLDEST_RAY:
        return error(f"{told}, and this verl wants 2.41 or newer", "pip install 'ray[default]>=2.41'")
    return good(told)


def _placed(setup: Setup) -> Result:
    if not _version_of("ray"):
        return skipped("Ray is not installed here (run this in the job's environment)")
    address = setup.text(RAY_ADDRESS)
    if address.startswith("http"):
        return skipped("a cluster to place a group on (--ray-address HOST:PORT)")
    told = _asked(_PLACE, *([address] if address else []))
    where = address or "a Ray of its own"
    if isinstance(told, str):
        return error(f"a placement group could not be tried on {where}: {told}", "start Ray, or mend its address")
    if not told["placed"]:
        return error(f"a placement group of next to nothing was not placed on {where} within 15 s",
                     "verl-monitor placement-groups: what waits, and what is leaked")
    has = {name: float(told["resources"].get(name, 0.0)) for name in ("GPU", "CPU")}
    needed = float(setup.gpus)
    if address and has["GPU"] < needed:
        return error(f"{where} has {has['GPU']:g} GPUs, and the configuration wants {needed:g}: its placement group is "
                     "never placed, and verl waits without a time-out",
                     "trainer.nnodes and trainer.n_gpus_per_node, or more nodes")
    return good(f"a placement group was placed on {where} in {told['seconds']:.1f} s")


def _stale(setup: Setup) -> Result:
    address = setup.text(RAY_ADDRESS)
    if not address:
        return good("no cluster is given (--ray-address), so there is nothing left on it")
    from monitor.probes import ray_admin

    try:
        dashboard = address if address.startswith("http") else ray_admin.ask(address)
    except ray_admin.RayError as failed:
        return skipped(str(failed))
    if not dashboard:
        return skipped(f"the dashboard of {address}")
    facts = RayState(dashboard, time.time, lambda: ray_token(os.environ), seconds=15.0).read()
    if not facts.reachable:
        return skipped(facts.detail)
    leaked = [group for group in facts.groups if group.leaked]
    if leaked:
        gpus = sum(group.asked().get("GPU", 0.0) for group in leaked)
        return error(f"{len(leaked)} placement group(s) of jobs that are over hold {gpus:g} GPUs",
                     "verl-monitor placement-groups --remove-leaked")
    return good(f"no placement group of {len(facts.groups)} is left of a job that is over")


def available(name: str) -> bool:
    """Whether a package is installed here."""
    return bool(_version_of(name))


CHECKS = (
    Check(id="torch_cuda", title="PyTorch against the driver's CUDA", guide="1.1", run=_cuda,
          why="A wheel for a newer CUDA than the driver's fails deep in the first kernel, with an error about "
              "something else.", applies="all; the guide's CUDA 12.1 with PyTorch 2.3.1 is of verl 0.2's time",
          source="CUDA runs what was built for the driver's major version or an older one"),
    Check(id="ray_version", title="Ray's version", guide="1.2", run=_ray_version,
          why="verl uses Ray's newer calls.",
          applies="verl 0.7 on wants 2.41 or newer; the guide's warning of 2.35 and later no longer holds",
          source="verl 0.9.1's requirements; the live probe below is what counts"),
    Check(id="placement_group", title="A placement group, tried", guide="1.2", run=_placed,
          why="verl waits for its placement groups without a time-out and without a message.", applies="all",
          source="a group of 0.001 CPU is placed within 15 s and removed again"),
    Check(id="stale_groups", title="Placement groups left over", guide="3.3", run=_stale,
          why="What a job that is over still holds, this one will wait for.", applies="all",
          source="detached, created, and its creator's job has ended"),
)
