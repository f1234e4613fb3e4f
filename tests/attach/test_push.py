"""Rows reach a service that is there, late, failing, hanging, or restarted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from monitor.attach import attach, push, rows, spool
from monitor.attach.recorder import Event, Identity, process
from monitor.attach.settings import Settings
from tests.attach.stub import Stub, wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "TURN_SECONDS", 0.02)
    monkeypatch.setattr(push, "MAX_BACKOFF_SECONDS", 0.1)
    monkeypatch.setattr("monitor.attach.client.TIMEOUT_SECONDS", 0.3)


def test_a_run_from_its_beginning_to_its_end(stub: Stub, monkeypatch: pytest.MonkeyPatch,
                                             capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VERL_MONITOR_TOKEN", "secret")
    run = attach(project="p", experiment="a/b c", config={"lr": 1.0}, url=stub.url + "/")
    run.phase("gen")
    assert wait_for(lambda: stub.bodies("phase"))
    run.log({"loss": float("nan"), "kl": 0.5, "text": "x", "none": None}, 1)
    run.log({"loss": float("inf")}, 1)
    run.finish(3)
    assert {name for name, _, _ in stub.received} == {"a/b c"}
    [told] = stub.bodies("config")
    # Beside the configuration: where its relative paths begin, and the Ray job, of which there is none here.
    assert told == {"project": "p", "incarnation": run.who.incarnation, "config": {
        "lr": 1.0, "verl_monitor": {"cwd": os.getcwd(), "ray_job": os.environ.get("RAY_JOB_ID", "")}}}
    steps = [step for body in stub.bodies("steps") for step in body["steps"]]
    assert [(s["step"], s["seq"], s["values"]) for s in steps] == [
        (1, 0, {"loss": "nan", "kl": 0.5, "none": None}), (1, 1, {"loss": "inf"})]
    assert all(0 <= s["time"] < 5 for s in steps)
    phase = stub.bodies("phase")[0]
    assert phase["phase"] == "gen"
    assert 0 <= phase["age_seconds"] < 5
    assert stub.bodies("finish") == [{"incarnation": run.who.incarnation, "exit_code": 3}]
    assert stub.headers["Authorization"] == "Bearer secret"
    assert capfd.readouterr().err == f"verl-monitor: sending run a/b c to {stub.url}\n"


def test_a_stage_that_comes_again_is_told_again(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    run = attach(experiment="run", url=stub.url)
    run.phase("gen")
    assert wait_for(lambda: len(stub.bodies("phase")) == 1)
    time.sleep(0.1)
    run.phase("update_actor")
    run.phase("gen")  # both between two looks of the thread
    assert wait_for(lambda: stub.bodies("phase")[-1]["phase"] == "gen" and len(stub.bodies("phase")) > 1)
    assert stub.bodies("phase")[-1]["age_seconds"] < 0.1
    told = len(stub.bodies("phase"))
    time.sleep(0.1)
    assert len(stub.bodies("phase")) == told
    monkeypatch.setattr(push, "PHASE_AGAIN_SECONDS", 0.05)  # a service that is new does not know yet
    assert wait_for(lambda: len(stub.bodies("phase")) > told)
    run.phase(None)
    assert wait_for(lambda: stub.bodies("phase")[-1]["phase"] is None)
    run.finish()


def test_batches_are_bounded(stub: Stub) -> None:
    run = attach(experiment="run", url=stub.url)
    for step in range(1200):
        run.log({"loss": 1.0}, step)
    run.finish()
    assert stub.steps() == list(range(1200))
    assert max(len(body["steps"]) for body in stub.bodies("steps")) <= 500


def test_an_absent_service_is_waited_for(absent_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    port = absent_port
    run = attach(experiment="run", url=f"http://127.0.0.1:{port}")
    run.log({"loss": 1.0}, 1)
    time.sleep(0.3)
    stub = Stub(port)
    try:
        assert wait_for(lambda: stub.steps() == [1])
        run.finish()
    finally:
        stub.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3, lines
    assert "takes no steps" in lines[1]
    assert "takes steps again" in lines[2]


@pytest.mark.parametrize("status", [500, 503, 429, 302])
def test_what_a_failing_service_did_not_take_is_sent_again(stub: Stub, status: int) -> None:
    stub.status = status
    run = attach(experiment="run", url=stub.url)
    run.log({"loss": 1.0}, 1)
    assert wait_for(lambda: stub.refused >= 2)
    stub.status = 200
    assert wait_for(lambda: stub.steps() == [1])


def test_a_hanging_service_costs_the_trainer_nothing(stub: Stub) -> None:
    stub.hang_seconds = 1.0
    run = attach(experiment="run", url=stub.url)
    start = time.perf_counter()
    for step in range(1000):
        run.log({"loss": 1.0}, step)
    assert time.perf_counter() - start < 0.5
    start = time.perf_counter()
    run.finish()
    assert 1.5 < time.perf_counter() - start < 2.5
    stub.hang_seconds = 0.0
    assert wait_for(lambda: stub.steps() == list(range(1000)) and stub.bodies("finish"))


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refused_rows_are_counted_and_the_rest_goes_on(stub: Stub, status: int,
                                                       capfd: pytest.CaptureFixture[str]) -> None:
    stub.status = status
    run = attach(experiment="run", url=stub.url)
    for step in range(3):
        run.log({"loss": 1.0}, step)
    assert wait_for(lambda: rows.counts["refused"] == 3)
    stub.status = 200
    run.log({"loss": 1.0}, 3)
    assert wait_for(lambda: stub.steps() == [3])
    assert capfd.readouterr().err.count(f"status {status}") == 1


def test_a_batch_that_is_too_large_is_halved(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    run = attach(experiment="run", url=stub.url)
    target: Any = process.targets[f"url {stub.url}"]
    real, sizes = target._client.post, []

    def limited(path: str, body: bytes) -> int:
        sizes.append(len(body))
        return 413 if len(body) > 2000 else real(path, body)

    monkeypatch.setattr(target._client, "post", limited)
    for step in range(100):
        run.log({"loss": 1.0}, step)
    run.finish()
    assert stub.steps() == list(range(100))


def test_a_full_queue_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_MONITOR_QUEUE_ROWS", "10")
    target = push.Push(Settings(url="http://127.0.0.1:9", queue_rows=10))
    monkeypatch.setattr(target, "_start", lambda event: None)
    for step in range(25):
        target.put(Event(Identity("run", "", "i"), "steps", 0.0, {}, step))
    assert [event.step for event in target._queue] == list(range(15, 25))
    assert rows.counts["queue"] == 15


def test_no_step_is_lost_over_restarts_with_a_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      absent_port: int) -> None:
    monkeypatch.setenv("VERL_MONITOR_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("VERL_MONITOR_QUEUE_ROWS", "50")
    port = absent_port
    received: list[Any] = []
    run = attach(experiment="run", url=f"http://127.0.0.1:{port}")
    step = 0
    for turn in range(5):
        stub = Stub(port, received) if turn % 2 else None
        for _ in range(150):
            run.log({"loss": 1.0}, step)
            step += 1
            time.sleep(0.002)
        if stub is not None:
            assert wait_for(lambda: received, 5)
            stub.close()
    assert list((tmp_path / "spool").glob("*.jsonl"))
    stub = Stub(port, received)
    try:
        assert wait_for(lambda: stub.steps() == list(range(750))), (len(stub.steps()), rows.counts)
        run.finish()
        assert stub.bodies("finish")
        assert wait_for(lambda: not list((tmp_path / "spool").iterdir()))
    finally:
        stub.close()
    assert not rows.counts["queue"]


def test_what_a_process_left_is_sent_by_the_next(tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch,
                                                    absent_port: int) -> None:
    monkeypatch.setenv("VERL_MONITOR_SPOOL", str(tmp_path))
    first = attach(experiment="first", url=f"http://127.0.0.1:{absent_port}")
    for step in range(5):
        first.log({"loss": float("nan")}, step)
    first.finish(1)
    assert list(tmp_path.glob("*.jsonl"))
    for target in process.targets.values():
        target.drop()
    with next(tmp_path.glob("*.jsonl")).open("ab") as file:
        file.write(b'{"run": "torn')
    attach(experiment="second", url=stub.url)
    assert wait_for(lambda: stub.bodies("finish") == [{"incarnation": first.who.incarnation, "exit_code": 1}])
    assert stub.steps() == list(range(5))
    assert stub.bodies("steps")[0]["steps"][0]["values"] == {"loss": "nan"}
    assert wait_for(lambda: not list(tmp_path.iterdir()))


def test_a_full_disk_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    kept = spool.Spool(str(tmp_path / "file" / "below"), 1000)
    assert not kept.append([b"{}\n"] * 3)
    assert rows.counts["spool"] == 3
    assert kept.empty or kept.peek(5) == []


def test_a_spool_is_bounded_and_loses_the_oldest(tmp_path: Path) -> None:
    kept = spool.Spool(str(tmp_path), 10_000)
    for number in range(1000):
        kept.append([b"%06d%s\n" % (number, b"x" * 93)])
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= 10_000
    got = []
    while not kept.empty:
        lines = kept.peek(7)
        got += [int(line[:6]) for line, _ in lines]
        kept.advance(lines[-1][1])
    assert got == list(range(1000 - len(got), 1000))
    assert len(got) >= 70
    assert len(got) + rows.counts["spool"] == 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["host:9560", "ftp://host", "http://", "http://host:port"])
def test_a_wrong_address_is_told_and_costs_nothing(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = attach(experiment="run", url=url)
    run.log({"loss": 1.0}, 1)
    run.finish()
    assert capfd.readouterr().err.count("\n") == 1


def test_without_an_address_nothing_starts() -> None:
    run = attach(experiment="run")
    run.log({"loss": 1.0}, 1)
    with run.phase("gen"):
        assert run.phase_now[0] == "gen"
    assert run.phase_now[0] is None
    run.finish()
    assert not process.targets
