"""Recorded facts: GPU readings of a real run, and what Ray said. For the demo and for tests; marked as recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monitor.facts import Gpu, GpuState, NodeFacts, Process
from monitor.probes.processes import ProcessInfo, role_of


def read_series(path: Path, node: str = "recorded") -> Iterator[NodeFacts]:
    """Readings of one node, a JSON object a line, with the times that they have there, in seconds.

    Each line holds ``time`` and ``gpus``, a GPU its ``memory_v2`` (bytes), ``util`` (percent), ``power_mw``, ``temp``,
    ``sm_clock`` (MHz), ``ecc`` and ``processes`` with ``pid``, ``used`` (bytes) and ``title``.

    Raises:
        ValueError: a line is something else; the message names it.
    """
    titles: dict[int, tuple[str, float]] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                now = float(row["time"])
                for gpu in row["gpus"]:
                    for process in gpu["processes"]:
                        known = titles.get(process["pid"])
                        if known is None or known[0] != process["title"]:
                            titles[process["pid"]] = (process["title"], now)
                gpus = tuple(_gpu(gpu, titles) for gpu in row["gpus"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: expected a reading with time and gpus, got {error!r}") from None
            yield NodeFacts(node=node, time_seconds=now, gpu_state=GpuState.OK, gpus=gpus, recorded=True)


def _gpu(gpu: dict[str, Any], titles: dict[int, tuple[str, float]]) -> Gpu:
    infos = {p["pid"]: ProcessInfo(p["pid"], 0, p["title"]) for p in gpu["processes"]}
    memory = gpu["memory_v2"]
    return Gpu(
        index=gpu["index"], uuid=gpu["uuid"], name=gpu["name"], memory_total=memory["total"],
        memory_used=memory["used"], memory_reserved=memory["reserved"], memory_free=memory["free"],
        utilization=gpu["util"]["gpu"] / 100, power_watts=gpu["power_mw"] / 1000,
        power_limit_watts=gpu["power_limit_mw"] / 1000, temperature_celsius=float(gpu["temp"]),
        sm_clock_hertz=gpu["sm_clock"] * 1e6, ecc_uncorrected=gpu["ecc"], processes=tuple(
            Process(pid=p["pid"], title=p["title"], role=role_of(p["pid"], infos),
                    title_since_seconds=titles[p["pid"]][1], gpu_bytes=p["used"]) for p in gpu["processes"]))
