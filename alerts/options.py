"""What an installation may want to be different in the generated files."""

from __future__ import annotations

from dataclasses import dataclass

from monitor.detectors import ALL_DETECTORS
from monitor.model import DetectorSpec

SPECS: tuple[DetectorSpec, ...] = tuple(detector.spec for detector in ALL_DETECTORS)
"""The specs of all detectors, causes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Addresses, names and times.

    ``monitor_url``: where a reader's browser finds the monitor. It serves the runbooks too, unless
    ``runbook_base`` names another place for them. ``webhook``: what Alertmanager posts to. ``job``: the monitor's job
    in Prometheus. ``interval``: of the rule groups; empty means Prometheus's own ``evaluation_interval``, so that a
    short one makes for quick pages. ``keep_firing_for``: bridges scrapes that fail (seen in public: up to 90 s) and
    restarts of the monitor.
    """

    monitor_url: str = "http://127.0.0.1:9560"
    runbook_base: str = ""
    webhook: str = "http://127.0.0.1:9561"
    job: str = "verl-monitor"
    interval: str = ""
    keep_firing_for: str = "2m"

    def runbook_url(self, alert: str) -> str:
        """Address of an alert's runbook."""
        base = self.runbook_base or f"{self.monitor_url.rstrip('/')}/runbooks"
        return f"{base.rstrip('/')}/{alert}"

    def page_url(self, run: str) -> str:
        """Address of a run's page."""
        return f"{self.monitor_url.rstrip('/')}/runs/{run}"

    @property
    def machine_url(self) -> str:
        """Address of the machine room's page."""
        return f"{self.monitor_url.rstrip('/')}/machine"


DEFAULTS = Options()


def seconds(time: str) -> int:
    """A Prometheus duration of one unit, such as ``90s`` or ``2m``.

    Raises:
        ValueError: it is none.
    """
    number, unit = time[:-1], time[-1:]
    if not number.isdigit() or unit not in ("s", "m", "h"):
        raise ValueError(f"expected a time such as 90s or 2m, got {time!r}")
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]
