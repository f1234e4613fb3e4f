"""One detector alone in an engine, and rows to feed it with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

from monitor.detectors import Detector
from monitor.engine import Engine
from monitor.model import Incident
from tests.helpers import feed, rows

Row = tuple[int, dict[str, object]]


def found(kind: type[Detector], data: Iterable[Row]) -> list[Incident]:
    """Everything that the detector raises on these rows when no other is there."""
    engine = Engine(make_detectors=lambda _: [kind()])
    feed(engine, data)
    return list(engine.snapshot().runs[0].incidents)


def noisy(path: Path, seed: int) -> list[Row]:
    """A recorded run whose every float is off by five percent."""
    rng = random.Random(seed)
    return [(step, {key: value * rng.gauss(1, 0.05) if isinstance(value, float) else value
                    for key, value in data.items()}) for step, data in rows(path)]


def made(steps: int, *, seed: int = 0, noise: float = 0.03, entropy: Callable[[int], float] = lambda t: 0.45,
         score: Callable[[int], float] = lambda t: 0.5, length: Callable[[int], float] = lambda t: 400.0,
         cut: Callable[[int], float] = lambda t: 0.01, scale: float = 1.0) -> list[Row]:
    """A run of these means with noise; ``scale`` multiplies rewards."""
    rng = random.Random(seed)
    return [(t + 1, {
        "actor/pg_loss": rng.gauss(0, 0.01), "actor/entropy": entropy(t) * rng.gauss(1, 0.03),
        "critic/score/mean": scale * (score(t) + rng.gauss(0, noise)), "critic/score/max": scale,
        "critic/score/min": 0.0, "critic/advantages/max": 1.8, "response_length/mean": length(t) * rng.gauss(1, 0.05),
        "response_length/max": 1024.0, "response_length/clip_ratio": min(1.0, cut(t) * rng.gauss(1, 0.1)),
    }) for t in range(steps)]


def renamed(data: Iterable[Row], old: str, new: str) -> list[Row]:
    """The same rows with one key under another name."""
    return [(step, {new if key == old else key: value for key, value in row.items()}) for step, row in data]
