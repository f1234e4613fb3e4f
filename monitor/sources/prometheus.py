"""Scrapes another exporter: verl-monitor itself, RL-Insight, or anything that exports a run with its step counter.

A page has no rows: it shows what was last set. So a row is made when the step counter has moved, never because a value
has or time has passed. A scrape may come in the middle of an update, the counter moved and the rest still old, or the
other way about; so the row of a step is told when a second look, a second later at most, finds the counter unchanged,
with the values of that look, or when the counter has moved on. Steps in between are counted as ``missed_steps``;
nothing is made up for them.

What a page keeps showing of an earlier step cannot be told from a value that came again. So what is logged now and then
only, as validations are, is told when its value has changed; one that comes out the same as before is lost.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from monitor.model import RawStep, RunEnded, RunStarted, RunState, SourceEvent
from monitor.sources import SourceStats, clean_name
from monitor.sources.exposition import MAX_RUNS, STEP_COUNTERS, RunPage
from monitor.sources.scrape import Failed, Scraped, scrape

logger = logging.getLogger(__name__)

REASONS = ("unreadable", "bad_page", "missed_steps", "cut", "repeated")
"""``unreadable`` and ``bad_page`` count scrapes, ``missed_steps`` steps, ``cut`` samples beyond the caps, ``repeated``
samples of a value that another one of the same page has told."""

_LONGEST_PAUSE = 60.0
_SECOND_LOOK_SECONDS = 1.0  # after a counter has moved
# What is logged now and then, and is of its own step only, while a page keeps showing the last one.
_SPORADIC = ("val-", "val/", "verl_validation", "verl_gradient_warnings", "verl_rollout_errors", "verl_resumed_from")
_PATIENCE_SECONDS = 30.0  # with a scrape and its parsing; most of what hangs ends earlier, by the scrape's own deadline
_GONE_AFTER = 3  # pages without a run before it is gone
_KNOWN = 2 * MAX_RUNS  # runs remembered, so that one that comes back is not told anew


@dataclass(slots=True)
class _Run:
    """What is known of a run. ``rank``: which step counter it has; ``told``: the last step told; ``pending``: the step
    that is waited with."""

    rank: int = len(STEP_COUNTERS)
    told: int | None = None
    pending: int | None = None
    project: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    sporadic: Mapping[str, float] = field(default_factory=dict)  # values of such keys, as the page had them last
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

    Raises:
        ValueError: the URL is not one of http or https.
    """

    def __init__(self, url: str, *, clock: Callable[[], float], run: str | None = None, project: str | None = None,
                 every_seconds: float = 5.0, name: str | None = None, token: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL such as http://HOST:PORT/metrics, got {url!r}")
        host = parts.netloc.rpartition("@")[2]
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
        self._scrape: asyncio.Future[Scraped | Failed] | None = None

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
            self._scrape = self._begin()
        done, _ = await asyncio.wait({self._scrape}, timeout=_PATIENCE_SECONDS)
        if self._closed.is_set():
            return
        if not done:
            self._down(Failed("unreadable", f"no answer for more than {_PATIENCE_SECONDS:.0f} s"))
            return
        scraped, self._scrape = self._scrape.result(), None
        if isinstance(scraped, Failed):
            self._down(scraped)
            return
        self._failures = 0
        self.stats.bytes += scraped.size
        self.stats.reject("cut", scraped.cut)
        self.stats.reject("repeated", sum(page.repeated for page in scraped.pages.values()))
        self._take(scraped.pages)

    def _begin(self) -> asyncio.Future[Scraped | Failed]:
        """A scrape, in a thread of its own: in the loop's few, endpoints that hang would keep /metrics and the files
        waiting, and the end of the process too. Parsing belongs there as well: a large page takes seconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Scraped | Failed] = loop.create_future()

        def settle(outcome: Scraped | Failed) -> None:
            if not future.done():
                future.set_result(outcome)

        def work() -> None:
            outcome = scrape(self._url, self._token, self._run)
            try:
                loop.call_soon_threadsafe(settle, outcome)
            except RuntimeError:  # the loop has ended, so nobody waits
                return

        threading.Thread(target=work, name=self.stats.name, daemon=True).start()
        return future

    def _down(self, failed: Failed) -> None:
        self.stats.reject(failed.reason)
        self.stats.up, self.stats.detail = False, f"{self.stats.name}: {failed.detail}"
        if not self._failures:
            logger.warning("%s cannot be scraped: %s; trying again", self.stats.name, failed.detail)
        self._failures += 1

    def _take(self, pages: Mapping[str, RunPage]) -> None:
        now = self._clock()
        self.stats.up, self.stats.last_read_seconds, self.stats.files = True, now, len(pages)
        self._soon = False
        stepless, present = 0, set()
        for label, page in pages.items():
            name = clean_name(label)
            present.add(name)
            if page.step is None and not page.state:
                stepless += 1
            else:
                self._see(name, page, now)
        wanted = f"no step counter: expected one of {', '.join(STEP_COUNTERS)}"
        self.stats.detail = "" if pages and not stepless else f"{stepless} run(s) with {wanted}" if pages else wanted
        for name, run in self._runs.items():
            run.missing = 0 if name in present else run.missing + 1
            if run.missing == _GONE_AFTER:
                self._end(name, run, RunState.GONE, "its series have left the page", now)
        oldest = sorted(self._runs, key=lambda name: -self._runs[name].missing) if len(self._runs) > _KNOWN else []
        for name in oldest[: len(self._runs) - _KNOWN]:
            self._end(name, self._runs.pop(name), RunState.GONE, "its series have left the page", now)

    def _see(self, name: str, page: RunPage, now: float) -> None:
        project = clean_name(page.project) if page.project else self._project
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = _Run()
            self._events.append(RunStarted(name, now, project))
        run.project = project
        if page.step is not None and page.rank <= run.rank:
            self._count(name, run, page, page.step, now)
        if page.ended:
            self._end(name, run, RunState(page.state), f"its exporter says that it is {page.state}", now)

    def _count(self, name: str, run: _Run, page: RunPage, step: int, now: float) -> None:
        """Look at the step counter."""
        if page.rank < run.rank:  # it has a better counter now, whose numbers are others
            run.rank, run.told, run.pending = page.rank, None, None
        known = run.pending if run.pending is not None else run.told
        if known is not None and step < known:
            self._tell(name, run, now)
            self.stats.restarts += 1
            self._events.append(RunStarted(name, now, run.project, restarted=True))
            run.told = known = None
        if step != known:
            self._tell(name, run, now)
            run.pending, run.values, run.ended = step, page.values, False
            self._soon = True
        elif run.pending is not None:
            run.values = page.values
            self._tell(name, run, now)

    def _tell(self, name: str, run: _Run, now: float) -> None:
        """Tell the row of the step that was waited with."""
        if run.pending is None:
            return
        if run.told is not None and run.pending > run.told + 1:
            self.stats.reject("missed_steps", run.pending - run.told - 1)
        sporadic = {key: value for key, value in run.values.items() if key.startswith(_SPORADIC)}
        old = {key for key, value in sporadic.items() if _same(value, run.sporadic.get(key))}
        run.sporadic = sporadic
        values = {key: value for key, value in run.values.items() if key not in old}
        # When the first row was made nobody knows.
        self._events.append(RawStep(name, run.pending, now, values, run.project, live=run.told is not None))
        self.stats.records += 1
        self.stats.last_record_seconds = now
        run.told, run.pending = run.pending, None

    def _end(self, name: str, run: _Run, state: RunState, reason: str, now: float) -> None:
        if run.ended:
            return
        self._tell(name, run, now)
        run.ended = True
        self._events.append(RunEnded(name, now, state, reason))


def _same(value: float, before: float | None) -> bool:
    return value == before or (before is not None and value != value and before != before)
