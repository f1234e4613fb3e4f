"""The service: HTTP answers, health, isolation of sources, and its end."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from monitor.clock import steady_clock
from monitor.engine import Engine, EngineSettings
from monitor.model import RawStep, SourceEvent
from monitor.service import STUCK_AFTER_SECONDS, Service, create_app
from monitor.sources import SourceStats
from tests.helpers import LAB, free_port, rows, wait_for
from tests.servers import get, get_json, monitor, samples


class ListSource:
    """A source that hands out given events, then waits, or raises."""

    def __init__(self, events: list[SourceEvent], error: Exception | None = None, name: str = "list") -> None:
        self.stats = SourceStats(name, up=True, last_read_seconds=1.0)
        self.events, self.error, self.tries = events, error, 0

    async def __aiter__(self) -> AsyncIterator[SourceEvent]:
        self.tries += 1
        for event in self.events:
            yield event
        if self.error:
            raise self.error
        await asyncio.Event().wait()

    def alive(self) -> None:
        """Nothing to tell."""

    async def aclose(self) -> None:
        """Nothing to close."""


def _events(run: str = "ppo/one") -> list[SourceEvent]:
    return [RawStep(run, step, float(step), data, "project") for step, data in rows(LAB / "ppo-kl-runaway.jsonl")]


def _client(*sources: ListSource, clock: Callable[[], float] | None = None) -> tuple[TestClient, Service]:
    service = Service(engine=Engine(), sources=list(sources), clock=clock or steady_clock())
    return TestClient(create_app(service)), service


def test_runs_and_one_run() -> None:
    client, _ = _client(ListSource(_events()))
    with client:
        wait_for(lambda: client.get("/api/v1/runs").json()["runs"], what="runs")
        [summary] = client.get("/api/v1/runs").json()["runs"]
        assert summary["run"] == "ppo/one"
        assert summary["verdict"] == "critical"
        assert "kl_runaway" in summary["findings"]
        detail = client.get("/api/v1/runs/ppo/one").json()
        kl = next(d for d in detail["detectors"] if d["detector"] == "kl_runaway")
        assert "KL to the reference rose to" in kl["reason"]
        assert kl["evidence"]["kl_reference"] > 1
        assert kl["runbook"] == "/runbooks/VerlKlRunaway"
        assert detail["incidents"][0]["ended"] is None
        missing = client.get("/api/v1/runs/nobody")
        assert (missing.status_code, missing.json()) == (404, {"error": "no run named 'nobody' is known"})


def test_metrics_formats_and_compression() -> None:
    client, _ = _client(ListSource(_events()))
    with client:
        wait_for(lambda: "kl_runaway" in client.get("/metrics").text, what="metrics")
        plain = client.get("/metrics", headers={"Accept-Encoding": "identity"})
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "content-encoding" not in plain.headers
        openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
        assert openmetrics.text.endswith("# EOF\n")
        assert openmetrics.text.count("# EOF") == 1
        with client.stream("GET", "/metrics", headers={"Accept-Encoding": "gzip"}) as packed:
            assert packed.headers["content-encoding"] == "gzip"
            raw = b"".join(packed.iter_raw())
        assert b"verl_health_state" in gzip.decompress(raw)
        assert len(raw) < len(plain.content) / 3


def test_pages() -> None:
    client, _ = _client(ListSource(_events("<script>x</script>")))
    with client:
        wait_for(lambda: client.get("/api/v1/runs").json()["runs"], what="runs")
        index = client.get("/").text
        assert "&lt;script&gt;" in index
        assert "<script>x" not in index
        page = client.get("/runs/<script>x</script>").text
        assert "What to do:" in page
        assert "actor_rollout_ref.actor.kl_loss_coef" in page
        assert "<script>x" not in page
        assert client.get("/runs/none").status_code == 404
        runbook = client.get("/runbooks/VerlKlRunaway")
        assert runbook.status_code == 200
        assert "<h2>Mitigation</h2>" in runbook.text
        assert client.get("/runbooks/..%2f..%2fREADME").status_code == 404


def test_health_is_that_of_the_loop_not_of_http() -> None:
    now = [1000.0]
    client, service = _client(ListSource([]), clock=lambda: now[0])
    with client:
        assert client.get("/-/healthy").status_code == 200
        assert client.get("/-/ready").status_code == 200
        service._tasks[0].cancel()
        now[0] += STUCK_AFTER_SECONDS + 1
        assert client.get("/-/healthy").status_code == 503
        assert client.get("/-/ready").status_code == 503
        assert client.get("/metrics").status_code == 200


def test_not_ready_before_the_first_poll() -> None:
    source = ListSource([])
    source.stats.last_read_seconds = None
    client, _ = _client(source)
    with client:
        assert client.get("/-/ready").status_code == 503
        assert client.get("/-/healthy").status_code == 200


def test_case_41_a_source_that_raises_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = ListSource([], RuntimeError("disk gone"), "bad"), ListSource(_events(), None, "good")
    client, _ = _client(bad, good)
    with client:
        wait_for(lambda: bad.tries > 1, 5, "the bad source is tried again")
        text = client.get("/metrics").text
        assert samples(text, "verl_monitor_source_up", source="bad") == [0.0]
        assert samples(text, "verl_monitor_source_up", source="good") == [1.0]
        assert samples(text, "verl_rollout_steps_total") == [100.0]
    assert "source bad failed" in caplog.text


def test_rendering_leaves_the_event_loop_free() -> None:
    async def run() -> tuple[float, float]:
        engine = Engine(EngineSettings(max_runs=400))
        for number in range(300):
            for event in _events(f"run{number}")[:2]:
                engine.handle(event, "test")
        service = Service(engine=engine, sources=[], clock=steady_clock())
        worst = 0.0
        task = asyncio.create_task(service.metrics("", compress=True))
        started = before = time.perf_counter()
        while not task.done():
            await asyncio.sleep(0.001)
            worst, before = max(worst, time.perf_counter() - before), time.perf_counter()
        return worst, time.perf_counter() - started

    worst, whole = asyncio.run(run())
    assert whole > 0.1, "the page must be large enough for this test to mean something"
    assert worst < max(0.1, whole / 3)


def test_a_log_is_followed_and_sigterm_ends_it_in_time(tmp_path: Path) -> None:
    lines = (LAB / "ppo-skipped-updates.jsonl").read_bytes().splitlines(keepends=True)
    log = tmp_path / "cpu" / "broken.jsonl"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    child = subprocess.Popen(
        [sys.executable, "-m", "monitor.cli", "serve", "--listen", f"127.0.0.1:{port}", "--poll", "0.2", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: get(f"{url}/-/ready")[0] == 200, what="ready")
        log.parent.mkdir()
        with log.open("wb", buffering=0) as file:
            for step, line in enumerate(lines[:5]):
                written = time.monotonic()
                file.write(line)
                wait_for(lambda step=step: (get_json(f"{url}/api/v1/runs/broken") or {}).get("values", {}).get(  # type: ignore[misc]
                    "global_step") == (step or None) and get_json(f"{url}/api/v1/runs/broken"), 5, f"step {step}")
                assert time.monotonic() - written < 2.0
            assert get_json(f"{url}/api/v1/runs/broken")["findings"] == ["non_finite"]
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=10)
        assert time.monotonic() - started < 5.0
        assert child.returncode == 0, err
        assert f"on http://127.0.0.1:{port}/" in out
    finally:
        child.kill()
        child.wait()


def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    with monitor(tmp_path, log=tmp_path / "log") as url:
        done = subprocess.run(
            [sys.executable, "-m", "monitor.cli", "serve", "--listen", url.removeprefix("http://"), str(tmp_path)],
            capture_output=True, text=True, check=False, timeout=20)
        assert done.returncode == 3
        assert "cannot listen on" in done.stderr
        assert "Traceback" not in done.stderr


def test_json_has_no_nan() -> None:
    client, _ = _client(ListSource([RawStep("run", 1, 1.0, {"actor/pg_loss": None})]))
    with client:
        wait_for(lambda: client.get("/api/v1/runs").json()["runs"], what="runs")
        body = client.get("/api/v1/runs/run").text
        assert json.loads(body, parse_constant=pytest.fail)["values"]["policy_loss"] is None
