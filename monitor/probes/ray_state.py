"""What Ray's dashboard says of its cluster, over plain HTTP: no Ray package, no driver, no job of our own.

The API cuts its lists at 100 rows unless asked for more, and at 10,000 in any case; a list that was cut is told. It
wants a token where Ray was started with token authentication, which a local start of 2.60 turns on by itself.
"""

from __future__ import annotations

import email.utils
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from monitor.facts import Actor, PlacementGroup, RayFacts, RayNode, Task
from monitor.http import Answer, HttpError, get

MOST_BYTES = 64 * 2**20
MOST_ROWS = 10_000
"""Ray's own limit, RAY_MAX_LIMIT_FROM_API_SERVER."""

_MOST_DEAD = 1_000
_OWN = "monitor.probes.ray_"  # drivers of this project are no jobs
_MOST_TEXT = 300
# An actor with one of these reasons was ended on purpose, or its job was.
_INTENDED = {"RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED"}


def ray_token(environment: Mapping[str, str]) -> str:
    """The token as Ray itself finds it: RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token. Empty
    where there is none."""
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = environment.get("RAY_AUTH_TOKEN_PATH") or os.path.join(environment.get("HOME", ""), ".ray", "auth_token")
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class RayState:
    """A cluster's state.

    Args:
        address: of the dashboard, such as ``http://HEAD:8265``.
        clock: the engine's.
        token: gives the token of each request; it may change when the cluster is started anew.
        seconds: deadline of a request.
    """

    def __init__(self, address: str, clock: Callable[[], float], token: Callable[[], str],
                 seconds: float = 5.0) -> None:
        self.address = address.rstrip("/")
        self._clock, self._token, self._seconds = clock, token, seconds
        self._last = RayFacts(time_seconds=0.0, address=self.address, reachable=False)

    def read(self, *, tasks: bool = False) -> RayFacts:
        """The state now. Blocking; never raises. ``tasks``: the running ones too, which costs a large cluster most."""
        try:
            facts = self._read(tasks)
        except (HttpError, OSError) as error:
            facts = self._unreachable(self._why(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"expected the state API of Ray 2.41 or later, got something else ({error!r:.200})"
            facts = self._unreachable(why)
        if facts.reachable:
            self._last = facts
        return facts

    def _unreachable(self, why: str) -> RayFacts:
        return replace(self._last, reachable=False, detail=why, tasks=None)

    def _why(self, error: Exception) -> str:
        if isinstance(error, HttpError) and error.status in (401, 403):
            return (f"{self.address}: expected a token that Ray accepts, got {error.status}; set RAY_AUTH_TOKEN or "
                    "RAY_AUTH_TOKEN_PATH")
        return f"{self.address} does not answer: {error}"

    def _get(self, path: str) -> Answer:
        return get(f"{self.address}/{path}", token=self._token(), accept="application/json", most_bytes=MOST_BYTES,
                   seconds=self._seconds)

    def _list(self, what: str, truncated: list[str], limit: int = MOST_ROWS, condition: str = "") -> tuple[
            list[dict[str, Any]], float]:
        """Rows of a list, and the head's Unix time."""
        answer = self._get(f"api/v0/{what}?detail=1&limit={limit}{condition}")
        data = orjson.loads(answer.body)["data"]["result"]
        rows = [row for row in data["result"] if isinstance(row, dict)]
        if max(int(data.get("total") or 0), int(data.get("num_filtered") or 0)) > len(rows) >= limit or \
                data.get("partial_failure_warning"):
            truncated.append(what)
        return rows, _date(answer.headers)

    def _read(self, tasks: bool) -> RayFacts:
        truncated: list[str] = []
        jobs = [job for job in orjson.loads(self._get("api/jobs/").body) if isinstance(job, dict)]
        own = {job.get("job_id") for job in jobs if _OWN in str(job.get("entrypoint"))}
        jobs = [job for job in jobs if job.get("job_id") not in own]
        # A driver that was killed reads SUCCEEDED, so its end time decides and not its status.
        ended = {str(job["job_id"]): bool(job.get("end_time")) for job in jobs if job.get("job_id")}
        nodes, _ = self._list("nodes", truncated)
        groups, now = self._list("placement_groups", truncated)
        dead = "&filter_keys=state&filter_predicates={}&filter_values=DEAD"
        actors, _ = self._list("actors", truncated, condition=dead.format("!%3D"))
        actors += self._list("actors", truncated, _MOST_DEAD, dead.format("%3D"))[0]
        running: tuple[Task, ...] | None = None
        if tasks:
            rows, now = self._list("tasks", truncated, condition="&filter_keys=state&filter_predicates=%3D"
                                                                 "&filter_values=RUNNING")
            running = tuple(_task(row, now) for row in rows)
        return RayFacts(
            time_seconds=self._clock(), address=self.address,
            groups=tuple(_group(row, ended, now) for row in groups if row.get("state") != "REMOVED"),
            actors=tuple(_actor(row, ended) for row in actors if row.get("job_id") not in own),
            nodes=tuple(_node(row) for row in nodes),
            tasks=running, used=self._used(), active_jobs=tuple(job for job, over in ended.items() if not over),
            truncated=tuple(sorted(set(truncated))))

    def _used(self) -> dict[str, float]:
        """Resources in use. Ray was seen to report less than nothing and more than there is: held to what can be."""
        try:
            status = orjson.loads(self._get("api/cluster_status").body)["data"]["clusterStatus"]
            usage = status["loadMetricsReport"]["usage"]
            return {name: min(max(0.0, float(usage[name][0])), float(usage[name][1])) for name in ("CPU", "GPU")
                    if name in usage}
        except (HttpError, OSError, KeyError, TypeError, ValueError, IndexError):
            return {}  # shown where it is known, and decides nothing


def _date(headers: Mapping[str, str]) -> float:
    """The server's Unix time, against which its time stamps are to be read; this host's where it tells none."""
    try:
        return email.utils.parsedate_to_datetime(headers["Date"]).timestamp()
    except (KeyError, ValueError):
        return time.time()


def _amounts(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): float(amount) for name, amount in value.items() if isinstance(amount, (int, float))}


def _group(row: Mapping[str, Any], ended: Mapping[str, bool], now: float) -> PlacementGroup:
    stats = row.get("stats") or {}
    bundles = [bundle for bundle in row.get("bundles") or () if isinstance(bundle, Mapping)]
    created = float(stats.get("creation_request_received_ns") or 0) / 1e9
    job = str(row.get("creator_job_id") or "")
    return PlacementGroup(
        id=str(row["placement_group_id"]), state=str(row["state"]), name=str(row.get("name") or ""),
        detached=bool(row.get("is_detached")), created_by_job=job, job_ended=ended.get(job, False),
        age_seconds=max(0.0, now - created) if created else 0.0,
        bundles=tuple(_amounts(bundle.get("unit_resources")) for bundle in bundles),
        strategy=str(row.get("strategy") or ""), scheduling=str(stats.get("scheduling_state") or ""),
        nodes=tuple(dict.fromkeys(str(bundle["node_id"]) for bundle in bundles if bundle.get("node_id"))))


def _actor(row: Mapping[str, Any], ended: Mapping[str, bool]) -> Actor:
    job = str(row.get("job_id") or "")
    cause = row.get("death_cause") or {}
    died = cause.get("actor_died_error_context") or {}
    words = str(died.get("error_message") or "")
    words = words.rpartition("Worker exit detail: ")[2] if "INTENDED" not in words else words
    words = words.partition(" Some common causes")[0]
    if failed := cause.get("creation_task_failure_context"):
        last = str(failed.get("formatted_exception_string") or "").strip().rpartition("\n")[2]
        words = f"its constructor failed: {last}"
    elif cause and not words:
        words = ", ".join(str(kind) for kind in cause)
    return Actor(
        id=str(row["actor_id"]), state=str(row["state"]),
        class_name=str(row.get("class_name") or "").rpartition(".")[2],  # made in a function: f.<locals>.Class
        name=str(row.get("name") or ""), job=job, job_ended=ended.get(job, False), node=str(row.get("node_id") or ""),
        pid=int(row.get("pid") or 0), restarts=int(row.get("num_restarts") or 0), death=words[:_MOST_TEXT],
        intended=str(died.get("reason") or "") in _INTENDED or "exit type: INTENDED" in words,
        group=str(row.get("placement_group_id") or ""), resources=_amounts(row.get("required_resources")))


def _node(row: Mapping[str, Any]) -> RayNode:
    return RayNode(
        id=str(row["node_id"]), address=str(row.get("node_ip") or ""), hostname=str(row.get("node_name") or ""),
        alive=row.get("state") == "ALIVE", head=bool(row.get("is_head_node")),
        resources=_amounts(row.get("resources_total")), detail=str(row.get("state_message") or "")[:_MOST_TEXT])


def _task(row: Mapping[str, Any], now: float) -> Task:
    begun = float(row.get("start_time_ms") or 0) / 1e3
    return Task(name=str(row.get("name") or row.get("func_or_class_name") or "")[:_MOST_TEXT],
                age_seconds=max(0.0, now - begun) if begun else 0.0, job=str(row.get("job_id") or ""),
                node=str(row.get("node_id") or ""), pid=int(row.get("worker_pid") or 0))
