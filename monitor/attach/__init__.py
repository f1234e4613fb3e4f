"""What runs inside verl's process: standard library only, never raises, never blocks, starts nothing by itself.

``pip install verl-monitor`` and one environment variable are all there is to do:

- ``VERL_MONITOR_URL=http://host:9560`` sends every logged row to a service;
- ``VERL_MONITOR_LISTEN=0.0.0.0:8000`` serves /metrics, with all detectors, from the trainer itself.

Importing this module hooks verl's ``Tracking`` when one of them is set. verl loads it through the entry point group
``verl.plugins`` (0.9 and later) or ``VERL_USE_EXTERNAL_MODULES=monitor.attach`` (0.6.1 and later); for older ones there
is ``hook/sitecustomize.py``. An error on the way is told on stderr and costs the monitoring, never the training.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from monitor.attach import importhook

if TYPE_CHECKING:
    from collections.abc import Mapping

    from monitor.attach.recorder import Recorder

__all__ = ["attach", "register"]


def register() -> None:
    """Hook verl's Tracking in this process, once; nothing happens when no variable asks for it."""
    if importhook.wanted():
        importhook.install()


def attach(*, project: str = "", experiment: str, config: Mapping[str, object] | None = None, url: str = "",
           listen: str = "") -> Recorder:
    """A recorder for a trainer of one's own: ``log(data, step)``, ``phase(name)``, ``finish(exit_code)``.

    ``url`` and ``listen`` stand in for the environment variables. With neither, and with VERL_MONITOR_DISABLE=1, the
    recorder takes everything and does nothing.
    """
    from monitor.attach.recorder import begin

    return begin(project, experiment, config, url=url, listen=listen)


try:
    register()
except Exception as _error:  # noqa: BLE001 - an import error here is fatal to verl
    sys.stderr.write(f"verl-monitor: not attached: {_error!r}\n")
