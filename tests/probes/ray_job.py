"""A driver of a Ray job that asks for what a test needs, says so, and then waits to be ended.

``python -m tests.probes.ray_job ADDRESS WHAT...``: ``leak`` a detached group of two GPUs, ``live`` another one of one
GPU, ``large`` a group of more GPUs than there are, ``dead`` an actor that dies, ``broken`` one that cannot be made.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(address: str, wanted: Sequence[str]) -> None:
    """Ask for all that is wanted."""
    import ray
    from ray.util.placement_group import placement_group

    ray.init(address=address, namespace="job", log_to_driver=False)

    remote: Any = ray.remote(num_cpus=0)

    class WorkerDict:
        def ready(self) -> None:
            return

        def end(self) -> None:
            os._exit(3)

    class FakeHttpServer:
        def __init__(self) -> None:
            raise RuntimeError("engine core died")

    keep = []
    if "leak" in wanted:
        group = placement_group([{"GPU": 1, "CPU": 1}] * 2, name="global_poolverl_group_2:0", lifetime="detached")
        assert group.wait(20)
    if "live" in wanted:
        group = placement_group([{"GPU": 1}], name="live_group", lifetime="detached")
        assert group.wait(20)
    if "large" in wanted:
        keep.append(placement_group([{"GPU": 64}], name="too_large"))
    if "dead" in wanted:
        kind = remote(WorkerDict)
        worker, other = kind.options(name="abWorkerDict_0:0").remote(), kind.remote()
        ray.get([worker.ready.remote(), other.ready.remote()])
        worker.end.remote()
        keep.append(other)
    if "broken" in wanted:
        keep.append(remote(FakeHttpServer).remote())
    print("ready", flush=True)
    time.sleep(1e6)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
