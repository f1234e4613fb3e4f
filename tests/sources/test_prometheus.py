"""Scraping other exporters: real servers, of the three dialects, and everything that can be wrong with one."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import socket
import threading
import time
import urllib.request
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
from monitor.http import HttpError
from monitor.model import RawStep, RunEnded, RunStarted, RunState, SourceEvent
from monitor.sources import exposition, scrape
from monitor.sources import prometheus as module
from monitor.sources.exposition import read_page, unflatten
from monitor.sources.prometheus import PrometheusSource
from monitor.sources.scrape import fetch
from tests.helpers import CASES, LAB, rows, wait_for
from tests.servers import get, get_json, monitor

AMBIGUOUS = "stage_duration_seconds/agent_loop"  # its stages have slashes of their own, which flattening loses
RL_INSIGHT = "rl_insight_monitor_"  # its default namespace

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
            assert self.source._scrape is None
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
    loss, kl, memory = (Gauge(name, "x", registry=registry) for name in (
        "verl_policy_loss", "verl_kl_divergence", "verl_gpu_memory_used_bytes"))
    memory.set(7e9)
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
    assert observation.unknown == {"verl_gpu_memory_used_bytes": 7e9}, "no series of a run, and kept all the same"
    assert {event.run for event in scraping.events} == {scraping.source.stats.name.removeprefix("prometheus:")}


def flattened(key: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in key)


@pytest.mark.parametrize("prefix", ["", RL_INSIGHT, "verl_"])
@pytest.mark.parametrize("log", ["ppo-healthy", "ppo-kl-runaway", "nan-onset"])
def test_flattened_names_of_verls_keys(log: str, prefix: str) -> None:
    """In every version's rows: what is flattened and found again is what the row itself says, in base units."""
    path = LAB / f"{log}.jsonl"
    for step, data in rows(path if path.exists() else CASES / "01_nan_onset_as_null.jsonl")[1:40:6]:
        data = {"training/global_step": step, **data}
        text = "".join(f"{prefix}{flattened(key)} {math.nan if value is None else value}\n"
                       for key, value in data.items())
        page = read_page(text, "exp")[0]["exp"]
        assert page.step == step
        ours, whole = (parse(RawStep("exp", step, 0.0, values)) for values in (page.values, data))
        expected = {s: v for s, v in whole.values.items() if not s.startswith((AMBIGUOUS, "validation_score"))}
        assert {s: ours.values[s] for s in expected} == pytest.approx(expected, nan_ok=True)
        scores = [sorted(v for s, v in o.values.items() if s.startswith("validation_score")) for o in (ours, whole)]
        assert scores[0] == pytest.approx(scores[1])


@pytest.mark.parametrize("counter_first", [True, False])
def test_rl_insight_sets_one_gauge_after_the_other(counter_first: bool) -> None:
    """A scrape between any two of them, with the labels that it gives, makes no row of mixed steps."""
    registry = CollectorRegistry()
    names = ["actor_pg_loss", "actor_entropy", "my_own_reward"]
    names.insert(0 if counter_first else len(names), "training_global_step")
    gauges = {name: Gauge(RL_INSIGHT + name, "x", ("project", "experiment_name"), registry=registry) for name in names}
    with exporter(lambda handler: send(handler, generate_latest(registry))) as url:
        scraping = Scraping(url, run="not this", project="nor this")
        for torn in range(len(names)):
            step = torn + 1
            for place, gauge in enumerate(gauges.values()):
                gauge.labels("p", "e").set(step)
                if place == torn:
                    scraping.look()
            scraping.look(2)
    assert [event.project for event in scraping.events if isinstance(event, RawStep)] == ["p"] * len(names)
    assert {event.run for event in scraping.events} == {"e"}
    assert scraping.rows == [(step, {"training/global_step": step, "actor/pg_loss": step, "actor/entropy": step,
                                     f"{RL_INSIGHT}my_own_reward": step}) for step in range(1, len(names) + 1)]


@pytest.mark.parametrize(("flat", "key"), [
    ("actor_pg_loss", "actor/pg_loss"), ("timing_s_gen", "timing_s/gen"),
    ("timing_s_update_actor", "timing_s/update_actor"),
    ("val_core_openai_gsm8k_acc_mean_1", "val-core/openai_gsm8k/acc/mean@1"),
    ("val_aux_x_reward_best_8_mean", "val-aux/x/reward/best@8/mean"),
    ("val-core_x_acc_mean@1", "val-core/x/acc/mean@1"),
    ("val_aux_num_turns_mean", "val-aux/num_turns/mean"), ("reward_std", "reward_std"),
    ("training_off_policy_trajectory_staleness_worst_mean", "training/off_policy/trajectory_staleness_worst/mean"),
    ("timing_s_agent_loop_slowest_num_preempted", "timing_s/agent_loop/slowest/num_preempted"),
    ("timing_per_token_ms_update_actor", "timing_per_token_ms/update_actor"),
    ("something_else", None), ("reward_format", None), ("timing_s_", None),
])
def test_unflatten(flat: str, key: str | None) -> None:
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


@pytest.mark.parametrize("name", ["val_core_x_acc_mean_1", f"{RL_INSIGHT}val_core_x_acc_mean_1",
                                  "verl_gradient_warnings", "verl_resumed_from_step"])
def test_what_is_logged_now_and_then_is_told_once(name: str) -> None:
    prefix = RL_INSIGHT if name.startswith(RL_INSIGHT) else ""
    values = (0.5, 0.5, 0.7, math.nan, math.nan)
    with showing() as (scraping, show):
        for step, value in enumerate(values):
            show(text_of(**{f"{prefix}training_global_step": step, f"{prefix}actor_pg_loss": 1, name: value}))
            scraping.look(2)
        assert [len(row) - 2 for _, row in scraping.rows] == [1, 0, 1, 1, 0]


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


def test_a_run_that_begins_again_on_another_monitor_makes_no_row_of_its_other_counters() -> None:
    """Without a last step of its new start a run still shows the steps that it has counted and its last values."""
    more = 'verl_rollout_steps_total{run="a"} 90\nverl_global_step{run="a"} 70\nverl_policy_loss{run="a"} 1\n'

    def state(name: str) -> str:
        return f'verl_run_state{{run="a",state="{name}"}} 1\n' + more

    with showing(state("running") + 'verl_run_last_step{run="a"} 70\n') as (scraping, show):
        scraping.look(2)
        show(state("starting"))
        assert scraping.look(4) == []
        assert scraping.source.stats.detail == "", "there will be one"
        show(state("running") + 'verl_run_last_step{run="a"} 51\n')
        scraping.look(2)
        assert [(type(event).__name__, getattr(event, "step", None)) for event in scraping.events] == [
            ("RunStarted", None), ("RawStep", 70), ("RunStarted", None), ("RawStep", 51)]


def test_a_run_that_fails_before_its_first_step_has_a_beginning_and_an_end() -> None:
    with showing('verl_run_state{run="a",state="failed"} 1\nverl_rollout_steps_total{run="a"} 0\n') as (scraping, _):
        scraping.look(5)
        assert [type(event) for event in scraping.events] == [RunStarted, RunEnded]


def test_a_better_counter_that_appears_later_is_no_jump() -> None:
    with showing(text_of(verl_rollout_steps_total=0, actor_pg_loss=1)) as (scraping, show):
        scraping.look(2)
        for step in (81, 82):
            show(text_of(verl_rollout_steps_total=step - 80, training_global_step=step, actor_pg_loss=1))
            scraping.look(2)
        show(text_of(verl_rollout_steps_total=2, actor_pg_loss=1))
        scraping.look(2)
        assert [step for step, _ in scraping.rows] == [0, 81, 82]
        assert (scraping.source.stats.rejected["missed_steps"], scraping.source.stats.restarts) == (0, 0)


def test_a_frozen_page_is_a_stall_and_an_endpoint_that_is_away_is_no_end() -> None:
    """Values that stand still while scrapes succeed (cases 35 and 41) are no steps, so the run stalls."""
    engine, now, up = Engine(), [0.0], [True]
    shown = [0]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, text_of(training_global_step=shown[0], actor_pg_loss=1).encode(), 200 if up[0] else 503)

    with exporter(answer) as url:
        scraping = Scraping(url, run="exp", every_seconds=60.0)
        scraping.source._clock = lambda: now[0]

        def pass_minutes(minutes: int, steps: int) -> RunState:
            for _ in range(minutes):
                now[0] += 60.0
                shown[0] += steps
                for event in scraping.look(2):
                    engine.handle(event)
                engine.tick(now[0])
            return engine.snapshot().runs[0].state

        assert pass_minutes(20, 1) is RunState.RUNNING
        assert pass_minutes(60, 0) is RunState.STALLED
        assert pass_minutes(3, 1) is RunState.RUNNING
        up[0] = False
        pass_minutes(5, 0)
        assert not any(isinstance(event, RunEnded) for event in scraping.events)
        assert not scraping.source.stats.up
        up[0] = True
        assert pass_minutes(2, 1) is RunState.RUNNING
        assert [step for step, _ in scraping.rows] == list(range(1, 26))
        assert scraping.source.stats.rejected["missed_steps"] == 0


def test_a_trainer_that_goes_and_comes_back() -> None:
    """Nobody listens for a while; the same page afterwards is not a new step, and a moved counter is."""
    step = [3]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, text_of(training_global_step=step[0], actor_pg_loss=1).encode())

    with exporter(answer) as url:
        scraping = Scraping(url, run="exp")
        scraping.look(2)
    scraping.look(5)
    assert "refused" in scraping.source.stats.detail
    with exporter(answer) as url:
        scraping.source._url = url
        scraping.look(3)
        assert scraping.source.stats.up
        step[0] = 4
        scraping.look(2)
    assert [type(event) for event in scraping.events] == [RunStarted, RawStep, RawStep]


def test_of_a_value_for_each_rank_a_fault_is_kept_and_the_others_are_counted() -> None:
    text = "training_global_step 1\n" + "".join(
        f'actor_grad_norm{{rank="{rank}"}} {value}\n' for rank, value in enumerate((1.0, math.nan, 3.0)))
    with showing(text) as (scraping, _):
        scraping.look(2)
        assert math.isnan(scraping.rows[0][1]["actor/grad_norm"])  # type: ignore[arg-type]  # a number
        assert scraping.source.stats.rejected["repeated"] == 2 * 2


def test_not_a_number_is_handed_on_and_a_samples_own_time_is_not() -> None:
    """Cases 38 and 39: a time stamp hours off changes nothing, and +Inf and NaN are what the detector wants."""
    text = "training_global_step 4 1000\nactor_pg_loss NaN 99999999999999\nactor_grad_norm +Inf -5\n"
    with showing(text) as (scraping, _):
        scraping.look(2)
        (row,) = (event for event in scraping.events if isinstance(event, RawStep))
        assert row.time_seconds == 1.0
        assert parse(row).values == pytest.approx(
            {"global_step": 4.0, "policy_loss": math.nan, "gradient_norm/actor": math.nan}, nan_ok=True)


def test_ever_new_names_of_runs_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 36: two thousand names that hold dates, a hundred at a time."""
    monkeypatch.setattr(module, "_KNOWN", 150)
    names = [json.loads(line)["run"] for line in (CASES / "36_label_churn.jsonl").read_text().splitlines()]
    source = PrometheusSource("http://127.0.0.1:1/metrics", clock=lambda: 1.0)
    for first in range(0, len(names), 100):
        pages, _ = read_page("".join(f'verl_run_last_step{{run="{name}"}} 1\n' for name in names[first:first + 100]),
                             "x")
        source._take(pages)
        assert len(source._runs) <= 150
    kinds = [type(event) for event in source._events]
    assert kinds.count(RunStarted) == len(names)
    assert kinds.count(RunEnded) >= len(names) - 300
    hostile = read_page('verl_run_last_step{run="a\\nb\u202ec"} 1\n', "x")[0]
    source._take(hostile)
    assert all(name.isprintable() for name in source._runs)


def test_what_processes_say_of_themselves_is_no_run() -> None:
    text = ('process_cpu_seconds_total 1\npython_info{version="3"} 1\nvllm:num_requests_running 3\nup 1\n'
            "# TYPE lag histogram\nlag_bucket{le=\"+Inf\"} 1\nlag_sum 1\nlag_count 1\n")
    assert read_page(text, "x") == ({}, 0)


def test_what_has_no_run_on_a_page_of_runs_is_the_machines() -> None:
    text = 'verl_run_last_step{run="a"} 1\nverl_gpu_memory_used_bytes{gpu="0"} 7\nverl_monitor_heartbeat 3\n'
    assert read_page(text, "x")[0].keys() == {"a"}


@pytest.mark.parametrize("text", ["", "process_cpu_seconds_total 1\n", text_of(actor_pg_loss=1),
                                  text_of(training_global_step=math.nan, actor_pg_loss=1)])
def test_a_page_without_a_step_counter_says_what_is_missing(text: str) -> None:
    with showing(text) as (scraping, _):
        assert scraping.look(2) == []
        assert scraping.source.stats.up
        assert "no step counter: expected one of verl_run_last_step" in scraping.source.stats.detail


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://h/metrics", "trainer:8000", "http://"])
def test_only_http_is_asked(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL such as http"):
        PrometheusSource(url, clock=lambda: 1.0)


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


def half_a_gzip(handler: BaseHTTPRequestHandler) -> None:
    send(handler, gzip.compress(b"".join(b"x%d %d\n" % (n, n * n) for n in range(999)))[:-500], Content_Encoding="gzip")


@pytest.mark.parametrize(("answer", "words"), [
    (lambda handler: send(handler, b"no", 500), "expected status 200, got 500"),
    (lambda handler: send(handler, b"no", 404), "got 404"),
    (lambda handler: send(handler, b"", 302, Location="file:///etc/passwd"), "got 302"),
    (lambda handler: send(handler, b"<html><body>It works!</body></html>"), "Prometheus' text format"),
    (lambda handler: send(handler, b"x{ 1\n"), "Prometheus' text format"),
    (lambda handler: handler.wfile.write(b"garbage\r\n\r\n"), "something else"),
    (lambda handler: send(handler, b"not gzip", Content_Encoding="gzip"), "something else"),
    (lambda handler: send(handler, bytes(range(256))), "Prometheus' text format"),
    (cut_short, "expected 996 bytes more"), (half_a_gzip, "one whole gzip stream"),
    (bomb, "expected at most"), (endless, "expected at most"),
], ids=range(12))
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


def test_a_body_that_drips_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "DEADLINE_SECONDS", 0.3)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(100):
                handler.wfile.write(b"#")
                time.sleep(0.05)
        except OSError:
            pass

    with exporter(drip) as url:
        started = time.monotonic()
        with pytest.raises(HttpError, match="got a part of it"):
            fetch(url)
        assert time.monotonic() - started < 2.0


def test_endpoints_that_hang_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """They accept and never answer: one thread each, none of the loop's own, and the end does not wait for them."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.1)

    async def follow(url: str) -> list[PrometheusSource]:
        sources = [PrometheusSource(url, clock=time.monotonic, every_seconds=0.01) for _ in range(40)]

        async def read(source: PrometheusSource) -> None:
            async for _ in source:
                raise AssertionError("an event out of nothing")

        tasks = [asyncio.create_task(read(source)) for source in sources]
        await asyncio.sleep(0.6)
        started = time.monotonic()
        await asyncio.to_thread(lambda: None)
        assert time.monotonic() - started < 1.0, "the loop's threads are free"
        for source in sources:
            await source.aclose()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        return sources

    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        before = threading.active_count()
        started = time.monotonic()
        sources = asyncio.run(follow(f"http://127.0.0.1:{server.getsockname()[1]}/metrics"))
        assert time.monotonic() - started < 5.0
        assert threading.active_count() - before <= len(sources) + 1, "never more than one at a time"
    assert all(not source.stats.up and "no answer" in source.stats.detail for source in sources)
    assert all(source.stats.rejected["unreadable"] > 1 for source in sources)


def test_an_answer_that_comes_late_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.05)
    release = threading.Event()

    def late(handler: BaseHTTPRequestHandler) -> None:
        release.wait(10)
        send(handler, text_of(training_global_step=1, actor_pg_loss=1).encode())

    async def follow(url: str) -> list[SourceEvent]:
        source = PrometheusSource(url, clock=time.monotonic, every_seconds=0.01)
        events = []
        async for event in source:
            events.append(event)
            if isinstance(event, RawStep):
                await source.aclose()
            assert source.stats.rejected["unreadable"] >= 1
        return events

    with exporter(late) as url:
        threading.Timer(0.3, release.set).start()
        events = asyncio.run(asyncio.wait_for(follow(url), 10))
    assert [type(event) for event in events] == [RunStarted, RawStep]


def test_looks_back_off_while_there_is_nothing_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def follow() -> None:
        source = PrometheusSource("http://127.0.0.1:1/metrics", clock=lambda: 1.0, every_seconds=5.0)

        async def wait_for(waiting: object, seconds: float) -> None:
            waiting.close()  # type: ignore[attr-defined]  # a coroutine
            pauses.append(seconds)
            if len(pauses) == 8:
                await source.aclose()
            raise asyncio.TimeoutError

        monkeypatch.setattr(asyncio, "wait_for", wait_for)
        async for _ in source:
            raise AssertionError("an event out of nothing")

    asyncio.run(follow())
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0, 60.0]


def test_a_token_is_sent() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"x 1\n", 200 if handler.headers["Authorization"] == "Bearer s3cret" else 401)

    with exporter(answer) as url:
        assert fetch(url, "s3cret") == ("x 1\n", False)
        with pytest.raises(HttpError, match="got 401"):
            fetch(url)


def test_runs_and_samples_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MAX_RUNS", 5)
    text = "# a comment\n" + "".join(f'verl_policy_loss{{run="r{number}"}} 1\n' for number in range(8))
    runs, cut = read_page(text, "x")
    assert (len(runs), cut) == (5, 3)
    monkeypatch.setattr(exposition, "MAX_SAMPLES", 3)
    runs, cut = read_page(text, "x")
    assert (len(runs), cut) == (3, 5)


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


@given(st.text() | st.from_regex(SAMPLES, fullmatch=True), st.booleans())
def test_no_text_of_a_page_raises(text: str, open_metrics: bool) -> None:
    """From the body to the events, whatever it holds: a page, or one that is refused."""
    def had(url: str, token: str) -> tuple[str, bool]:
        return text, open_metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scrape, "fetch", had)
        scraping = Scraping("http://127.0.0.1:1/metrics")
        scraping.look(2)
    stats = scraping.source.stats
    assert stats.up == (stats.rejected["bad_page"] == 0)
    engine = Engine()
    for event in scraping.events:
        engine.handle(event)


def post(url: str, body: object) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.status == 200


def _has(run: str, step: int) -> bool:
    known = get_json(run) or {"values": {}}
    return bool(known["values"]) and (known["last_step"] or 0) == step  # of a validation alone nothing is the last


def test_a_chain_of_two_monitors(tmp_path: Path) -> None:
    """A recorded run is sent to a real service, row by row, and scraped from it: the same steps, values, verdicts."""
    engine = Engine()
    with monitor(tmp_path, log=tmp_path / "log") as first:
        scraping = Scraping(f"{first}/metrics")
        run = f"{first}/api/v1/runs/exp"
        for step, data in rows(LAB / "ppo-kl-runaway.jsonl"):
            post(f"{run}/steps", {"project": "p", "steps": [{"step": step, "values": data}]})
            wait_for(lambda step=step: _has(run, step), 5, f"step {step}")  # type: ignore[misc]
            for event in scraping.look(2):
                engine.handle(event)
            theirs, ours = get_json(run)["values"], engine.snapshot().runs[0].values
            assert ours == pytest.approx({s: math.nan if v is None else v for s, v in theirs.items()}, nan_ok=True)
        post(f"{run}/finish", {"exit_code": 0})
        wait_for(lambda: get_json(run)["state"] == "finished", 5)
        for event in scraping.look(3):
            engine.handle(event)
        known = get_json(run)
        assert get(f"{first}/-/healthy")[0] == 200
    view = engine.snapshot().runs[0]
    assert (view.run, view.project, view.state) == ("exp", "p", RunState.FINISHED)
    assert [step for step, _ in scraping.rows] == [step for step, _ in rows(LAB / "ppo-kl-runaway.jsonl")]
    assert [d.spec.id for d in view.detectors if d.severity] == known["findings"] != []
    assert sum(isinstance(event, RunEnded) for event in scraping.events) == 1
    assert scraping.source.stats.rejected == dict.fromkeys(module.REASONS, 0)


def test_served_from_the_command_line(tmp_path: Path) -> None:
    step = [0]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        step[0] += 1
        send(handler, text_of(verl_rollout_steps_total=step[0] // 3, actor_pg_loss=1).encode())

    with exporter(answer) as url, monitor(url, log=tmp_path / "log") as own:  # type: ignore[arg-type]  # a SOURCE
        run = url.split("/")[2]
        wait_for(lambda: (get_json(f"{own}/api/v1/runs/{run}") or {}).get("steps", 0) >= 1, 20, "a step")
