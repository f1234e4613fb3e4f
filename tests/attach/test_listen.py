"""Detectors and /metrics inside the trainer's process."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from monitor.attach import attach, listen, recorder, rows
from monitor.attach.settings import clock
from tests.attach.stub import Stub, wait_for
from tests.helpers import rows as recorded


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, absent_port: int) -> Iterator[int]:
    """A free port; the server on it is stopped at the end."""
    monkeypatch.setattr(listen, "TURN_SECONDS", 0.02)
    monkeypatch.setattr(listen, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(listen, "BIND_AGAIN_SECONDS", 0.1)
    yield absent_port
    for target in recorder.process.targets.values():
        if isinstance(target, listen.Listen):
            target.close()


def get(port: int, path: str, accept: str = "") -> tuple[int, str, str]:
    """Status, content type and text."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()
    except OSError:
        return 0, "", ""


def samples(port: int) -> dict[str, float]:
    """Every sample of /metrics by its name with labels."""
    out = {}
    for family in text_string_to_metric_families(get(port, "/metrics")[2]):
        for sample in family.samples:
            out[sample.name + "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}"] = sample.value
    return out


def has_step(port: int, step: int) -> bool:
    """Whether the last step is that one."""
    return samples(port).get("verl_run_last_step{run=run}") == step


def test_a_run_is_judged_and_served(port: int, lab: Path) -> None:
    run = attach(project="p", experiment="kl", listen=f"127.0.0.1:{port}")
    for step, data in recorded(lab / "ppo-kl-runaway.jsonl"):
        run.log(data, step)
    assert wait_for(lambda: samples(port).get("verl_health_state{detector=kl_runaway,run=kl}", 0) > 0)
    page = samples(port)
    assert page["verl_run_info{algorithm=ppo,project=p,run=kl,source=attach}"] == 1
    assert page["verl_run_state{run=kl,state=running}"] == 1
    assert page["verl_monitor_source_up{source=attach}"] == 1
    assert get(port, "/-/healthy")[::2] == (200, "healthy\n")
    assert json.loads(get(port, "/api/v1/runs")[2])["runs"][0]["findings"]
    assert get(port, "/nothing")[0] == 404
    assert "openmetrics" in get(port, "/metrics", "application/openmetrics-text; version=1.0.0")[1]
    run.finish(0)
    assert samples(port)["verl_run_state{run=kl,state=finished}"] == 1
    again = attach(experiment="kl", listen=f"127.0.0.1:{port}")
    again.log({"actor/pg_loss": 0.1}, 1)
    again.finish(1)
    page = samples(port)
    assert page["verl_run_state{run=kl,state=failed}"] == 1
    assert page["verl_run_restarts_total{run=kl}"] == 1


def test_a_hang_is_told_by_time_alone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = attach(experiment="run", listen=f"127.0.0.1:{port}")
    start = clock()
    offset = [0.0]
    monkeypatch.setattr(listen, "clock", lambda: start + offset[0])
    monkeypatch.setattr(recorder, "clock", lambda: start + offset[0])
    for step in range(20):
        offset[0] += 10
        run.log({"actor/pg_loss": 0.1, "timing_s/step": 10.0}, step)
        assert wait_for(partial(has_step, port, step))
    offset[0] += 86_400
    assert wait_for(lambda: samples(port).get("verl_run_state{run=run,state=stalled}") == 1)


def test_the_live_phase_is_shown(port: int) -> None:
    run = attach(experiment="run", listen=f"127.0.0.1:{port}")
    run.log({"actor/pg_loss": 0.1}, 1)
    run.phase("gen")
    assert wait_for(lambda: samples(port).get("verl_run_phase{phase=gen,run=run}") == 1)
    run.phase(None)
    assert wait_for(lambda: "verl_run_phase{phase=gen,run=run}" not in samples(port))


def test_both_targets_work_together(port: int, stub: Stub) -> None:
    run = attach(experiment="run", listen=f"127.0.0.1:{port}", url=stub.url)
    run.log({"actor/pg_loss": 0.1, "odd": "x"}, 1)
    run.finish()
    assert stub.steps() == [1]
    assert wait_for(lambda: samples(port).get("verl_run_last_step{run=run}") == 1)
    assert samples(port)["verl_monitor_source_rejected_total{reason=value,source=attach}"] == 1


def test_a_port_in_use_costs_a_line_and_is_taken_when_it_is_free(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        run = attach(experiment="run", listen=f"127.0.0.1:{port}")
        run.log({"actor/pg_loss": 0.1}, 1)
        error = [""]
        assert wait_for(lambda: error.__setitem__(0, error[0] + capfd.readouterr().err) or "cannot listen" in error[0])
    assert wait_for(lambda: samples(port).get("verl_run_last_step{run=run}") == 1)
    assert error[0].count("\n") == 1


@pytest.mark.parametrize("address", ["8000", "host:port", "127.0.0.1:99999"])
def test_a_wrong_address_costs_a_line(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = attach(experiment="run", listen=address)
    run.log({"actor/pg_loss": 0.1}, 1)
    run.finish()
    assert capfd.readouterr().err.count("\n") <= 1


def test_many_connections_cost_few_threads(port: int) -> None:
    run = attach(experiment="run", listen=f"127.0.0.1:{port}")
    run.log({"actor/pg_loss": 0.1}, 1)
    assert wait_for(lambda: samples(port))
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    try:
        wait_for(lambda: threading.active_count() >= before + listen.MAX_REQUESTS, 2)
        assert threading.active_count() <= before + listen.MAX_REQUESTS + 1
    finally:
        for connection in idle:
            connection.close()
    assert wait_for(lambda: samples(port))


def test_an_engine_that_fails_is_told_once(port: int, monkeypatch: pytest.MonkeyPatch,
                                           capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("engine")

    run = attach(experiment="run", listen=f"127.0.0.1:{port}")
    target: Any = next(iter(recorder.process.targets.values()))
    with contextlib.suppress(AttributeError):
        monkeypatch.setattr(target._engine, "handle", fail)
    for step in range(5):
        run.log({"actor/pg_loss": 0.1}, step)
    assert wait_for(lambda: rows.counts["error"] >= 5)
    assert wait_for(lambda: get(port, "/metrics")[0] == 200)
    assert len(re.findall("RuntimeError", capfd.readouterr().err)) == 1


@pytest.mark.parametrize("every", [0.3, None])
def test_the_end_waits_for_a_last_scrape_where_there_are_scrapes(port: int, every: float | None) -> None:
    run = attach(experiment="run", listen=f"127.0.0.1:{port}")
    run.log({"actor/pg_loss": 1.0}, 1)
    assert wait_for(lambda: get(port, "/-/healthy")[0] == 200)
    over = threading.Event()
    seen: list[float] = []

    def scrape() -> None:
        while not over.wait(every):
            seen.append(samples(port)["verl_run_state{run=run,state=finished}"])

    thread = threading.Thread(target=scrape if every else lambda: None)
    thread.start()
    assert wait_for(lambda: len(seen) >= 3 or not every)
    before = clock()
    run.finish(0)
    took = clock() - before
    ended = list(seen)
    assert took < (2.0 if every else 0.5)
    run.finish(0)
    recorder.process._exit()
    assert clock() - before - took < 0.5, "once is enough"
    over.set()
    thread.join()
    # The scrape that finish() waited for has answered, and may not be noted yet.
    assert not every or 1.0 in [*ended, *seen[len(ended):len(ended) + 1]]


def test_a_scraper_that_has_gone_is_not_waited_for(port: int) -> None:
    run = attach(experiment="run", listen=f"127.0.0.1:{port}")
    run.log({"actor/pg_loss": 1.0}, 1)
    assert wait_for(lambda: get(port, "/metrics")[0] == 200)
    get(port, "/metrics")
    target = next(iter(recorder.process.targets.values()))
    assert isinstance(target, listen.Listen)
    target._scrapes.extend([clock() - 40.0, clock() - 30.0])
    before = clock()
    run.finish(0)
    assert clock() - before < 0.5
