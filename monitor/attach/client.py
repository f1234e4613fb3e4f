"""The push API's client: strict JSON over one kept connection, nothing that can wait for longer than its timeouts."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from monitor.attach.recorder import Event, Identity
from monitor.attach.rows import settled
from monitor.attach.settings import clock

TIMEOUT_SECONDS = 3.0
MAX_BYTES = 1_000_000
MAX_ROWS = 500
_MAX_INT = 2**63


@dataclass(frozen=True, slots=True)
class Item:
    """An event whose values are JSON already. Its age is known only when it is sent."""

    who: Identity
    kind: str
    when: float
    step: int
    seq: int
    values: str

    def line(self) -> bytes:
        """As a line of a spool file."""
        who = self.who
        head = json.dumps({"run": who.run, "project": who.project, "incarnation": who.incarnation, "kind": self.kind,
                           "when": self.when, "step": self.step, "seq": self.seq})
        return f'{head[:-1]}, "values": {self.values}}}\n'.encode()


def from_event(event: Event) -> Item:
    """Encode an event's values."""
    values = settled(event.values) if event.kind == "steps" else event.values
    return Item(event.who, event.kind, event.when, event.step, event.seq,
                json.dumps(safe(values), allow_nan=False, separators=(",", ":")))


def from_line(line: bytes) -> Item:
    """An item from a spool's line. Raises ValueError, KeyError or TypeError for one that was torn."""
    row = json.loads(line)
    return Item(Identity(str(row["run"]), str(row["project"]), str(row["incarnation"])), str(row["kind"]),
                float(row["when"]), int(row["step"]), int(row["seq"]), json.dumps(row["values"]))


def safe(value: Any) -> Any:
    """What strict parsers take: no NaN, no lone surrogate, no integer beyond 64 bits."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else "nan" if value != value else "inf" if value > 0 else "-inf"
    if kind is int and not -_MAX_INT <= value < _MAX_INT:
        try:
            return float(value)
        except OverflowError:
            return "inf" if value > 0 else "-inf"
    if kind is str and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    if kind is dict:
        return {safe(key): safe(item) for key, item in value.items()}
    if kind is list:
        return [safe(item) for item in value]
    return value


def path_of(who: Identity, kind: str) -> str:
    """Below ``/api/v1/runs/``; a run's name may hold anything, slashes as well."""
    return f"{quote(who.run.encode('utf-8', 'replace'), safe='')}/{kind}"


def body_of(batch: Sequence[Item]) -> bytes:
    """The body for items of one run and kind."""
    first = batch[0]
    incarnation = json.dumps(first.who.incarnation)
    if first.kind == "config":
        body = f'{{"project":{json.dumps(first.who.project)},"incarnation":{incarnation},"config":{first.values}}}'
    elif first.kind == "finish":
        body = f'{{"incarnation":{incarnation},{first.values[1:]}'
    else:
        now = clock()
        steps = ",".join(f'{{"step":{item.step},"seq":{item.seq},"time":{max(0.0, now - item.when):.3f},'
                         f'"values":{item.values}}}' for item in batch)
        body = f'{{"project":{json.dumps(first.who.project)},"incarnation":{incarnation},"steps":[{steps}]}}'
    return body.encode()


class Client:
    """POSTs to ``{url}/api/v1/runs/{path}``."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"VERL_MONITOR_URL must look like http://host:9560, not {url!r}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_SECONDS)
        parts.hostname.encode("idna")  # imports the codec here: a fork amid an import in a thread leaves halves of it
        self._prefix = parts.path.rstrip("/") + "/api/v1/runs/"
        self._headers = {"Content-Type": "application/json", "User-Agent": "verl-monitor-attach"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def post(self, path: str, body: bytes) -> int:
        """The answer's status. Raises OSError or HTTPException when there is none."""
        for kept in (self._connection.sock is not None, False):
            try:
                return self._post(path, body)
            except Exception as error:
                self._connection.close()
                if not kept or isinstance(error, TimeoutError) or not isinstance(
                        error, (OSError, http.client.HTTPException)):
                    raise
            # the service closed the kept connection meanwhile, which is no failure: once more on a new one
        raise AssertionError("the second turn returns or raises")

    def close(self) -> None:
        """Close the kept connection."""
        self._connection.close()

    def _post(self, path: str, body: bytes) -> int:
        self._connection.request("POST", self._prefix + path, body, self._headers)
        response = self._connection.getresponse()
        response.read(65_536)
        if not response.isclosed():  # more than anyone should answer
            self._connection.close()
        return response.status
