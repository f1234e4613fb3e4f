"""The configuration as text: an example with everything in it, and what was understood of a file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

import yaml

from monitor.config.reading import BY_ID
from monitor.config.settings import SOURCES, Address, Config, RunRule

_WIDTH = 120
_HEAD = """\
# Configuration of `verl-monitor serve --config FILE`; `verl-monitor config --check FILE` checks it.
# Everything may be left out. What is commented out with # alone is the default, or a sample where there is none.
# An option of the command line goes before the environment, and that before this file. In the environment a setting is
# called VERL_MONITOR_SERVE_ and its path, with __ between levels: VERL_MONITOR_SERVE_LIMITS__MAX_RUNS=100."""


def example() -> str:
    """A file with every setting, its meaning and its default, all commented out: it says what no file says."""
    return "\n".join([_HEAD, *_settings(Config, "")]) + "\n"


def _settings(settings: type[Any], indent: str) -> Iterator[str]:
    for f in _told(settings):
        kind = f.metadata["kind"]
        if "shown" in f.metadata:
            yield from ["", *_prose(f, indent), f"{indent}#{f.name}: {f.metadata['shown']}"]
            continue
        yield from ["", *_prose(f, indent), f"{indent}{f.name}:"]
        if isinstance(kind, type):
            yield from list(_settings(kind, indent + "  "))[1:]
        elif kind == "sources":
            for source in SOURCES.values():
                yield from _sample(source, indent + "  ")
        elif kind == "rules":
            yield from _sample(RunRule, indent + "  ")
        else:
            yield from _detectors(indent + "  ")


def _told(settings: type[Any]) -> list[Field[Any]]:
    """What a file can say; a token that was read is not among it."""
    return [f for f in fields(settings) if f.metadata]


def _sample(settings: type[Any], indent: str) -> Iterator[str]:
    """An item of a list."""
    start = "- "
    for f in _told(settings):
        shown = f.metadata.get("shown")
        yield from _prose(f, indent)
        if shown is not None:
            yield f"{indent}#{start}{f.name}: {shown}"
        else:
            id_, detector = next(iter(BY_ID.items()))
            setting = fields(detector.settings_type)[0]
            yield f"{indent}#  {f.name}: {{{id_}: {{enabled: true, {setting.name}: {setting.default:g}}}}}"
        start = "  "


def _detectors(indent: str) -> Iterator[str]:
    for id_, detector in BY_ID.items():
        yield from [f"{indent}# {detector.spec.title}. enabled: false leaves it out.", f"{indent}{id_}:",
                    f"{indent}  #enabled: true"]
        for f in fields(detector.settings_type):
            yield from [*_prose(f, indent + "  "), f"{indent}  #{f.name}: {f.default:g}"]


def _prose(f: Field[Any], indent: str) -> list[str]:
    unit = f" ({f.metadata['unit']})" if "unit" in f.metadata else ""
    text = f.metadata["help"] + unit if f.metadata["help"] else ""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def understood(config: Config) -> str:
    """What is in force, as a file that says the same. The token is not shown."""
    return str(yaml.safe_dump(_plain(config), sort_keys=False, width=10**6))


def _plain(value: Any) -> Any:
    """A setting as YAML knows it; what has no value is left out."""
    if isinstance(value, Address):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in _told(type(value))
                if getattr(value, f.name) is not None}
    return value
