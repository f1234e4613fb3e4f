"""What a metric is: one declaration, from which names, units, exposition, panels and documentation come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from monitor.units import Unit


class NonFinite(Enum):
    """What it means when a metric is not a number."""

    FATAL = "the model or its optimizer has diverged"
    SUSPECT = "the batch is broken; fatal when it lasts"
    UNDEFINED = "the statistic is undefined for this batch, for example a correlation of constants"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family on /metrics and the verl keys that feed it.

    ``keys`` maps a verl key to the values of ``labels``. A key may hold placeholders, ``timing_s/{stage}``:
    each takes one or more path segments, and its name stands as ``{stage}`` in the label values.
    ``scale`` multiplies verl's value to reach the base unit; ``key_scale`` overrides it for single keys.
    ``zero_is_unset``: a key that some version writes as exactly 0 when it does not measure it; another key of
    the same series with a value then wins.
    ``panel`` is the dashboard group, ``log`` whether its natural axis is logarithmic.
    """

    name: str
    unit: Unit
    help: str
    panel: str
    keys: Mapping[str, tuple[str, ...]]
    labels: tuple[str, ...] = ()
    scale: float = 1.0
    key_scale: Mapping[str, float] | None = None
    zero_is_unset: bool = False
    nonfinite: NonFinite = NonFinite.UNDEFINED
    log: bool = False

    @property
    def machine(self) -> bool:
        """Whether the probes feed it and no key of verl's."""
        return not self.keys

    def series(self, label_values: tuple[str, ...]) -> str:
        """Series id for the given label values."""
        if not label_values:
            return self.name
        return f"{self.name}/" + "|".join(value.replace("|", "_") for value in label_values)
