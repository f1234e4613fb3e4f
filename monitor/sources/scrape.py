"""Gets a page of Prometheus' text format over HTTP, within a time and a size. Blocking: for a thread of its own."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

from monitor.sources.exposition import RunPage, read_page

ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4"
MAX_BODY = 32 * 2**20
"""Longest page, in bytes, unpacked; a thousand runs of this project have 17 MB."""

DEADLINE_SECONDS = 10.0


class ScrapeError(Exception):
    """A page that could not be had; the message says why."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None: a redirect is an answer that is no page, wherever it leads."""


# No proxy either: an exporter is asked directly, as Prometheus does it.
_OPENER = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))


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
    except (ScrapeError, OSError) as error:
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
        ScrapeError: there is no such page, or it is too long or too slow.
        OSError: it cannot be reached.
    """
    headers = {"Accept": ACCEPT, "Accept-Encoding": "gzip", "User-Agent": "verl-monitor"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with _OPENER.open(urllib.request.Request(url, headers=headers), timeout=DEADLINE_SECONDS) as answer:
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
    deadline = time.monotonic() + DEADLINE_SECONDS
    parts: list[bytes] = []
    size, missing = 0, answer.length
    # read1: a read of a given size would wait for a server that sends a byte now and then, whatever the deadline.
    while missing != 0 and (data := answer.read1(65536)):
        missing = None if missing is None else missing - len(data)
        if unpack is not None:
            data = unpack.decompress(data, MAX_BODY - size + 1)
        size += len(data)
        parts.append(data)
        if size > MAX_BODY:
            raise ScrapeError(f"expected at most {MAX_BODY} bytes, got more")
        if time.monotonic() > deadline:
            raise ScrapeError(f"expected the whole page within {DEADLINE_SECONDS:.0f} s, got a part of it")
    if missing:  # http.client does not mind
        raise ScrapeError(f"expected {missing} bytes more, got a part of the page")
    if unpack is not None and (not unpack.eof or unpack.unused_data):
        raise ScrapeError("expected one whole gzip stream, got a part of it, or more")
    return b"".join(parts)
