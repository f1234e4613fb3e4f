"""A row as the trainer logs it, made safe for another thread in a few microseconds.

Only what is certainly a number in the host's memory is taken: Python's numbers, numpy's scalars, plain CPU tensors of
one element. Anything else is dropped and counted. To ask an unknown object for its value could copy from a GPU and so
wait for it, or start a collective (DTensor), in the middle of a training step.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

Scalar = float | int | None

MAX_KEYS = 4096
MAX_DEPTH = 12
MAX_TEXT = 500

counts: Counter[str] = Counter()
"""What was lost in this process, by reason."""

_DROP: Any = object()
_PLAIN_ROWS, _LOOK_EVERY = 4, 32
_AS_THEY_ARE: set[type] = {float, int, bool, type(None)}
"""Types whose values are immutable, in the host's memory, and hold nothing else alive; numpy's join as they are met."""
_SECRETS = ("password", "secret", "api_key", "apikey", "access_key", "secret_key", "auth_token", "hf_token",
            "credentials")


class Snapshots:
    """Copies the rows of one run, in the trainer's thread.

    What a trainer logs is some hundred plain numbers, and rows of one size have the same keys. To look at the type of
    every value takes most of the time, so rows of a size that was plain several times are looked at now and then only:
    what is no number is sorted out in ``settled`` all the same, and held until then, for a quarter of a second.
    """

    def __init__(self) -> None:
        self._plain: dict[int, int] = {}  # size of a row -> how many in a row held plain numbers only

    def take(self, data: Any) -> dict[str, Any]:
        """The row, for ``settled``."""
        if type(data) is not dict or len(data) > MAX_KEYS:
            return _copied(data)
        size = len(data)
        seen = self._plain.get(size, 0)
        if seen < _PLAIN_ROWS or not seen % _LOOK_EVERY:
            if not {*map(type, data.values())} <= _AS_THEY_ARE:
                self._plain.pop(size, None)
                return _copied(data)
            if len(self._plain) > MAX_KEYS:
                self._plain.clear()
        self._plain[size] = seen + 1
        return data.copy()


def _copied(data: Any) -> dict[str, Any]:
    """The numbers of a row, value for value."""
    kind = type(data)
    # dict's own method, so that a subclass of dict cannot make this slow or raise
    rows = list(dict.items(data)) if issubclass(kind, dict) else list(dict(data).items())
    out: dict[str, Any] = {}
    dropped = 0
    for key, value in rows:
        kind = type(value)
        if kind not in _AS_THEY_ARE:
            value = _number(kind, value)
            if value is _DROP:
                dropped += 1
                continue
        if not issubclass(type(key), str):
            dropped += 1
            continue
        out[str.__str__(key)] = value
        if len(out) >= MAX_KEYS:
            dropped += len(rows) - MAX_KEYS
            break
    if dropped:
        counts["value"] += dropped
    return out


def settled(values: dict[str, Any]) -> dict[str, Scalar]:
    """A snapshot in Python's own numbers. Runs in a thread of ours."""
    out: dict[str, Scalar] = {}
    for key, value in values.items():
        if value is not None and type(value) not in (float, int):
            value = _number(type(value), value)
        if value is _DROP or not isinstance(key, str):
            counts["value"] += 1
        else:
            out[str.__str__(key)] = value
    return out


def _number(kind: type, value: Any) -> Any:
    """A plain number, or ``_DROP``. Never runs code of an unknown class."""
    try:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and (issubclass(kind, numpy.generic) or (kind is numpy.ndarray and value.size == 1)):
            number = _plain_number(value.item())
            if number is not _DROP and kind.__module__ == "numpy" and issubclass(kind, (numpy.number, numpy.bool_)):
                _AS_THEY_ARE.add(kind)
            return number
        if issubclass(kind, float):
            return float.__pos__(value)
        if issubclass(kind, int):
            return int.__pos__(value)
        if torch is not None and kind is torch.Tensor:
            if not value.is_cuda and value.device.type == "cpu" and value.numel() == 1:
                return _plain_number(value.item())
        elif kind.__module__ in ("decimal", "fractions"):
            return float(value)
    except Exception:  # noqa: BLE001 - an odd value costs itself, not its row
        return _DROP
    return _DROP


def _plain_number(value: Any) -> Any:
    if type(value) in (float, int):
        return value
    if type(value) is bool:
        return int(value)
    return float(value) if type(value).__name__ == "longdouble" else _DROP


def step_number(step: Any) -> int:
    """A step as int; raises for what is none."""
    if type(step) is int:
        return step
    number = _number(type(step), step)
    if number is _DROP or number != int(number):
        raise ValueError(f"not a step: {type(step).__name__}")
    return int(number)


def plain(value: Any, depth: int = 0) -> Any:
    """A configuration as JSON values, secrets left out. Runs once a run."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): "***" if item and str(key).lower().endswith(_SECRETS) else plain(item, depth + 1)
                for key, item in list(value.items())[:MAX_KEYS]}
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "ListConfig":
        return [plain(item, depth + 1) for item in list(value)[:MAX_KEYS]]
    return str(value)[:MAX_TEXT]
