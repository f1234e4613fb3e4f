"""A tree, checked, as a configuration. Everything that is wrong is told at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from monitor.config.settings import NAME, NUMBER, SOURCES, SWITCH, Config, Kind, RunRule
from monitor.config.tree import Item, Place, Problems, child, closest, overlay, read
from monitor.detectors import ALL_DETECTORS, Detector

BY_ID: dict[str, type[Detector]] = {detector.spec.id: detector for detector in ALL_DETECTORS}
RESERVED_NAMES = ("stdin", "push")
"""Names of sources that are called nothing else."""


def load(path: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> Config:
    """The configuration of a file (None: there is none) and of the environment's ``VERL_MONITOR_SERVE_*``.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems = Problems()
    tree = read(path, problems) if path is not None else Item(Place("environment", 0, ""), None)
    tree = overlay(tree, environment, problems)
    config = _Reading(problems).config(tree)
    problems.check()
    return config


def make_detector(detector: type[Detector], values: Mapping[str, float | bool]) -> Detector:
    """A detector with these settings.

    Raises:
        ValueError, ArithmeticError: it cannot work with them.
    """
    return detector(detector.settings_type(**{name: v for name, v in values.items() if name != "enabled"}))


class _Reading:
    """What is wrong is noted and left out, so that the rest is still checked."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._detectors: dict[str, dict[str, float | bool]] = {}  # settings for all runs
        self._ways: dict[str, Callable[[Item, str], Any]] = {
            "texts": self._texts, "sources": self._sources, "detectors": self._detector_values, "rules": self._rules}

    def config(self, tree: Item) -> Config:
        return Config(**self._section(Config, tree, ""))

    def _wrong(self, item: Item, path: str, expected: str) -> None:
        self._problems.add(item.place, path, f"expected {expected}, got {item}")

    def _value(self, kind: Any, item: Item, path: str) -> Any:
        """A value of this kind; None when it is none."""
        if isinstance(kind, str):
            return self._ways[kind](item, path)
        if not isinstance(kind, Kind):
            return kind(**self._section(kind, item, path))
        if isinstance(item.value, str):
            try:
                return kind.parse(item.value, item.place.folder)
            except (ValueError, LookupError):
                pass
        self._wrong(item, path, kind.expected)
        return None

    def _section(self, settings: type[Any], item: Item, path: str) -> dict[str, Any]:
        """The settings given for a class of them, without those that are wrong."""
        known = {f.name: f.metadata["kind"] for f in fields(settings) if f.metadata}
        return self._values(known, item, path)

    def _values(self, known: Mapping[str, Any], item: Item, path: str) -> dict[str, Any]:
        values = {}
        given = self._entries(item, path, "settings")
        for name, kind in known.items():  # in this order: rules need what holds for all runs
            value = self._value(kind, given[name], child(path, name)) if name in given else None
            if value is not None:
                values[name] = value
        for name in given.keys() - known.keys():
            self._unknown(given[name], path, name, list(known))
        if "token_file" in values:
            values["token"] = self._token(values["token_file"], given["token_file"].place, child(path, "token_file"))
        return values

    def _unknown(self, item: Item, path: str, name: str, known: list[str]) -> None:
        # A setting at the wrong level is the likeliest mistake with variables.
        elsewhere = [f"{f.name}.{name}" for f in fields(Config) if f.metadata and isinstance(f.metadata["kind"], type)
                     and name in {inner.name for inner in fields(f.metadata["kind"])}]
        end = f"; did you mean {elsewhere[0]}?" if elsewhere and not path else closest(name, known)
        self._problems.add(item.place, child(path, name), f"expected a known setting, got an unknown one{end}")

    def _entries(self, item: Item, path: str, what: str) -> dict[str, Item]:
        if item.value is None or isinstance(item.value, dict):
            return item.value or {}
        self._wrong(item, path, f"a mapping of {what}")
        return {}

    def _items(self, item: Item, path: str, what: str) -> list[tuple[str, Item]]:
        if item.value is None or isinstance(item.value, list):
            return [(f"{path}[{index}]", inner) for index, inner in enumerate(item.value or [])]
        self._wrong(item, path, f"a list of {what}")
        return []

    def _mappings(self, item: Item, path: str, what: str) -> Iterator[tuple[str, Item, dict[str, Item]]]:
        for at, inner in self._items(item, path, what):
            if isinstance(inner.value, dict):
                yield at, inner, inner.value
            else:
                self._wrong(inner, at, "a mapping of settings")

    def _texts(self, item: Item, path: str) -> tuple[str, ...] | None:
        if item.value == []:
            self._wrong(item, path, "a list that is not empty")
        found = [self._value(NAME, inner, at) for at, inner in self._items(item, path, "names")]
        return tuple(text for text in found if text is not None) or None

    def _token(self, name: str, place: Place, path: str) -> str:
        try:
            with open(name, encoding="utf-8") as file:
                token = file.read(65536).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            self._problems.add(place, path, f"expected a file that can be read, got {name!r} ({reason})")
            return ""
        if not token:
            self._problems.add(place, path, f"expected a file with a token in it, got an empty one: {name!r}")
        return token

    def _sources(self, item: Item, path: str) -> tuple[Any, ...]:
        found = []
        names = set(RESERVED_NAMES)
        piped = False
        for at, inner, given in self._mappings(item, path, "sources"):
            told = [key for key in SOURCES if key in given]
            if len(told) != 1:
                got = " and ".join(told) or ", ".join(child("", key) for key in given) or "nothing"
                self._problems.add(inner.place, at, f"expected one of {', '.join(SOURCES)}, got {got}")
                continue
            values = self._section(SOURCES[told[0]], inner, at)
            if "run" in values and os.path.isdir(values.get("file", "")):
                self._wrong(given["run"], f"{at}.run", "no name for a directory: it names the run of one file")
            if values.get("stdin") is False or ("stdin" in values and piped):
                self._wrong(given["stdin"], f"{at}.stdin", "true, in one source at most")
            piped |= "stdin" in values
            if values.get("name") in names:
                self._wrong(given["name"], f"{at}.name", "a name that no other source has")
            names.add(values.get("name", ""))
            if told[0] in values:
                found.append(SOURCES[told[0]](**values))
        return tuple(found)

    def _detector_values(self, item: Item, path: str) -> dict[str, dict[str, float | bool]]:
        """Settings by detector. Those of all runs are read first, and are what those of a rule are added to."""
        found: dict[str, dict[str, float | bool]] = {}
        for name, inner in self._entries(item, path, "detectors").items():
            at = child(path, name)
            if name not in BY_ID:
                self._problems.add(inner.place, at, f"expected a detector, got an unknown one{closest(name, BY_ID)}")
                continue
            known = {f.name: Kind(f"{NUMBER.expected} ({f.metadata['unit']})", NUMBER.parse)
                     for f in fields(BY_ID[name].settings_type)} | {"enabled": SWITCH}
            values = self._values(known, inner, at)
            try:
                make_detector(BY_ID[name], {**self._detectors.get(name, {}), **values})
                found |= {name: values} if values else {}
            except (ValueError, ArithmeticError) as error:
                self._problems.add(inner.place, at, f"expected settings that it can work with, got {values} ({error}); "
                                                    f"known are {', '.join(known)}")
        if path == "detectors":
            self._detectors = found
        return found

    def _rules(self, item: Item, path: str) -> tuple[RunRule, ...]:
        found = []
        names: dict[str, str] = {}  # name given -> run that it is given to
        for at, inner, given in self._mappings(item, path, "rules"):
            values = self._section(RunRule, inner, at)
            if "match" not in given:
                self._problems.add(inner.place, f"{at}.match", "expected a run's name or a pattern, got nothing")
            if "match" not in values:
                continue
            if "name" in values:
                if any(character in values["match"] for character in "*?["):
                    self._wrong(given["name"], f"{at}.name", "no name where match is a pattern: it names one run")
                elif names.setdefault(values["name"], values["match"]) != values["match"]:
                    self._wrong(given["name"], f"{at}.name", "a name that no other run is given")
            found.append(RunRule(**values))
        return tuple(found)
