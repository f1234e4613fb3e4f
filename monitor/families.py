"""Metric families while they are put together: by name, in order of first use."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family


class Families:
    """Families by name, in order of first use, so that all samples of one stand together."""

    def __init__(self) -> None:
        self._by_name: dict[str, Family] = {}

    def gauge(self, name: str, help: str, labels: Sequence[str]) -> Family:  # noqa: A002 - as in prometheus_client
        """The gauge of that name."""
        family = self._by_name.get(name)
        if family is None:
            family = self._by_name[name] = GaugeMetricFamily(name, help, labels=labels)
        return family

    def counter(self, name: str, help: str, labels: Sequence[str]) -> Family:  # noqa: A002
        """The counter of that name."""
        family = self._by_name.get(name)
        if family is None:
            family = self._by_name[name] = CounterMetricFamily(name, help, labels=labels)
        return family

    def all(self) -> list[Family]:
        """All of them."""
        return list(self._by_name.values())


def add(family: Family, labels: Sequence[str], value: float) -> None:
    """A sample for a family."""
    family.add_metric(labels, value)  # type: ignore[attr-defined]  # only the subclasses that gauge() makes have it
