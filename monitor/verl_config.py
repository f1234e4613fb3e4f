"""A run's resolved configuration, as verl was given it: flat, bounded, and asked by verl's own keys."""

from __future__ import annotations

from collections.abc import Mapping

MAX_KEYS = 3000
"""Keys kept of a configuration; verl 0.9.1 has 930."""

MAX_TEXT = 200
MAX_LIST = 20

Value = str | int | float | bool | None


def flatten(values: Mapping[str, object]) -> dict[str, Value]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``. Of lists only short ones of plain values are kept, ``[1, 2]`` as
    ``"1,2"``; what is beyond the caps is cut."""
    flat: dict[str, Value] = {}
    pending: list[tuple[str, object]] = [("", values)]
    while pending and len(flat) < MAX_KEYS:
        path, value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend((f"{path}.{key}" if path else str(key), inner) for key, inner in value.items())
        elif value is None or isinstance(value, (bool, int, float)):
            flat[path] = value
        elif isinstance(value, str):
            flat[path] = value[:MAX_TEXT]
        elif isinstance(value, (list, tuple)) and len(value) <= MAX_LIST and all(
                isinstance(item, (str, int, float)) for item in value):
            flat[path] = ",".join(map(str, value))[:MAX_TEXT]
    return flat


def algorithm_of(config: Mapping[str, Value]) -> str:
    """The algorithm as people call it: ``ppo`` for verl's ``gae`` estimator, which is the one with a critic; else the
    estimator's own name, such as ``grpo``. Empty where the configuration does not say."""
    estimator = config.get("algorithm.adv_estimator")
    if not isinstance(estimator, str):
        return ""
    # An enumeration's member is printed as AdvantageEstimator.GAE by some versions.
    name = estimator.rpartition(".")[2].lower()
    return "ppo" if name == "gae" else name
