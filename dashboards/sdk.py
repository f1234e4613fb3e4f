"""What the dashboards use of grafana-foundation-sdk, imported in one place.

The SDK warns while it defines the builders of the classic dashboard model, because a newer resource format exists
(``dashboardv2``). The classic one is what every Grafana reads from a provisioned file, so the warning does not
apply; it is silenced for this import alone, by its text, and no other warning with it.
"""

from __future__ import annotations

import warnings
from typing import Generic, TypeVar

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Prefer using dashboardv2", category=DeprecationWarning)
    from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, table, timeseries

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = [
    "Builder",
    "Given",
    "JSONEncoder",
    "PromQueryFormat",
    "common",
    "common_model",
    "dashboard",
    "model",
    "prometheus",
    "stat",
    "statetimeline",
    "table",
    "timeseries",
]


_T = TypeVar("_T")


class Given(Builder[_T], Generic[_T]):
    """A builder of what is built already: a panel gets its id and place only after it was made."""

    def __init__(self, value: _T) -> None:
        self._value = value

    def build(self) -> _T:
        """The value as it is."""
        return self._value
