"""One GET over HTTP, within a time and a size. Blocking: for a thread of its own."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple


class HttpError(Exception):
    """What was asked for could not be had; the message says why. ``status``: of the answer, 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Answer(NamedTuple):
    """A body, unpacked, and the headers it came with."""

    body: bytes
    headers: Mapping[str, str]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None: a redirect is an answer that is no page, wherever it leads."""


# No proxy either: exporters and dashboards are asked directly, as Prometheus does it.
_OPENER = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))


def get(url: str, *, token: str = "", accept: str = "*/*", most_bytes: int, seconds: float) -> Answer:
    """What is at a URL.

    Args:
        token: sent as a bearer token, where there is one.
        most_bytes: longest body, unpacked.
        seconds: for the whole of it; a server that sends a byte now and then is given up, too.

    Raises:
        HttpError: there is no such thing, or it is too long or too slow.
        OSError: it cannot be reached.
    """
    headers = {"Accept": accept, "Accept-Encoding": "gzip", "User-Agent": "verl-monitor"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    deadline = time.monotonic() + seconds
    try:
        with _OPENER.open(urllib.request.Request(url, headers=headers), timeout=seconds) as answer:
            packed = answer.headers.get("Content-Encoding", "") == "gzip"
            return Answer(_body(answer, packed, most_bytes, deadline), dict(answer.headers.items()))
    except urllib.error.HTTPError as error:
        error.close()
        raise HttpError(f"expected status 200, got {error.code}", error.code) from None
    except urllib.error.URLError as error:
        raise HttpError(str(error.reason)) from None
    except (HTTPException, ValueError, zlib.error) as error:
        raise HttpError(f"expected an HTTP answer, got something else ({error})") from None


def _body(answer: HTTPResponse, packed: bool, most_bytes: int, deadline: float) -> bytes:
    unpack = zlib.decompressobj(31) if packed else None
    begun = time.monotonic()
    parts: list[bytes] = []
    size, missing = 0, answer.length
    # read1: a read of a given size would wait for a server that sends a byte now and then, whatever the deadline.
    while missing != 0 and (data := answer.read1(65536)):
        missing = None if missing is None else missing - len(data)
        if unpack is not None:
            data = unpack.decompress(data, most_bytes - size + 1)
        size += len(data)
        parts.append(data)
        if size > most_bytes:
            raise HttpError(f"expected at most {most_bytes} bytes, got more")
        if time.monotonic() > deadline:
            raise HttpError(f"expected the whole page within {deadline - begun:.0f} s, got a part of it")
    if missing:  # http.client does not mind
        raise HttpError(f"expected {missing} bytes more, got a part of the page")
    if unpack is not None and (not unpack.eof or unpack.unused_data):
        raise HttpError("expected one whole gzip stream, got a part of it, or more")
    return b"".join(parts)
