"""Following logs: a source in the background, and what it has told so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from monitor.model import RawStep, SourceEvent
from monitor.sources.file import FileSource

POLL = 0.01
T = TypeVar("T")


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


class Following:
    """A source whose events are gathered in the background."""

    def __init__(self, source: FileSource) -> None:
        self.source = source
        self.events: list[SourceEvent] = []

    async def gather(self) -> None:
        async for event in self.source:
            self.events.append(event)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.of(RawStep)]

    async def until(self, condition: Callable[[], object], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; events: {str(self.events)[-1500:]}"
            await asyncio.sleep(POLL / 2)

    async def polls(self, count: int) -> None:
        """Wait until so many whole polls have passed."""
        stats = self.source.stats
        for _ in range(count):
            before = stats.last_read_seconds
            await self.until(partial(lambda seen: stats.last_read_seconds != seen, before))

    async def reaches(self, steps: list[int]) -> None:
        await self.until(lambda: len(self.steps) >= len(steps))
        await self.polls(2)
        assert self.steps == steps


@asynccontextmanager
async def following(path: Path, **options: object) -> AsyncIterator[Following]:
    options = {"clock": time.monotonic, "poll_seconds": POLL, **options}
    follow = Following(FileSource(path, **options))  # type: ignore[arg-type]  # passed through as given
    task = asyncio.create_task(follow.gather())
    try:
        await follow.polls(1)
        yield follow
    finally:
        await follow.source.aclose()
        await asyncio.wait_for(task, 5)


async def scenario(path: Path, *changes: tuple[Callable[[], object], list[int]], **options: object) -> Following:
    """Follow a path; after each change all steps so far must be the given ones."""
    async with following(path, **options) as follow:
        for change, steps in changes:
            change()
            await follow.reaches(steps)
    return follow


def play(path: Path, *changes: tuple[Callable[[], object], list[int]], **options: object) -> Following:
    return asyncio.run(scenario(path, *changes, **options))


def nothing() -> None:
    pass
