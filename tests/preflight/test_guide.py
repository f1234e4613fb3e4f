"""The table of the guide's sections: nothing missing, and everything it names is there."""

from __future__ import annotations

import re

from monitor.detectors import ALL_DETECTORS
from monitor.preflight import environment
from monitor.preflight.checks import CHECKS
from tests.helpers import REPOSITORY

ROWS = [[cell.strip() for cell in line.strip("|").split("|")]
        for line in (REPOSITORY / "docs" / "guide.md").read_text().splitlines() if re.match(r"\| \d", line)]
CHECK_IDS = {check.id: check for check in (*CHECKS, *environment.CHECKS)}
DETECTOR_IDS = {detector.spec.id: detector.spec for detector in ALL_DETECTORS}


def test_every_section_has_a_row() -> None:
    assert [row[0] for row in ROWS] == [
        "1.1", "1.2", "1.3", "2.1", "2.2", "2.3", "3.1", "3.2", "3.3", "4.1", "4.2", "4.3", "5"]
    assert all(len(row) == 5 and all(row) for row in ROWS)


def test_every_check_stands_in_the_row_of_its_section() -> None:
    for check in CHECK_IDS.values():
        rows = [row for row in ROWS if f"`{check.id}`" in row[3]]
        assert rows, f"{check.id} is in no row"
        assert check.guide in [row[0] for row in rows]


def test_what_the_table_names_exists() -> None:
    for row in ROWS:
        for name in re.findall(r"`([a-z_]+)`", row[3]):
            assert name in CHECK_IDS or name in DETECTOR_IDS or name == "verl_gpu_role_memory_bytes", name
        for path in re.findall(r"`(tests/[^`]+)`", row[4]):
            assert (REPOSITORY / path).exists(), path


def test_detectors_that_name_a_section_stand_in_a_row() -> None:
    told = " ".join(row[3] for row in ROWS)
    missing = [spec.id for spec in DETECTOR_IDS.values() if re.fullmatch(r"\d(\.\d)?", spec.guide) and spec.guide != "3"
               and f"`{spec.id}`" not in told]
    assert missing == []
