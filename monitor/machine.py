"""The machine room as the engine keeps it: the probes' last facts, and the detectors that judge machines.

It stands beside the runs and not among them: a placement group that cannot be placed is found before any run has
shown a step. Its name takes the place of a run's on /metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monitor.detectors import Detector
from monitor.facts import Facts
from monitor.model import Incident, Severity
from monitor.watches import DetectorCost, DetectorView, Watches, worst


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineView:
    """An immutable picture of the machine room."""

    name: str
    facts: Facts
    detectors: tuple[DetectorView, ...]
    incidents: tuple[Incident, ...]

    @property
    def severity(self) -> Severity | None:
        """Worst confirmed finding."""
        return worst(self.detectors)


class Machine:
    """The machine room. ``name``: ``node:HOST`` or ``ray:HOST:PORT``."""

    def __init__(self, name: str, facts: Facts, detectors: Sequence[Detector],
                 costs: Mapping[str, DetectorCost]) -> None:
        self.name, self.facts = name, facts
        self._kinds: frozenset[str] = frozenset()  # of facts that there were at any time
        self._watches = Watches(name, detectors, costs, facts.time_seconds)

    def probe(self, facts: Facts) -> bool:
        """Judge what the probes see; true when a judgement changed."""
        self.facts, self._watches.heard = facts, facts.time_seconds
        self._kinds |= facts.kinds
        return self._watches.probe(facts, facts.kinds, 0)

    def view(self) -> MachineView:
        """An immutable picture, made of copies. What judges GPUs is left out where there never was one: no machine has
        to have them, and a detector that is blind for good says nothing. So with Ray."""
        detectors = tuple(item for item in self._watches.views(0) if not self._kinds.isdisjoint(item.spec.facts))
        return MachineView(name=self.name, facts=self.facts, detectors=detectors, incidents=self._watches.incidents)
