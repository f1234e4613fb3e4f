"""Rows, configuration and end of a run from the file that Weights & Biases writes beside it, ``run-*.wandb``.

It is there online and offline, and holds what is sent to the server. The wandb package is not needed to read it.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import orjson

from monitor.model import RunState
from monitor.sources.framing import WANDB_HEADER, WandbFraming
from monitor.sources.protobuf import (
    BYTES,
    FIXED64,
    VARINT,
    WireError,
    field,
    fields,
    float64,
    signed,
    text,
    zigzag,
)
from monitor.sources.records import Config, End, Record, RecordReader, Reject, Row, config_of

_LARGEST_STEP = 2**53

_HISTORY, _CONFIG, _RUN, _EXIT = field(2, BYTES), field(5, BYTES), field(17, BYTES), field(18, BYTES)
_ITEM, _STEP, _STEP_NUMBER = field(1, BYTES), field(2, BYTES), field(1, VARINT)
_KEY, _NESTED_KEY, _VALUE_JSON = field(1, BYTES), field(2, BYTES), field(16, BYTES)
# Its schema has typed values too, which releases up to 0.31 do not write.
_BOOLEAN, _INTEGER = field(4, VARINT), field(5, VARINT)
_NUMBER, _TEXT, _JSON = field(6, FIXED64), field(7, BYTES), field(8, BYTES)
_UPDATE, _REMOVE = field(1, BYTES), field(2, BYTES)
_RUN_PROJECT, _RUN_CONFIG, _RUN_NAME = field(3, BYTES), field(4, BYTES), field(8, BYTES)
_EXIT_CODE, _NOT_COMPLETE = field(1, VARINT), field(3, VARINT)


def looks_like_wandb(head: bytes) -> bool:
    """Whether a file that begins so is a W&B run's. 6 bytes suffice."""
    return head.startswith(WANDB_HEADER)


class WandbReader(RecordReader):
    """Turns the bytes of one W&B file into records.

    W&B writes a step when the next begins, all its keys in one record, and brings its file up to date every 15 seconds
    (0.31, measured): a run is one row and that time behind, and a killed one lacks what was to come, and its end.

    ``read`` counts rows, and records that could not be used: with none yet the run has only begun.
    """

    binary: ClassVar[bool] = True
    tells_end: ClassVar[bool] = True

    def __init__(self, reject: Reject) -> None:
        self._project = self._name = ""
        self._reject = reject
        self._framing = WandbFraming()
        self._reported = 0
        self._config: dict[str, object] = {}

    def feed(self, data: bytes) -> list[Record]:
        """Records that ``data`` completes."""
        records: list[Record] = []
        for payload in self._framing.feed(data):
            try:
                for mark, value in fields(payload):
                    if mark == _HISTORY:
                        self.read += 1
                        records.extend(self._row(value))
                    elif mark == _CONFIG:
                        records.extend(self._configure(value))
                    elif mark == _RUN:
                        records.extend(self._run(value))
                    elif mark == _EXIT:
                        records.extend(_end(value))
            except WireError as error:
                self.read += 1
                self._reject("bad_record", 1, f"expected a record of W&B, got {error}")
        self._report()
        return records

    def finish(self) -> list[Record]:
        """Nothing: a record cut short, which is ordinary after a kill, is counted; its rest may come all the same."""
        self._framing.end()
        self._report()
        return []

    def _report(self) -> None:
        self.unread = self._framing.unread
        bad = self._framing.bad - self._reported
        if bad:
            self._reported += bad
            self._reject("bad_record", bad, self._framing.detail)

    def _row(self, history: bytes) -> list[Record]:
        step: object = None
        values: dict[str, object] = {}
        for mark, content in fields(history):
            if mark == _ITEM:
                path, value = self._item(content)
                if path == ["_step"] and step is None:
                    step = value
                elif path and not path[0].startswith("_"):  # time stamps and the like: W&B's own
                    values["/".join(path)] = value
            elif mark == _STEP:
                step = signed(dict(fields(content)).get(_STEP_NUMBER, 0))
        if isinstance(step, bool) or not isinstance(step, int) or abs(step) > _LARGEST_STEP:
            self._reject("bad_step", 1, f"expected an integer step within 2**53, got {step!r:.60}")
            return []
        return [Row(step, values)] if values else []

    def _run(self, run: bytes) -> list[Record]:
        config = b""
        for mark, value in fields(run):
            if mark == _RUN_PROJECT:
                self._project = text(value)
            elif mark == _RUN_NAME:
                self._name = text(value)
            elif mark == _RUN_CONFIG:
                config = value
        return self._configure(config) or [self._whole()]

    def _whole(self) -> Config:
        told = config_of(self._config)
        return Config(self._config, "", self._project or told.project, self._name or told.experiment)

    def _configure(self, config: bytes) -> list[Record]:
        """The whole configuration, of which a record holds what is new."""
        changed = False
        for mark, content in fields(config):
            if mark not in (_UPDATE, _REMOVE):
                continue
            path, value = self._item(content)
            if not path or path[0].startswith("_"):
                continue
            if isinstance(value, dict) and "value" in value and value.keys() <= {"value", "desc"}:
                value = value["value"]  # as in the config.yaml beside the file, and in files of other releases
            self._config = _changed(self._config, path, value, mark == _REMOVE)
            changed = True
        return [self._whole()] if changed else []

    def _item(self, data: bytes) -> tuple[list[str], object]:
        """The path and the value of an item of a history or a configuration."""
        path: list[str] = []
        value: object = None
        for mark, content in fields(data):
            if mark in (_KEY, _NESTED_KEY):
                if content:
                    path.append(text(content))
            elif mark in (_VALUE_JSON, _JSON):
                value = self._json(content)
            elif mark == _NUMBER:
                value = float64(content)
            elif mark == _INTEGER:
                value = zigzag(content)
            elif mark == _BOOLEAN:
                value = bool(content)
            elif mark == _TEXT:
                value = text(content)
        return path, value

    def _json(self, data: bytes) -> Any:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass
        try:  # bare NaN and Infinity, which W&B writes
            return json.loads(text(data))
        except (ValueError, RecursionError) as error:
            self._reject("bad_value", 1, f"expected a value in JSON, got {text(data[:60])!r} ({error})")
            return None


def _changed(config: dict[str, object], path: list[str], value: object, remove: bool) -> dict[str, object]:
    """A configuration with one thing in it set or removed. The old one may be in other hands and stays as it is."""
    config = dict(config)
    key, *rest = path
    inner = config.get(key)
    if rest:
        config[key] = _changed(inner if isinstance(inner, dict) else {}, rest, value, remove)
    elif remove:
        config.pop(key, None)
    else:
        config[key] = value
    return config


def _end(data: bytes) -> list[Record]:
    parts = dict(fields(data))
    if parts.get(_NOT_COMPLETE):  # the process ends, the run is to be resumed
        return []
    code = signed(parts.get(_EXIT_CODE, 0))
    if code:
        return [End(RunState.FAILED, f"W&B recorded that its process ended with exit code {code}")]
    return [End(RunState.FINISHED, "W&B recorded that its process ended with exit code 0")]
