"""Units: one place that knows a unit's Prometheus suffix and its Grafana id.

Prometheus wants base units spelled out at the end of a metric's name; Grafana wants its own short id.
Typing either by hand next to a metric is how panels end up wrong by a factor of 1000.
"""

from __future__ import annotations

from enum import Enum


class Unit(Enum):
    """A base unit. The value is ``(suffix, grafana, word)``.

    ``suffix``: what a metric name ends in, empty for a pure number;
    ``grafana``: the id Grafana's unit picker uses;
    ``word``: the unit as written behind a number in a sentence, empty for a pure number.
    """

    NUMBER = ("", "short", "")
    RATIO = ("ratio", "percentunit", "")
    NATS = ("nats", "short", "nats")
    TOKENS = ("tokens", "short", "tokens")
    TOKENS_PER_SECOND = ("tokens_per_second", "short", "tokens/s")
    SECONDS = ("seconds", "s", "s")
    BYTES = ("bytes", "bytes", "bytes")
    STEPS = ("steps", "short", "steps")
    WATTS = ("watts", "watt", "W")
    CELSIUS = ("celsius", "celsius", "°C")
    HERTZ = ("hertz", "hertz", "Hz")

    @property
    def suffix(self) -> str:
        """Ending of a Prometheus metric name, without the underscore."""
        return self.value[0]

    @property
    def grafana(self) -> str:
        """Grafana unit id."""
        return self.value[1]

    @property
    def word(self) -> str:
        """Unit as written in a sentence."""
        return self.value[2]


def quantity(value: float, unit: Unit = Unit.NUMBER) -> str:
    """A number with its unit for a sentence, three significant digits: ``1.25 nats``, ``3.2 GiB``.

    Bytes are shown in GiB because that is how GPU memory is talked about; everything else in its base unit.
    """
    if value != value:
        return "not a number"
    if unit is Unit.BYTES:
        return f"{value / 2**30:.3g} GiB"
    text = f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"{text} {unit.word}" if unit.word else text
