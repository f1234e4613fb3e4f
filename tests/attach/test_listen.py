"""Detectors and /metrics inside the trainer's process."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from monitor.attach import attach, listen, recorder, rows
from monitor.attach.recorder import Recorder
from monitor.attach.settings import clock, read
from tests.attach.stub import Stub, wait_for
from tests.helpers import REPOSITORY
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


def test_a_run_is_judged_and_served(port: int, lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_MONITOR_LINGER", "0")  # who scrapes here is who waits
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


# --- the end


@pytest.fixture
def scraped(port: int) -> Recorder:
    """A run that was scraped once, a moment ago."""
    run = attach(experiment="run", listen=f"127.0.0.1:{port}")
    run.log({"actor/pg_loss": 1.0}, 1)
    assert wait_for(lambda: has_step(port, 1))
    return run


def seconds_to_finish(run: Recorder, meanwhile: Callable[[], object] = lambda: None, after: float = 0.3) -> float:
    """How long ``finish()`` takes, while something happens a moment after it was called."""
    timer = threading.Timer(after, meanwhile)
    timer.start()
    start = time.monotonic()
    run.finish(0)
    took = time.monotonic() - start
    timer.join()
    return took


def test_the_end_waits_until_a_scrape_has_seen_it(port: int, scraped: Recorder) -> None:
    seen: list[float] = []
    took = seconds_to_finish(scraped, lambda: seen.append(samples(port)["verl_run_state{run=run,state=finished}"]))
    assert 0.25 < took < 10
    assert seen == [1]
    start = time.monotonic()
    scraped.finish(0)
    recorder.process._exit()
    assert time.monotonic() - start < 5, "once is enough"


def test_each_of_several_runs_in_one_process_is_seen_to_end(port: int, scraped: Recorder) -> None:
    seconds_to_finish(scraped, lambda: get(port, "/metrics"))
    again = attach(experiment="again", listen=f"127.0.0.1:{port}")
    other = attach(experiment="other", listen=f"127.0.0.1:{port}")
    assert seconds_to_finish(again, after=0) < 5, "another run goes on"
    assert 0.25 < seconds_to_finish(other, lambda: get(port, "/metrics")) < 10


def test_what_is_no_scrape_ends_no_wait(port: int, scraped: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    target = next(iter(recorder.process.targets.values()))
    monkeypatch.setattr(target, "_linger_seconds", 1.0)
    assert 1 <= seconds_to_finish(scraped, lambda: (get(port, "/-/healthy"), get(port, "/api/v1/runs"))) < 10


def test_a_page_that_was_begun_before_the_end_does_not_show_it(port: int, scraped: Recorder,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = next(iter(recorder.process.targets.values()))
    monkeypatch.setattr(target, "_linger_seconds", 1.0)
    begun, let_go = threading.Event(), threading.Event()
    page = target.page

    def slow(path: str, accept: str) -> Any:
        answer = page(path, accept)
        begun.set()
        let_go.wait(5)
        return answer

    monkeypatch.setattr(target, "page", slow)
    scraper = threading.Thread(target=get, args=(port, "/metrics"))
    scraper.start()
    assert begun.wait(5)
    assert seconds_to_finish(scraped, let_go.set) >= 1
    scraper.join()


@pytest.mark.parametrize("why", ["never scraped", "no longer scraped", "VERL_MONITOR_LINGER=0"])
def test_the_end_does_not_wait_in_vain(port: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why.startswith("VERL"):
        monkeypatch.setenv("VERL_MONITOR_LINGER", "0")
    run = attach(experiment="run", listen=f"127.0.0.1:{port}")
    run.log({"actor/pg_loss": 1.0}, 1)
    assert wait_for(lambda: get(port, "/-/healthy")[0] == 200)
    if why != "never scraped":
        get(port, "/metrics")
    if why == "no longer scraped":
        target: Any = next(iter(recorder.process.targets.values()))
        target._scraped -= listen.SCRAPED_WITHIN_SECONDS
    assert seconds_to_finish(run) < 5


def test_a_dead_service_does_not_cost_the_last_scrape(port: int, absent_port: int,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as dead:  # takes connections and never answers
        run = attach(experiment="run", listen=f"127.0.0.1:{port}", url=f"http://127.0.0.1:{dead.getsockname()[1]}")
        run.log({"actor/pg_loss": 1.0}, 1)
        assert wait_for(lambda: has_step(port, 1))
        took = seconds_to_finish(run, lambda: get(port, "/metrics"), after=1)
    assert 1 <= took < 10


def test_a_scrape_is_answered_where_no_thread_can_begin(port: int, scraped: Recorder,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if "process_request_thread" in thread.name:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2 * listen.MAX_REQUESTS):
        assert get(port, "/metrics")[0] == 200
    assert 0.25 < seconds_to_finish(scraped, lambda: get(port, "/metrics")) < 10


@pytest.mark.parametrize(("value", "seconds"), [("7.5", 7.5), ("0", 0.0), ("", 20.0), ("soon", 20.0), ("-1", 20.0),
                                                ("nan", 20.0), ("inf", 20.0), ("1e300", 20.0)])
def test_how_long_the_end_waits_can_be_set(value: str, seconds: float, monkeypatch: pytest.MonkeyPatch,
                                           capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VERL_MONITOR_LINGER", value)
    assert read().linger_seconds == seconds
    assert ("VERL_MONITOR_LINGER" in capfd.readouterr().err) is (value not in ("7.5", "0", ""))


TRAINER = """
import signal, sys, threading
from monitor.attach import attach
run = attach(experiment="run", listen="127.0.0.1:{port}")
run.log({{"actor/pg_loss": 1.0}}, 1)
signal.signal(signal.SIGUSR1, lambda *_: None)
print("begun", flush=True)
signal.pause()
{end}
"""


@pytest.mark.parametrize(("end", "sent", "code"), [
    ("run.finish(0); sys.exit(5)", None, 5), ("sys.exit(5)", None, 5), ("raise ValueError", None, 1),
    ("sys.exit(5)", signal.SIGINT, 5), ("sys.exit(5)", signal.SIGTERM, -signal.SIGTERM),
    ("run.finish(0); sys.exit(5)", signal.SIGTERM, -signal.SIGTERM)],
    ids=["finish", "exit", "exception", "interrupted", "terminated", "terminated in finish"])
def test_a_process_ends_with_its_own_code(absent_port: int, end: str, sent: signal.Signals | None, code: int) -> None:
    done = subprocess.Popen([sys.executable, "-c", TRAINER.format(port=absent_port, end=end)], cwd=REPOSITORY,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout is not None
    assert done.stdout.readline() == "begun\n"
    assert wait_for(lambda: has_step(absent_port, 1))
    done.send_signal(signal.SIGUSR1)
    state = "verl_run_state{run=run,state=%s}" % ("failed" if end.startswith("raise") else "finished")
    time.sleep(1.5)
    assert done.poll() is None, "it waits"
    before = time.monotonic()
    if sent is None:
        assert samples(absent_port)[state] == 1
    else:
        done.send_signal(sent)
    _, errors = done.communicate(timeout=10)
    assert time.monotonic() - before < 8
    assert done.returncode == code
    assert errors.count("verl-monitor:") == 2, errors
    assert ("Traceback" in errors) is end.startswith("raise")
