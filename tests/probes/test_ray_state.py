"""Ray's API as others met it (case 47): lists that are cut, answers that never come, answers that are none."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from monitor.facts import RayFacts
from monitor.probes.ray_state import RayState, ray_token

Answer = Callable[[str, dict[str, list[str]]], object]


@contextmanager
def dashboard(answer: Answer, token: str = "") -> Iterator[str]:
    """A dashboard that answers so; yields its URL. What is no text is sent as JSON."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if token and self.headers.get("Authorization") != f"Bearer {token}":
                self.send_error(401)
                return
            parts = urlsplit(self.path)
            told = answer(parts.path, parse_qs(parts.query))
            body = told.encode() if isinstance(told, str) else json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def listed(*rows: dict[str, Any], total: int | None = None) -> dict[str, Any]:
    """A list as the state API wraps it."""
    count = len(rows) if total is None else total
    return {"result": True, "data": {"result": {"total": count, "num_filtered": count, "result": list(rows),
                                                "partial_failure_warning": ""}}}


def read(url: str, *, tasks: bool = False, token: str = "", seconds: float = 2.0) -> RayFacts:
    return RayState(url, lambda: 7.0, lambda: token, seconds).read(tasks=tasks)


def cluster(path: str, query: dict[str, list[str]]) -> object:
    """A cluster with 350 actors, of which it shows what it is asked for at most, 100 if it is not asked."""
    if path == "/api/jobs/":
        return [{"job_id": "01", "end_time": 0}, {"job_id": "09", "end_time": 0,
                                                  "entrypoint": "python -m monitor.probes.ray_driver HEAD"}]
    if path == "/api/v0/actors":
        limit = int(query.get("limit", ["100"])[0])
        alive = query["filter_predicates"] == ["!="]
        rows = [{"actor_id": str(n), "state": "ALIVE", "class_name": "f.<locals>.WorkerDict", "job_id": "01",
                 "num_restarts": "2"} for n in range(350)]
        return listed(*rows[:limit]) if alive else listed()
    if path == "/api/cluster_status":
        return {"data": {"clusterStatus": {"loadMetricsReport": {"usage": {"CPU": [-1.0, 32.0], "GPU": [9.0, 8.0]}}}}}
    return listed()


def test_47_more_than_a_hundred_rows_are_asked_for() -> None:
    with dashboard(cluster) as url:
        facts = read(url)
    assert (facts.reachable, len(facts.actors), facts.truncated) == (True, 350, ())
    assert (facts.actors[0].class_name, facts.actors[0].restarts) == ("WorkerDict", 2)
    assert facts.active_jobs == ("01",)  # our own driver is nobody's job


def test_43_usage_below_nothing_or_above_all_is_held_to_what_can_be() -> None:
    with dashboard(cluster) as url:
        assert read(url).used == {"CPU": 0.0, "GPU": 8.0}


def test_47_a_list_that_was_cut_is_told() -> None:
    def cut(path: str, query: dict[str, list[str]]) -> object:
        if path == "/api/v0/placement_groups":
            return listed(*({"placement_group_id": str(n), "state": "CREATED"} for n in range(10_000)), total=10_500)
        return cluster(path, query)

    with dashboard(cut) as url:
        assert read(url).truncated == ("placement_groups",)


def test_47_an_api_that_never_answers_costs_its_deadline_and_is_no_empty_cluster() -> None:
    release = threading.Event()

    def hang(path: str, query: dict[str, list[str]]) -> object:
        release.wait(20)
        return listed()

    with dashboard(hang) as url:
        state = RayState(url, lambda: 7.0, lambda: "", 0.3)
        begun = time.monotonic()
        facts = state.read()
        assert time.monotonic() - begun < 2
        release.set()
    assert not facts.reachable
    assert "does not answer" in facts.detail


def test_the_last_known_stays_beside_that_it_is_not_reached() -> None:
    answers: list[Answer] = [cluster]
    with dashboard(lambda path, query: answers[0](path, query)) as url:
        state = RayState(url, lambda: 7.0, lambda: "", 2.0)
        assert len(state.read().actors) == 350
        answers[0] = lambda path, query: "<html>"
        facts = state.read()
    assert (facts.reachable, len(facts.actors)) == (False, 350)
    assert "expected the state API of Ray 2.41 or later, got something else" in facts.detail


@pytest.mark.parametrize("odd", ["[]", "{}", "7", '{"data": {"result": {"result": [5, {"x": 1}]}}}', "", "\x00"])
def test_answers_that_are_none_are_told_and_never_raise(odd: str) -> None:
    with dashboard(lambda path, query: odd) as url:
        facts = read(url, tasks=True)
    assert not facts.reachable
    assert facts.detail


def test_the_token_and_where_ray_looks_for_it(tmp_path: Path) -> None:
    with dashboard(cluster, token="secret") as url:
        assert "expected a token that Ray accepts, got 401" in read(url).detail
        assert read(url, token="secret").reachable
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    (tmp_path / "file").write_text("file\n")
    home = {"HOME": str(tmp_path)}
    assert ray_token(home) == "home"
    assert ray_token({**home, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "file")}) == "file"
    assert ray_token({**home, "RAY_AUTH_TOKEN": "own"}) == "own"
    assert ray_token({"HOME": "/no/such"}) == ""


def test_ages_are_by_the_heads_clock_and_tasks_are_asked_for_only_when_wanted() -> None:
    asked: list[str] = []

    def answer(path: str, query: dict[str, list[str]]) -> object:
        asked.append(path)
        if path == "/api/v0/tasks":
            return listed({"name": "X.y", "start_time_ms": (time.time() - 90) * 1000, "job_id": "01", "worker_pid": 5})
        if path == "/api/v0/placement_groups":
            return listed({"placement_group_id": "a", "state": "REMOVED"}, {
                "placement_group_id": "b", "state": "PENDING", "stats": {
                    "creation_request_received_ns": str(int((time.time() - 60) * 1e9)),
                    "scheduling_state": "INFEASIBLE"}, "bundles": [{"unit_resources": {"GPU": 2.0}}]})
        return cluster(path, query)

    with dashboard(answer) as url:
        assert read(url).tasks is None
        assert "/api/v0/tasks" not in asked
        facts = read(url, tasks=True)
    [task] = facts.tasks or ()
    assert task.age_seconds == pytest.approx(90, abs=2)
    [group] = facts.groups  # one that is removed is no more
    assert (group.id, group.scheduling, group.asked()) == ("b", "INFEASIBLE", {"GPU": 2.0})
    assert group.age_seconds == pytest.approx(60, abs=2)


def test_why_an_actor_died() -> None:
    causes: list[tuple[dict[str, Any], str, bool]] = [
        ({"actor_died_error_context": {"reason": "RAY_KILL", "error_message": "killed by `ray.kill`."}},
         "killed by `ray.kill`.", True),
        ({"actor_died_error_context": {"reason": "OWNER_DIED", "error_message": "its owner has died"}},
         "its owner has died", True),
        ({"actor_died_error_context": {"reason": "WORKER_DIED", "error_message":
            "x Worker exit type: INTENDED_USER_EXIT Worker exit detail: exit_actor() is called."}},
         "x Worker exit type: INTENDED_USER_EXIT Worker exit detail: exit_actor() is called.", True),
        ({"actor_died_error_context": {"reason": "WORKER_DIED", "error_message":
            "x Worker exit type: SYSTEM_ERROR Worker exit detail: End of file. Some common causes include: (1)"}},
         "End of file.", False),
        ({"creation_task_failure_context": {"formatted_exception_string": "Traceback\n  a\nValueError: bad\n"}},
         "its constructor failed: ValueError: bad", False),
        ({"something_new": {}}, "something_new", False),
    ]

    def answer(path: str, query: dict[str, list[str]]) -> object:
        if path == "/api/v0/actors":
            dead = [{"actor_id": str(n), "state": "DEAD", "death_cause": cause}
                    for n, (cause, _, _) in enumerate(causes)]
            return listed(*dead) if query["filter_predicates"] == ["="] else listed()
        return cluster(path, query)

    with dashboard(answer) as url:
        actors = read(url).actors
    assert [(actor.death, actor.intended) for actor in actors] == [(words, meant) for _, words, meant in causes]
