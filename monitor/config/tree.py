"""A YAML file as a tree whose every part knows where it was written.

Only YAML's structure is used, not its types: what stands there is text until a setting says what it is. So
``name: on`` is a name, ``1e-3`` a number, and an environment variable is read just as the file is.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

MAX_FILE_BYTES = 2**20
PREFIX = "VERL_MONITOR_SERVE_"
_MAX_LEVELS = 8  # of a variable; no setting lies deeper


class ConfigError(Exception):
    """A configuration that cannot be used. ``errors``: everything that is wrong with it, a line each."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)


class Place(NamedTuple):
    """Where something was written. ``line`` is 0 for a variable; ``folder`` is what its relative paths start from."""

    source: str
    line: int
    folder: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Item(NamedTuple):
    """A part of the tree: nothing, text, a list, or a mapping. In a mapping its place is that of its key."""

    place: Place
    value: str | list[Any] | dict[str, Any] | None  # of Items: mypy knows no recursive named tuples

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return repr(self.value if len(self.value) <= 60 else self.value[:57] + "...")
        return "nothing" if self.value is None else "a list" if isinstance(self.value, list) else "a mapping"


class Problems:
    """Collects what is wrong, so that all of it is told at once."""

    def __init__(self) -> None:
        self._found: set[tuple[bool, int, str]] = set()

    def add(self, place: Place, path: str, message: str) -> None:
        """``path``: the setting, empty for the file as a whole."""
        self._found.add((place.line == 0, place.line, f"{place}: {path + ': ' if path else ''}{message}"))

    def __len__(self) -> int:
        return len(self._found)

    def check(self) -> None:
        """Raise what was found: the file's errors by line, then those of the environment.

        Raises:
            ConfigError: something was.
        """
        if self._found:
            raise ConfigError([text for _, _, text in sorted(self._found)])


def child(path: str, key: str) -> str:
    """Path of a setting within another, fit for a message whatever the key."""
    shown = key if key.isprintable() and key.split() == [key] and len(key) <= 60 else repr(key[:60])
    return f"{path}.{shown}" if path else shown


def closest(word: str, known: Collection[str]) -> str:
    """The end of a message about an unknown word."""
    near = difflib.get_close_matches(word, known, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def read(path: str | os.PathLike[str], problems: Problems) -> Item:
    """The tree of a file; keys that are there twice and the like go to ``problems``.

    Raises:
        ConfigError: the file cannot be read, or is no YAML.
    """
    name, folder = os.fspath(path), os.path.dirname(os.path.abspath(path))
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{name}: cannot be read: {error.strerror or error}"]) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"{name}: expected a file of at most {MAX_FILE_BYTES} bytes"])
    top = Place(name, 1, folder)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{name}:{line}: expected text in UTF-8, got the byte 0x{data[error.start]:02x}"]) from error
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        return Item(top, _content(node, "", top, problems, {}) if node is not None else None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        message = ", ".join(part for part in (error.context, error.problem) if part)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character {chr(error.character)!r} must not stand in it"
    except RecursionError:
        line, message = 1, "it is nested too deep, or within itself"
    except (ValueError, OverflowError) as error:  # PyYAML lets some through: \UFFFFFFFF, a huge version of YAML
        line, message = 1, str(error)
    raise ConfigError([f"{name}:{line}: expected YAML: {message}"])


def _content(node: yaml.Node, path: str, parent: Place, problems: Problems, known: dict[int, Any]) -> Any:
    """What an item holds. ``known``: what is done, since an anchor's node is met at each of its aliases."""
    if id(node) in known:
        return known[id(node)]
    place = parent._replace(line=node.start_mark.line + 1)
    if node.tag.startswith("!"):
        problems.add(place, path, f"expected no tags of one's own, got {node.tag}")
    content: Any
    if isinstance(node, yaml.ScalarNode):
        content = None if node.tag == "tag:yaml.org,2002:null" else node.value
    elif isinstance(node, yaml.SequenceNode):
        content = [Item(place._replace(line=n.start_mark.line + 1),
                        _content(n, f"{path}[{index}]", place, problems, known)) for index, n in enumerate(node.value)]
    else:
        content = {}
        for key, value in node.value:
            at = place._replace(line=key.start_mark.line + 1)
            if not isinstance(key, yaml.ScalarNode):
                problems.add(at, path, "expected the name of a setting, got a list or a mapping")
            elif key.value in content:
                first = content[key.value].place.line
                problems.add(at, child(path, key.value), f"expected once, got it again after line {first}")
            else:
                content[key.value] = Item(at, _content(value, child(path, key.value), at, problems, known))
    known[id(node)] = content
    return content


def overlay(tree: Item, environment: Mapping[str, str], problems: Problems) -> Item:
    """The tree with the environment's settings in it. An empty variable counts as not set."""
    for name in sorted(environment):
        if name.startswith(PREFIX) and environment[name]:
            keys = name[len(PREFIX):].lower().split("__", _MAX_LEVELS)
            leaf = Item(Place(name, 0, ""), environment[name])
            try:
                tree = _put(tree, keys, leaf)
            except ValueError as error:
                problems.add(leaf.place, ".".join(keys), str(error))
    return tree


def _put(item: Item, keys: Sequence[str], leaf: Item) -> Item:
    # Never in place: what an anchor stands for is shared.
    if not keys:
        return leaf
    inner = {} if item.value is None else item.value
    if not isinstance(inner, dict):
        raise ValueError("expected a setting that is one value; lists belong into the file")
    below = inner.get(keys[0], Item(leaf.place, None))
    return Item(item.place, {**inner, keys[0]: _put(below, keys[1:], leaf)})
