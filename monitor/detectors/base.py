"""What every detector is: a specification, frozen settings, and a pure judgement per step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from monitor.facts import Facts
from monitor.model import DetectorSpec, Observation, Verdict
from monitor.verl_config import Value


def setting(default: float, unit: str, help: str) -> Any:  # noqa: A002 - the field's own word
    """A field of a detector's settings, with its unit and meaning; documentation is made from them."""
    return field(default=default, metadata={"unit": unit, "help": help})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a detector's frozen settings."""


class Detector(ABC):
    """Judges one run, one step at a time.

    Pure: no clock, no I/O, no logging, no reset of its own. The state is bounded and picklable, and a step costs
    the same however long the run is. The caller isolates exceptions and applies hysteresis.
    """

    spec: ClassVar[DetectorSpec]
    settings_type: ClassVar[type[Settings]] = Settings

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings if settings is not None else self.settings_type()

    @abstractmethod
    def update(self, observation: Observation) -> Verdict | None:
        """Judge a step. None when the row holds nothing that this detector watches: the last verdict stands."""

    def tick(self, now: float) -> Verdict | None:
        """Judge the passing of time; ``now`` is on the clock of ``Observation.time_seconds``. None: no opinion."""
        return None

    def entered(self, phase: str, time_seconds: float) -> None:  # noqa: B027 - most detectors have nothing to do
        """The run entered a stage of its step; empty: it left one."""

    def configured(self, config: Mapping[str, Value]) -> None:  # noqa: B027 - most detectors have nothing to do
        """The run's resolved configuration became known: verl's keys with dots between levels, and their values."""

    def probed(self, facts: Facts) -> Verdict | None:
        """The probes have looked again. None: no opinion."""
        return None

    def restarted(self, time_seconds: float) -> None:  # noqa: B027 - most detectors have nothing to do
        """The run's log was begun (again) at this time. Baselines stay: a resumed run is still the same run."""


class MachineDetector(Detector):
    """Judges a machine or a cluster by what the probes see. The rest of a detector's contract holds for it, too."""

    def update(self, observation: Observation) -> None:
        """No row is a machine's."""
