"""Scraping other exporters: real servers, of the three dialects, and everything that can be wrong with one."""

from __future__ import annotations

import asyncio
import gzip
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from monitor import api
from monitor.catalog import METRICS, parse, resolve, series_key
from monitor.engine import Engine
from monitor.exporter import MonitorView, Renderer
from monitor.model import RawStep, RunEnded, RunStarted, RunState, SourceEvent
from monitor.sources import prometheus as module
from monitor.sources.exposition import read_page, unflatten
from monitor.sources.prometheus import PrometheusSource, ScrapeError, fetch
from tests.helpers import LAB, rows

AMBIGUOUS = ("agent_loop", "stage_token", "trajectory_off_policy")  # series whose flattened keys can be read two ways

Page = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def exporter(answer: Page) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Type": "text/plain; version=0.0.4", **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class Scraping:
    """A source that is scraped by hand: one look at a time."""

    def __init__(self, url: str, **options: object) -> None:
        self.source = PrometheusSource(url, clock=lambda: 1.0, **options)  # type: ignore[arg-type]  # as given
        self.events: list[SourceEvent] = []

    def look(self, times: int = 1) -> list[SourceEvent]:
        for _ in range(times):
            asyncio.run(self.source._look())
        new = list(self.source._events)
        self.source._events.clear()
        self.events += new
        return new

    @property
    def rows(self) -> list[tuple[int, dict[str, object]]]:
        return [(event.step, dict(event.values)) for event in self.events if isinstance(event, RawStep)]


def text_of(**gauges: float) -> str:
    return "".join(f"{name} {value}\n" for name, value in gauges.items())


@contextmanager
def showing(text: str = "") -> Iterator[tuple[Scraping, Callable[[str], None]]]:
    """A source on a page, and how to change the page."""
    shown = [text]
    with exporter(lambda handler: send(handler, shown[0].encode())) as url:
        yield Scraping(url, run="exp"), lambda text: shown.__setitem__(0, text)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0"])
def test_a_monitor_is_scraped_like_its_log_is_read(accept: str) -> None:
    """Every series of every metric comes back as it was, in base units, at every step; and so do the verdicts."""
    first, second = Engine(), Engine()
    renderer = Renderer()
    body: list[bytes] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        page, kind = renderer.page(first.snapshot(), MonitorView(heartbeat_seconds=0.0), accept)
        body.append(page)
        send(handler, page, Content_Type=kind)

    with exporter(answer) as url:
        scraping = Scraping(url)
        for step, data in rows(LAB / "ppo-kl-runaway.jsonl"):
            first.handle(RawStep("kl", step, float(step), data, "demo"))
            scraping.look(2)
            for event in scraping.events[-1:]:
                assert isinstance(event, RawStep)
                assert (event.run, event.project, event.step) == ("kl", "demo", step)
                here, there = parse(event).values, first.snapshot().runs[0].values
                assert {s: v for s, v in here.items() if not s.startswith("validation")} == pytest.approx(
                    {s: v for s, v in there.items() if not s.startswith("validation")}, rel=1e-12, nan_ok=True)
    for event in scraping.events:
        second.handle(event)
    ours, theirs = (api.check_report(engine.snapshot().runs[0]) for engine in (second, first))
    assert [(f["detector"], f["first_step"], f["critical_step"]) for f in ours["findings"]] == [
        (f["detector"], f["first_step"], f["critical_step"]) for f in theirs["findings"]] != []
    assert ours["steps"] == theirs["steps"]
    assert scraping.source.stats.rejected == dict.fromkeys(module.REASONS, 0)


def test_the_guides_names() -> None:
    registry = CollectorRegistry()
    steps = Gauge("verl_rollout_steps_total", "x", registry=registry)
    loss, kl = (Gauge(name, "x", registry=registry) for name in ("verl_policy_loss", "verl_kl_divergence"))
    with exporter(lambda handler: send(handler, generate_latest(registry))) as url:
        scraping = Scraping(url, project="p")
        for step in (1, 2, 3):
            steps.set(step)
            loss.set(0.5 * step)
            kl.set(math.nan)
            scraping.look(2)
    assert [step for step, _ in scraping.rows] == [1, 2, 3]
    observation = parse([event for event in scraping.events if isinstance(event, RawStep)][-1])
    assert observation.values == pytest.approx(
        {"policy_loss": 1.5, "kl_divergence/reference": math.nan}, nan_ok=True)
    assert {event.run for event in scraping.events} == {scraping.source.stats.name.removeprefix("prometheus:")}


def test_flattened_names_of_verls_keys() -> None:
    _, data = rows(LAB / "ppo-healthy.jsonl")[1]
    flat = {"".join(c if c.isalnum() else "_" for c in key): value for key, value in data.items()}
    with showing(text_of(**flat)) as (scraping, _):  # type: ignore[arg-type]  # numbers
        scraping.look(2)
    ((step, values),) = scraping.rows
    assert step == 1
    ours = parse(RawStep("exp", 1, 0.0, values))
    whole = parse(RawStep("exp", 1, 0.0, data))
    assert ours.values.keys() >= {s for s in whole.values if not s.startswith(AMBIGUOUS)}
    assert {s: ours.values[s] for s in whole.values if s in ours.values} == {
        s: v for s, v in whole.values.items() if s in ours.values}


@pytest.mark.parametrize(("flat", "key"), [
    ("actor_pg_loss", "actor/pg_loss"), ("timing_s_gen", "timing_s/gen"),
    ("timing_s_update_actor", "timing_s/update_actor"),
    ("val_core_openai_gsm8k_acc_mean_1", "val-core/openai_gsm8k/acc/mean@1"),
    ("val_aux_x_reward_best_8_mean", "val-aux/x/reward/best@8/mean"), ("something_else", "something_else"),
])
def test_unflatten(flat: str, key: str) -> None:
    assert unflatten(flat) == key


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_series_has_a_key_in_its_unit(metric: object) -> None:
    series = metric.series(tuple("abcd"[: len(metric.labels)]))  # type: ignore[attr-defined]  # a Metric
    target = resolve(series_key(series))
    assert target is not None
    assert (target.series, target.scale) == (series, 1.0)
    assert resolve(series_key(series) + "|more") is None


def test_an_unchanged_counter_is_no_step_whatever_else_changes() -> None:
    with showing() as (scraping, show):
        for value in range(6):
            show(text_of(training_global_step=7, actor_pg_loss=value))
            scraping.look()
        assert [step for step, _ in scraping.rows] == [7]


def test_a_row_waits_for_a_second_look() -> None:
    """A scrape in the middle of an update: the counter has moved, the values are still those of the step before."""
    with showing() as (scraping, show):
        for step in (1, 2, 3):
            show(text_of(training_global_step=step, actor_pg_loss=step - 1))
            scraping.look()
            show(text_of(training_global_step=step, actor_pg_loss=step))
            scraping.look()
        assert [(step, values["actor/pg_loss"]) for step, values in scraping.rows] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_steps_between_two_looks_are_counted_and_not_made_up() -> None:
    with showing() as (scraping, show):
        for step in (1, 2, 5, 9):
            show(text_of(training_global_step=step, actor_pg_loss=step))
            scraping.look()
        scraping.look()
        assert [(step, values["actor/pg_loss"]) for step, values in scraping.rows] == [(n, n) for n in (1, 2, 5, 9)]
        assert scraping.source.stats.rejected["missed_steps"] == 2 + 3


def test_a_counter_that_goes_back_is_a_restart() -> None:
    with showing() as (scraping, show):
        for step in (4, 5, 1, 2):
            show(text_of(training_global_step=step, actor_pg_loss=1))
            scraping.look(2)
        assert [(type(event).__name__, getattr(event, "restarted", None)) for event in scraping.events] == [
            ("RunStarted", False), ("RawStep", None), ("RawStep", None), ("RunStarted", True), ("RawStep", None),
            ("RawStep", None)]


def test_a_validation_is_told_once() -> None:
    with showing() as (scraping, show):
        for step, score in ((1, 0.5), (2, 0.5), (3, 0.7)):
            show(text_of(training_global_step=step, actor_pg_loss=1, val_core_x_acc_mean_1=score))
            scraping.look(2)
        assert ["val-core/x/acc/mean@1" in values for _, values in scraping.rows] == [True, False, True]


def test_several_runs_and_their_ends() -> None:
    def page(**steps: int) -> str:
        return "".join(f'verl_run_last_step{{run="{run}"}} {step}\nverl_policy_loss{{run="{run}"}} 1\n'
                       for run, step in steps.items())

    with showing(page(a=1, b=4)) as (scraping, show):
        scraping.look(2)
        show(page(a=2, b=4) + 'verl_run_state{run="b",state="failed"} 1\nverl_run_state{run="a",state="finished"} 0\n')
        scraping.look(2)
        show(page(a=2))
        scraping.look(5)
        assert [(e.run, e.step) for e in scraping.events if isinstance(e, RawStep)] == [("a", 1), ("b", 4), ("a", 2)]
        ends = [(event.run, event.state) for event in scraping.events if isinstance(event, RunEnded)]
        assert ends == [("b", RunState.FAILED)]
        show(page(c=1))
        scraping.look(5)
        assert scraping.events[-1] == RunEnded("a", 1.0, RunState.GONE, "its series have left the page")


def test_what_processes_say_of_themselves_is_no_run() -> None:
    text = 'process_cpu_seconds_total 1\npython_info{version="3"} 1\nvllm:num_requests_running 3\nup 1\n'
    assert read_page(text, "x") == ({}, 0)


def test_a_page_without_a_step_counter_says_what_is_missing() -> None:
    with showing(text_of(actor_pg_loss=1)) as (scraping, _):
        assert scraping.look(2) == []
        assert scraping.source.stats.up
        assert "expected one of verl_run_last_step" in scraping.source.stats.detail


def bomb(handler: BaseHTTPRequestHandler) -> None:
    send(handler, gzip.compress(bytes(70 * 2**20)), Content_Encoding="gzip")


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"# x\n" * 2**16)
    except OSError:
        pass


def cut_short(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"x 1\n")


@pytest.mark.parametrize(("answer", "words"), [
    (lambda handler: send(handler, b"no", 500), "expected status 200, got 500"),
    (lambda handler: send(handler, b"no", 404), "got 404"),
    (lambda handler: send(handler, b"", 302, Location="file:///etc/passwd"), "got 302"),
    (lambda handler: send(handler, b"<html><body>It works!</body></html>"), "Prometheus' text format"),
    (lambda handler: send(handler, b"x{ 1\n"), "Prometheus' text format"),
    (lambda handler: handler.wfile.write(b"garbage\r\n\r\n"), "something else"),
    (lambda handler: send(handler, b"not gzip", Content_Encoding="gzip"), "something else"),
    (cut_short, "expected 996 bytes more"), (bomb, "expected at most"), (endless, "expected at most"),
], ids=range(10))
def test_trouble_is_told_counted_and_survived(answer: Page, words: str, caplog: pytest.LogCaptureFixture) -> None:
    good = [False]

    def either(handler: BaseHTTPRequestHandler) -> None:
        if good[0]:
            send(handler, text_of(training_global_step=1, actor_pg_loss=1).encode())
        else:
            answer(handler)

    with exporter(either) as url:
        scraping = Scraping(url)
        scraping.look(2)
        stats = scraping.source.stats
        assert not stats.up
        assert words in stats.detail
        assert sum(stats.rejected.values()) == 2
        assert len(caplog.records) == 1, "one warning, however often it fails"
        good[0] = True
        scraping.look(2)
        assert stats.up
        assert [step for step, _ in scraping.rows] == [1]


def test_nobody_listens() -> None:
    with exporter(lambda handler: None) as url:
        pass
    scraping = Scraping(url)
    scraping.look()
    assert "refused" in scraping.source.stats.detail


def test_an_endpoint_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DEADLINE_SECONDS", -1.9)  # the wait for a scrape: 0.1 s
    release = threading.Event()
    asked: list[float] = []

    def hang(url: str, token: str) -> tuple[str, bool]:
        asked.append(time.monotonic())
        release.wait(10)
        return text_of(training_global_step=1, actor_pg_loss=1), False

    async def follow() -> list[SourceEvent]:
        source = PrometheusSource("http://127.0.0.1:1/metrics", clock=time.monotonic, every_seconds=0.01)
        events: list[SourceEvent] = []

        async def gather() -> None:
            async for event in source:
                events.append(event)

        task = asyncio.create_task(gather())
        await asyncio.sleep(0.5)
        assert len(asked) == 1, "never more than one at a time"
        assert not source.stats.up
        release.set()
        while len(events) < 2:
            await asyncio.sleep(0.01)
        await source.aclose()
        await asyncio.wait_for(task, 5)
        return events

    monkeypatch.setattr(module, "fetch", hang)
    events = asyncio.run(asyncio.wait_for(follow(), 10))
    assert [type(event) for event in events[:2]] == [RunStarted, RawStep]


def test_a_token_is_sent() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"x 1\n", 200 if handler.headers["Authorization"] == "Bearer s3cret" else 401)

    with exporter(answer) as url:
        assert fetch(url, "s3cret") == ("x 1\n", False)
        with pytest.raises(ScrapeError, match="got 401"):
            fetch(url)


def test_runs_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monitor.sources.exposition.MAX_RUNS", 5)
    text = "".join(f'verl_policy_loss{{run="r{number}"}} 1\n' for number in range(8))
    runs, cut = read_page(text, "x")
    assert (len(runs), cut) == (5, 3)


SAMPLES = r"([a-z_]+(\{[a-z]+=\"[^\"]*\"\})? [0-9NaInf.e+-]+\n)*"


@given(st.text() | st.from_regex(SAMPLES, fullmatch=True), st.booleans())
def test_any_text_is_a_page_or_a_value_error(text: str, open_metrics: bool) -> None:
    try:
        runs, cut = read_page(text, "x", open_metrics=open_metrics)
    except ValueError:
        return
    assert cut == 0
    for page in runs.values():
        parse(RawStep("x", page.step or 0, 0.0, page.values))


def test_served_from_the_command_line(tmp_path: Path) -> None:
    from tests.helpers import wait_for
    from tests.servers import get_json, monitor

    step = [0]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        step[0] += 1
        send(handler, text_of(verl_rollout_steps_total=step[0] // 3, actor_pg_loss=1).encode())

    with exporter(answer) as url, monitor(url, log=tmp_path / "log") as own:  # type: ignore[arg-type]  # a SOURCE
        run = url.split("/")[2]
        wait_for(lambda: (get_json(f"{own}/api/v1/runs/{run}") or {}).get("steps", 0) >= 1, 20, "a step")
