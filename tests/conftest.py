"""Fixtures of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import CASES, LAB


@pytest.fixture
def lab() -> Path:
    """Recordings of real verl runs with an injected fault, bundled for the demo."""
    return LAB


@pytest.fixture
def cases() -> Path:
    """Small synthetic logs, one per reported kind of failure or false alarm."""
    return CASES
