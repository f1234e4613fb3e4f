"""Facts as plain values, for JSON between processes and in recordings, and back.

Times travel relative to the sender's now, since the clocks of two hosts differ. What a newer or older version does not
know is left out; what is of the wrong type is a ValueError.
"""

from __future__ import annotations

import types
import typing
from collections import abc
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from monitor.facts import Gpu, NodeFacts, Process, RayFacts

T = TypeVar("T")
F = TypeVar("F", NodeFacts, RayFacts)


def pack(facts: F, now: float) -> dict[str, Any]:
    """Facts as plain values, their times relative to ``now``."""
    values: dict[str, Any] = _plain(asdict(shifted(facts, -now)))
    return values


def unpack_node(data: object, now: float) -> NodeFacts:
    """What ``pack`` made of a node, with times on the clock that shows ``now``.

    Raises:
        ValueError: it is something else.
    """
    return shifted(build(NodeFacts, data), now)


def unpack_ray(data: object, now: float) -> RayFacts:
    """What ``pack`` made of a cluster, with times on the clock that shows ``now``.

    Raises:
        ValueError: it is something else.
    """
    return shifted(build(RayFacts, data), now)


def shifted(facts: F, by: float) -> F:
    """The same facts with all their times moved."""
    facts = replace(facts, time_seconds=facts.time_seconds + by)
    if isinstance(facts, NodeFacts):
        return replace(facts, processes=_moved(facts.processes, by), gpus=tuple(_gpu(gpu, by) for gpu in facts.gpus))
    return facts


def _moved(processes: tuple[Process, ...], by: float) -> tuple[Process, ...]:
    return tuple(replace(process, title_since_seconds=process.title_since_seconds + by) for process in processes)


def _gpu(gpu: Gpu, by: float) -> Gpu:
    return gpu if gpu.processes is None else replace(gpu, processes=_moved(gpu.processes, by))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def build(kind: type[T], data: object) -> T:
    """A frozen dataclass of ``monitor.facts`` from plain values.

    Raises:
        ValueError: they are of another type, or something that is needed is missing.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"expected an object with the fields of {kind.__name__}, got {str(data)[:60]}")
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    try:
        return kind(**{name: _value(hints[name], value, name) for name, value in data.items() if name in hints})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(hint: Any, value: Any, name: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _value(next(h for h in inner if h is not type(None)), value, name)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(inner[0], item, name) for item in value)
    if origin is abc.Mapping and isinstance(value, Mapping):
        return {str(key): _value(inner[1], item, name) for key, item in value.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value)
    if isinstance(hint, type):
        if issubclass(hint, Enum):
            return hint(value)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
            return value
    raise ValueError(f"{name}: expected {getattr(hint, '__name__', hint)}, got {str(value)[:60]!r}")
