"""Imports point one way, and the project says of itself what is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

ORDER = ("__init__", "units", "http", "model", "facts", "metric", "machine_metrics", "catalog", "stats", "hysteresis",
         "verl_config", "detectors", "watches", "run", "machine", "engine", "sources", "probes", "config", "clock",
         "replay", "evaluate", "families", "machine_exporter", "exporter", "api", "compare", "preflight",
         "machine_report", "placement_groups", "attach", "service", "serve", "demo", "demo_machine", "cli")
"""Modules of the package; each imports only from those before it."""

ONLY_IN = {"fastapi": {"service"}, "uvicorn": {"serve"}, "jinja2": {"service"}, "yaml": {"config", "preflight"},
           "prometheus_client": {"families", "machine_exporter", "exporter", "sources"},
           "ray": {"probes", "evaluate"}, "torch": set(), "numpy": set()}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"monitor.{alias.name}" for alias in node.names} if node.module == "monitor" else {node.module}
    return names


def _unit(path: Path) -> str:
    return path.relative_to(REPOSITORY / "monitor").parts[0].removesuffix(".py")


FILES = sorted((REPOSITORY / "monitor").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_imports_point_upward(path: Path) -> None:
    unit = _unit(path)
    assert unit in ORDER, "put a new module into ORDER"
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "monitor" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(unit), f"{unit} imports {parts[1]}"
        if parts[0] in ONLY_IN:
            assert unit in ONLY_IN[parts[0]], f"{parts[0]} does not belong into {unit}"


def test_sources_exporter_and_rendering_do_not_know_each_other() -> None:
    for path in FILES:
        if _unit(path) in ("sources", "exporter", "api"):
            other = {"monitor.sources", "monitor.exporter", "monitor.api"} - {f"monitor.{_unit(path)}"}
            assert not [n for n in _imports(path) if any(n.startswith(o) for o in other)], path


def test_a_version_is_one_version() -> None:
    from monitor import __version__

    assert f'version = "{__version__}"' in (REPOSITORY / "pyproject.toml").read_text()
    assert f"## [{__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_readme_shows_commands_that_exist() -> None:
    text = (REPOSITORY / "README.md").read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"\bmake (\w+)", text))
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    from monitor.cli import _parser

    known = {"serve", "check", "config", "demo", "evaluate", "preflight", "compare", "node", "placement-groups"}
    commands = set(re.findall(rf"verl-monitor ({'|'.join(known)})\b", text))
    assert commands == known
    assert all(command in _parser().format_help() for command in commands)


def test_every_endpoint_and_option_is_documented() -> None:
    from monitor.engine import Engine
    from monitor.service import Service, create_app

    text = (REPOSITORY / "README.md").read_text()
    app = create_app(Service(engine=Engine(), sources=[], clock=lambda: 0.0))
    paths = {getattr(route, "path", "") for route in app.routes} - {"/openapi.json", ""}
    missing = [path for path in paths if f"`{path.replace(':path', '')}`" not in text]
    assert missing == []
