"""The push API: what a trainer sends, once each, the good items kept; and the trainer's side against the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from monitor.clock import steady_clock
from monitor.engine import Engine
from monitor.service import MAX_BODY_BYTES, Service, create_app
from monitor.sources import push as push_module
from monitor.sources.push import PushSource
from tests.helpers import REPOSITORY, wait_for
from tests.servers import get, get_json, monitor, samples

GOOD = {"actor/pg_loss": 0.1, "actor/grad_norm": "nan", "critic/score/mean": 0.5}


def _client(token: str = "", *, push: bool = True) -> TestClient:
    clock = steady_clock()
    return TestClient(create_app(Service(engine=Engine(), sources=[], clock=clock, token=token,
                                         push=PushSource(clock) if push else None)))


def _steps(*steps: int, incarnation: str = "a", **more: Any) -> dict[str, Any]:
    return {"project": "p", "incarnation": incarnation, "steps": [{"step": s, "values": GOOD} | more for s in steps]}


def _run(client: TestClient, name: str = "exp") -> dict[str, Any]:
    wait_for(lambda: client.get(f"/api/v1/runs/{name}").status_code == 200, 5, "the run")
    return dict(client.get(f"/api/v1/runs/{name}").json())


def test_rows_are_taken_once() -> None:
    with _client() as client:
        first = client.post("/api/v1/runs/exp/steps", json=_steps(1, 2))
        assert (first.status_code, first.json()) == (200, {"accepted": 2, "repeated": 0, "errors": []})
        again = client.post("/api/v1/runs/exp/steps", json=_steps(1, 2, 3))
        assert again.json() == {"accepted": 1, "repeated": 2, "errors": []}
        wait_for(lambda: _run(client)["last_step"] == 3, 5, "step 3")
        run = _run(client)
        assert (run["project"], run["steps"], run["restarts"], run["findings"]) == ("p", 3, 0, ["non_finite"])


def test_rows_of_one_step_are_told_apart_by_their_number() -> None:
    with _client() as client:
        body = {"incarnation": "a", "steps": [{"step": 1, "seq": 0, "values": GOOD},
                                              {"step": 1, "seq": 1, "values": {"actor/entropy": 0.5}}]}
        assert client.post("/api/v1/runs/exp/steps", json=body).json()["accepted"] == 2
        assert client.post("/api/v1/runs/exp/steps", json=body).json()["repeated"] == 2
        wait_for(lambda: "entropy_nats" in _run(client)["values"], 5, "the second row")


def test_a_new_incarnation_is_a_restart_and_the_old_one_is_over() -> None:
    with _client() as client:
        client.post("/api/v1/runs/a%2Fb/steps", json=_steps(1, 2, incarnation="one"))
        client.post("/api/v1/runs/a%2Fb/steps", json=_steps(1, 2, 3, incarnation="two"))
        late = client.post("/api/v1/runs/a%2Fb/steps", json=_steps(9, incarnation="one"))
        assert late.json() == {"accepted": 0, "repeated": 1, "errors": []}
        wait_for(lambda: _run(client, "a/b")["last_step"] == 3, 5, "step 3")
        assert _run(client, "a/b")["restarts"] == 1


def test_bad_items_cost_themselves_only() -> None:
    with _client() as client:
        body = _steps(1) | {"steps": [{"step": 1, "values": GOOD}, {"step": "x", "values": {}}, {"step": 2}, 7,
                                      {"step": 3, "values": GOOD, "seq": None}]}
        answer = client.post("/api/v1/runs/exp/steps", json=body)
        assert answer.status_code == 422
        assert answer.json()["accepted"] == 1
        assert [(e["item"], e["error"].split(",")[0]) for e in answer.json()["errors"]] == [
            (1, 'expected "step": an integer'), (2, 'expected "values": {key: number}'),
            (3, 'expected {"step": N'), (4, 'expected "seq": an integer')]
        assert _run(client)["steps"] == 1


@pytest.mark.parametrize(("path", "body", "expected"), [
    ("steps", [], "a JSON object"), ("steps", {"steps": 1}, '"steps"'), ("steps", {"incarnation": 3}, '"incarnation"'),
    ("phase", {"phase": 3}, '"phase"'), ("phase", {"phase": "gen", "age_seconds": -1}, '"age_seconds"'),
    ("config", {"config": 1}, '"config"'), ("finish", {"exit_code": "0"}, '"exit_code"'),
])
def test_what_is_wrong_is_told(path: str, body: object, expected: str) -> None:
    with _client() as client:
        answer = client.post(f"/api/v1/runs/exp/{path}", json=body)
        assert answer.status_code == 400
        assert expected in answer.json()["error"]
        assert client.post(f"/api/v1/runs/exp/{path}", content=b"{").status_code == 400


def test_who_may_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    with _client("secret") as client:
        assert client.post("/api/v1/runs/exp/steps", json=_steps(1)).status_code == 401
        wrong = {"Authorization": "Bearer other"}
        assert client.post("/api/v1/runs/exp/steps", json=_steps(1), headers=wrong).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert client.post("/api/v1/runs/exp/steps", json=_steps(1), headers=right).status_code == 200
        large = client.post("/api/v1/runs/exp/steps", content=b" " * (MAX_BODY_BYTES + 1), headers=right)
        assert large.status_code == 413
        monkeypatch.setattr(push_module, "MAX_PENDING", 0)
        assert client.post("/api/v1/runs/exp/steps", json=_steps(2), headers=right).status_code == 503
    with _client(push=False) as client:
        assert client.post("/api/v1/runs/exp/steps", json=_steps(1)).status_code == 403


def test_phase_and_finish() -> None:
    with _client() as client:
        client.post("/api/v1/runs/exp/config", json={"project": "p", "incarnation": "a", "config": {}})
        client.post("/api/v1/runs/exp/phase", json={"incarnation": "a", "phase": "gen", "age_seconds": 1})
        wait_for(lambda: _run(client)["phase"] == "gen", 5, "the phase")
        assert samples(client.get("/metrics").text, "verl_run_phase", run="exp", phase="gen") == [1.0]
        client.post("/api/v1/runs/exp/phase", json={"incarnation": "a", "phase": None})
        wait_for(lambda: _run(client)["phase"] is None, 5, "no phase")
        client.post("/api/v1/runs/exp/finish", json={"incarnation": "a", "exit_code": 1})
        wait_for(lambda: _run(client)["state"] == "failed", 5, "the end")
        assert _run(client)["state_reason"] == "the trainer ended with exit code 1"


def test_a_trainer_of_ones_own_sends_to_the_real_service(tmp_path: Path) -> None:
    program = """
import monitor.attach, sys
run = monitor.attach.attach(project="p", experiment="own", config={"a": 1}, url=sys.argv[1])
for step in range(50):
    with run.phase("gen"):
        pass
    run.log({"actor/pg_loss": 0.1, "critic/score/mean": float(step)}, step)
run.finish(0)
"""
    with monitor(log=tmp_path / "log") as url:
        subprocess.run([sys.executable, "-c", program, url], check=True, cwd=REPOSITORY, timeout=30)
        wait_for(lambda: (get_json(f"{url}/api/v1/runs/own") or {}).get("state") == "finished", 10, "the end")
        detail = get_json(f"{url}/api/v1/runs/own")
        assert (detail["steps"], detail["last_step"], detail["project"]) == (50, 49, "p")
        assert samples(get(f"{url}/metrics")[1].decode(), "verl_score", run="own", stat="mean") == [49.0]
