"""Gets a page of Prometheus' text format over HTTP, within a time and a size. Blocking: for a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from monitor.http import HttpError, get
from monitor.sources.exposition import RunPage, read_page

ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4"
MAX_BODY = 32 * 2**20
"""Longest page, in bytes, unpacked; a thousand runs of this project have 17 MB."""

DEADLINE_SECONDS = 10.0


class Scraped(NamedTuple):
    """A page that was had. ``size``: in bytes."""

    pages: Mapping[str, RunPage]
    cut: int
    size: int


class Failed(NamedTuple):
    """Why a page could not be had: a reason for the counters, and in words."""

    reason: str
    detail: str


def scrape(url: str, token: str, run: str) -> Scraped | Failed:
    """Fetch a page and read it. Blocking; never raises."""
    try:
        text, open_metrics = fetch(url, token)
    except (HttpError, OSError) as error:
        return Failed("unreadable", str(error))
    except Exception as error:  # noqa: BLE001 - whoever waits for this thread would wait without end
        return Failed("unreadable", repr(error))
    try:
        return Scraped(*read_page(text, run, open_metrics=open_metrics), len(text))
    except ValueError as error:
        return Failed("bad_page", f"expected a page of Prometheus' text format, got something else ({error!s:.200})")


def fetch(url: str, token: str = "") -> tuple[str, bool]:
    """A page's text, and whether it is OpenMetrics. Blocking.

    Raises:
        HttpError: there is no such page, or it is too long or too slow.
        OSError: it cannot be reached.
    """
    answer = get(url, token=token, accept=ACCEPT, most_bytes=MAX_BODY, seconds=DEADLINE_SECONDS)
    return answer.body.decode("utf-8", "replace"), "openmetrics" in answer.headers.get("Content-Type", "")
