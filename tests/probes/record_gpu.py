"""Records what the node probe sees of two PyTorch processes that hold a known amount of GPU memory.

Needs a machine with a GPU and PyTorch: ``python -m tests.probes.record_gpu OUT.json``. This is how
``tests/data/gpu/h200.json`` was made; ``test_node.py`` holds the probe's figures against it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from monitor.probes.exchange import pack
from monitor.probes.node import NodeProbe

HOLDERS = {"ray::WorkerDict.actor_rollout_ref_update_actor": 6, "VLLM::EngineCore": 11}
"""Title of each process, and the GiB that it allocates."""

_HOLD = """
import sys, time, torch
held = torch.empty(int(sys.argv[1]) * 2**30, dtype=torch.uint8, device="cuda"); held.fill_(1)
a = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), flush=True)
while True:
    if sys.argv[2] == "busy":
        for _ in range(50): a @ a
        torch.cuda.synchronize()
    else:
        time.sleep(1)
"""
_ASKED = "uuid,memory.total,memory.used,memory.reserved,memory.free,utilization.gpu,power.draw,temperature.gpu"


def _smi(query: str) -> list[list[str]]:
    out = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                         check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]


def main(out: str) -> None:
    """Record."""
    probe = NodeProbe("node-a", time.time)
    told: dict[str, Any] = {"before": pack(probe.read(), time.time()), "smi_before": _smi(f"--query-gpu={_ASKED}")}
    holders: dict[str, subprocess.Popen[str]] = {}
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # under another name it finds no environment
    try:
        for number, (title, gib) in enumerate(HOLDERS.items()):
            command = ["bash", "-c", f'exec -a "{title}" "$0" "$@"', sys.executable, "-c", _HOLD, str(gib),
                       "busy" if number else "idle"]
            holders[title] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths)
        for title, process in holders.items():
            assert process.stdout is not None
            allocated, reserved = process.stdout.readline().split()
            told.setdefault("held", {})[title] = {"pid": process.pid, "allocated": int(allocated),
                                                  "reserved": int(reserved)}
        time.sleep(3)
        probe.read()
        time.sleep(2)
        begun = time.perf_counter()
        facts = probe.read()
        told["read_seconds"] = time.perf_counter() - begun
        told["node"] = pack(facts, time.time())
        told["smi"] = _smi(f"--query-gpu={_ASKED}")
        told["smi_processes"] = _smi("--query-compute-apps=pid,used_memory")
    finally:
        for process in holders.values():
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
    time.sleep(2)
    told["after"] = pack(probe.read(), time.time())
    probe.close()
    text = json.dumps(told, indent=1)
    for number, gpu in enumerate(facts.gpus):  # which one it was is nobody's business
        text = text.replace(gpu.uuid, f"GPU-00000000-0000-0000-0000-00000000000{number}")
    Path(out).write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
