"""Fixtures of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import CASES, LAB


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest begin first, so that none is left over for one worker at the end."""
    slow = ("test_end_to_end.py", "test_stack.py", "test_promtool.py", "test_image.py")
    items.sort(key=lambda item: slow.index(item.path.name) if item.path.name in slow else len(slow))


@pytest.fixture
def lab() -> Path:
    """Recordings of real verl runs with an injected fault, bundled for the demo."""
    return LAB


@pytest.fixture
def cases() -> Path:
    """Small synthetic logs, one per reported kind of failure or false alarm."""
    return CASES
