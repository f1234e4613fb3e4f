"""What Prometheus and Alertmanager are given: generated files, asked of the real programs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import REPOSITORY
from tests.servers import need

ALERTS = REPOSITORY / "alerts"
RULES = ALERTS / "verl-monitor.rules.yml"
CONFIG = ALERTS / "alertmanager.yml"
RUNBOOKS = REPOSITORY / "docs" / "runbooks"
TEST_FILES = sorted((ALERTS / "tests").glob("*.yml"))


def rules(text: str | None = None) -> list[dict[str, Any]]:
    """Every rule of the rules file."""
    groups = yaml.safe_load(RULES.read_text() if text is None else text)["groups"]
    return [rule for group in groups for rule in group["rules"]]


def ask(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool or amtool; skips the test where it is missing."""
    need(program, {"promtool": "prometheus", "amtool": "prometheus-alertmanager"}[program])
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
