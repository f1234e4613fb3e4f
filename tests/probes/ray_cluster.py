"""A real Ray cluster of several simulated nodes on this machine, in a process of its own.

``python -m tests.probes.ray_cluster FOLDER`` prints ``{"address": ..., "dashboard": ...}``, then obeys lines of its
standard input: ``add`` adds a node, ``kill`` kills the one added last, ``kill-head`` the head. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.helpers import free_port


def main(folder: str) -> None:
    """Serve the commands."""
    from ray.cluster_utils import Cluster

    os.makedirs("/tmp/ray", exist_ok=True)  # where it notes the address, whatever the folder
    cluster: Any = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 8, "num_gpus": 4, "include_dashboard": True, "dashboard_port": free_port(), "temp_dir": folder,
        "object_store_memory": 100 * 2**20})
    added: list[Any] = []
    print(json.dumps({"address": cluster.address, "dashboard": cluster.head_node.webui_url}), flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "add":
            added.append(cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=100 * 2**20))
        elif command == "kill":
            cluster.remove_node(added.pop(), allow_graceful=False)
        elif command == "kill-head":
            cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        print(json.dumps({"done": command}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
