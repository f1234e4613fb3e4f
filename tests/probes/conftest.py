"""The fake GPU driver, built once, and a probe on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.probes.fakenvml import Driver, build, driver


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(library: Path, tmp_path: Path) -> Iterator[Driver]:
    with driver(library, tmp_path) as it:
        yield it
