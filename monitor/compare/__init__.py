"""Two recorded runs beside each other: `verl-monitor compare`.

``rows`` reads the logs, ``figures`` chooses what is compared over which steps, ``interval`` tells a change from noise,
``report`` and ``picture`` show it, ``command`` is the command line.
"""

from monitor.compare.command import add_arguments, run

__all__ = ["add_arguments", "run"]
