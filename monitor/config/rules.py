"""What the configuration says of a single run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from monitor.config.reading import BY_ID, make_detector
from monitor.config.settings import Config, RunRule
from monitor.detectors import Detector
from monitor.model import RunEnded, RunPhase, SourceEvent


class RunRules:
    """Names and detectors by run. Every matching rule holds, a later one over an earlier one.

    Rules match the name that the source gives. A run that another one's new name is given to is one run with it, as
    if two sources had brought it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._given = {rule.name: rule.match for rule in config.runs if rule.name}  # new name -> the source's
        self._names = lru_cache(4096)(self._find_names)

    def rename(self, event: SourceEvent) -> SourceEvent:
        """The event under the names that its run is given."""
        name, project = self._names(event.run)
        if project is not None and not isinstance(event, (RunEnded, RunPhase)):
            event = replace(event, project=project)
        return event if name == event.run else replace(event, run=name)

    def detectors(self, run: str) -> Sequence[Detector]:
        """New detectors for the run that is now called so."""
        rules = self._matching(self._given.get(run, run))
        return self._chosen(rules, machine=False)

    def machine_detectors(self, name: str) -> Sequence[Detector]:
        """New detectors for the machine room of that name."""
        return self._chosen(self._matching(name), machine=True)

    def _chosen(self, rules: Sequence[RunRule], *, machine: bool) -> list[Detector]:
        chosen = []
        for id_, detector in BY_ID.items():
            if detector.spec.machine is not machine:
                continue
            values = dict(self._config.detectors.get(id_, {}))
            for rule in rules:
                values |= rule.detectors.get(id_, {})
            if values.get("enabled", True):
                chosen.append(make_detector(detector, values))
        return chosen

    def _matching(self, run: str) -> list[RunRule]:
        return [rule for rule in self._config.runs if fnmatchcase(run, rule.match)]

    def _find_names(self, run: str) -> tuple[str, str | None]:
        name, project = run, None
        for rule in self._matching(run):
            name, project = rule.name or name, rule.project or project
        return name, project
