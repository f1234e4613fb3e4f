"""Scrapes another exporter: verl-monitor itself, RL-Insight, or anything that exports a run with its step counter.

A page has no rows: it shows what was last set. So a row is made when the step counter has moved, never because a value
has or time has passed. A scrape may come in the middle of an update, the counter moved and the rest still old, or the
other way about; so the row of a step is told when a second look finds the counter unchanged, with the values of that
look, or when the counter has moved on. Steps in between are counted as ``missed_steps``; nothing is made up for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from monitor.model import RawStep, RunEnded, RunStarted, RunState, SourceEvent
from monitor.sources import SourceStats, clean_name
from monitor.sources.exposition import STEP_COUNTERS, RunPage, read_page

logger = logging.getLogger(__name__)

REASONS = ("unreadable", "bad_page", "missed_steps", "cut")
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4"
MAX_BODY = 64 * 2**20
"""Longest page, in bytes, unpacked; a thousand runs have 10 MB."""

_DEADLINE_SECONDS = 10.0
_LONGEST_PAUSE = 60.0
_SECOND_LOOK_SECONDS = 1.0  # after a counter has moved
_GONE_AFTER = 3  # pages without a run before it is gone


class ScrapeError(Exception):
    """A page that could not be had; the message says why."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None: a redirect is an answer that is no page, wherever it leads."""


# No proxy either: an exporter is asked directly, as Prometheus does it.
_OPENER = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))


@dataclass(slots=True)
class _Run:
    """What is known of a run. ``told``: the last step told; ``pending``: the step that is waited with."""

    told: int | None = None
    pending: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)  # validation scores, as they were told last
    missing: int = 0
    ended: bool = False


class PrometheusSource:
    """Events of the runs that an exporter shows.

    Args:
        url: of the page, ``http`` or ``https``.
        clock: the time of events, in seconds; a page's own time stamps are not used.
        run, project: names of what the page does not name itself; by default the page's host.
        every_seconds: pause between two scrapes.
        name: of the source on /metrics; by default ``prometheus:`` and the host.
        token: sent as a bearer token, where there is one.
    """

    def __init__(self, url: str, *, clock: Callable[[], float], run: str | None = None, project: str | None = None,
                 every_seconds: float = 5.0, name: str | None = None, token: str = "") -> None:
        host = urlsplit(url).netloc.rpartition("@")[2]
        self.stats = SourceStats(name or f"prometheus:{host}", rejected=dict.fromkeys(REASONS, 0))
        self._url, self._clock, self._every, self._token = url, clock, every_seconds, token
        self._run = clean_name(run or host)
        self._project = clean_name(project) if project else ""
        self._runs: dict[str, _Run] = {}
        self._events: deque[SourceEvent] = deque()
        self._closed = asyncio.Event()
        self._failures = 0
        self._soon = False
        # A scrape outlives the wait for it, so that one that hangs is not joined by others.
        self._scrape: asyncio.Task[tuple[str, bool]] | None = None

    def alive(self) -> None:
        """Its scrapes say whether it is."""

    async def aclose(self) -> None:
        """Stop. A scrape that hangs is left to itself."""
        self._closed.set()
        if self._scrape is not None:
            self._scrape.cancel()

    async def __aiter__(self) -> AsyncIterator[SourceEvent]:
        while not self._closed.is_set():
            await self._look()
            while self._events:
                yield self._events.popleft()
            pause = min(self._every, _SECOND_LOOK_SECONDS) if self._soon else self._every
            if self._failures:
                pause = max(pause, min(_LONGEST_PAUSE, self._every * 2.0 ** min(self._failures - 1, 6)))
            try:
                await asyncio.wait_for(self._closed.wait(), pause)
            except asyncio.TimeoutError:
                continue

    async def _look(self) -> None:
        if self._scrape is None:
            self._scrape = asyncio.create_task(asyncio.to_thread(fetch, self._url, self._token))
        done, _ = await asyncio.wait({self._scrape}, timeout=_DEADLINE_SECONDS + 2)
        if self._closed.is_set():
            return
        if not done:
            self._down("unreadable", f"no answer for more than {_DEADLINE_SECONDS:.0f} s")
            return
        scrape, self._scrape = self._scrape, None
        try:
            text, open_metrics = scrape.result()
            self.stats.bytes += len(text)
            # Parsing a large page takes a second: not in the loop.
            pages, cut = await asyncio.to_thread(read_page, text, self._run, open_metrics=open_metrics)
        except (ScrapeError, OSError) as error:
            self._down("unreadable", str(error))
        except ValueError as error:
            self._down("bad_page", f"expected a page of Prometheus' text format, got something else ({error})")
        else:
            self._failures = 0
            self.stats.reject("cut", cut)
            self._take(pages)

    def _down(self, reason: str, detail: str) -> None:
        self.stats.reject(reason)
        self.stats.up, self.stats.detail = False, f"{self.stats.name}: {detail}"
        if not self._failures:
            logger.warning("%s cannot be scraped: %s; trying again", self.stats.name, detail)
        self._failures += 1

    def _take(self, pages: Mapping[str, RunPage]) -> None:
        now = self._clock()
        self.stats.up, self.stats.last_read_seconds, self.stats.files = True, now, len(pages)
        self._soon = False
        stepless = 0
        for name, page in pages.items():
            if page.step is None:
                stepless += 1
                continue
            self._see(clean_name(name), page, page.step, now)
        expected = ", ".join(STEP_COUNTERS)
        self.stats.detail = f"{stepless} run(s) without a step counter; expected one of {expected}" if stepless else ""
        for name, run in self._runs.items():
            run.missing = 0 if any(clean_name(known) == name for known in pages) else run.missing + 1
            if run.missing == _GONE_AFTER and not run.ended:
                self._end(name, run, RunState.GONE, "its series have left the page", now)

    def _see(self, name: str, page: RunPage, step: int, now: float) -> None:
        run = self._runs.get(name)
        project = clean_name(page.project) if page.project else self._project
        if run is None:
            run = self._runs[name] = _Run()
            self._events.append(RunStarted(name, now, project))
        known = run.pending if run.pending is not None else run.told
        if known is not None and step < known:
            self._tell(name, run, project, now)
            self.stats.restarts += 1
            self._events.append(RunStarted(name, now, project, restarted=True))
            run.told = known = None
        if known is None or step != known:
            self._tell(name, run, project, now)
            run.pending, run.values, run.ended = step, page.values, False
            self._soon = True
        elif run.pending is not None:
            run.values = page.values
            self._tell(name, run, project, now)
        if page.ended and not run.ended:
            self._tell(name, run, project, now)
            self._end(name, run, RunState(page.ended), f"its exporter says that it is {page.ended}", now)

    def _tell(self, name: str, run: _Run, project: str, now: float) -> None:
        """Tell the row of the step that was waited with."""
        if run.pending is None:
            return
        if run.told is not None and run.pending > run.told + 1:
            self.stats.reject("missed_steps", run.pending - run.told - 1)
        values = {key: value for key, value in run.values.items() if self._is_new(run, key, value)}
        # When the first row was made nobody knows.
        self._events.append(RawStep(name, run.pending, now, values, project, live=run.told is not None))
        self.stats.records += 1
        self.stats.last_record_seconds = now
        run.told, run.pending = run.pending, None

    @staticmethod
    def _is_new(run: _Run, key: str, value: float) -> bool:
        # A page keeps showing the last validation, which is of its own step only.
        if not key.startswith(("val-", "val/", "verl_validation")):
            return True
        before = run.sent.get(key)
        run.sent[key] = value
        return value != before

    def _end(self, name: str, run: _Run, state: RunState, reason: str, now: float) -> None:
        run.ended = True
        self._events.append(RunEnded(name, now, state, reason))


def fetch(url: str, token: str = "") -> tuple[str, bool]:
    """A page's text, and whether it is OpenMetrics. Blocking.

    Raises:
        ScrapeError: there is no such page, or it is too long or too slow.
        OSError: it cannot be reached.
    """
    headers = {"Accept": ACCEPT, "Accept-Encoding": "gzip", "User-Agent": "verl-monitor"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with _OPENER.open(urllib.request.Request(url, headers=headers), timeout=_DEADLINE_SECONDS) as answer:
            kind = answer.headers.get("Content-Type", "")
            body = _body(answer, packed=answer.headers.get("Content-Encoding", "") == "gzip")
    except urllib.error.HTTPError as error:
        error.close()
        raise ScrapeError(f"expected status 200, got {error.code}") from None
    except urllib.error.URLError as error:
        raise ScrapeError(str(error.reason)) from None
    except (HTTPException, ValueError, zlib.error) as error:
        raise ScrapeError(f"expected an HTTP answer, got something else ({error})") from None
    return body.decode("utf-8", "replace"), "openmetrics" in kind


def _body(answer: HTTPResponse, *, packed: bool) -> bytes:
    unpack = zlib.decompressobj(31) if packed else None
    deadline = time.monotonic() + _DEADLINE_SECONDS
    parts: list[bytes] = []
    size = 0
    while data := answer.read(65536):
        if unpack is not None:
            data = unpack.decompress(data, MAX_BODY - size + 1)
        size += len(data)
        parts.append(data)
        if size > MAX_BODY:
            raise ScrapeError(f"expected at most {MAX_BODY} bytes, got more")
        if time.monotonic() > deadline:
            raise ScrapeError(f"expected the whole page within {_DEADLINE_SECONDS:.0f} s, got a part of it")
    if answer.length:  # http.client does not mind
        raise ScrapeError(f"expected {answer.length} bytes more, got a part of the page")
    return b"".join(parts)
