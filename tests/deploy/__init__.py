"""What is deployed: image, Compose, Kubernetes. Nothing here can run containers, so each part that can run without
does, and everything that the files say of each other is compared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest
import yaml

from tests.helpers import REPOSITORY, wait_for

DEPLOY = REPOSITORY / "deploy"
COMPOSE = REPOSITORY / "docker-compose.yml"
DOCKERFILE = REPOSITORY / "Dockerfile"

PACKAGES = {
    "prometheus": "prometheus", "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager", "amtool": "prometheus-alertmanager",
}
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<kind>:[-?])(?P<rest>[^}]*)\}")


def program(name: str) -> str:
    """Path of one of Debian's servers; skips the test where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not here: apt-get install {PACKAGES[name]}")
    return path


def variables(text: str) -> dict[str, tuple[str, str]]:
    """Variables that Compose puts in: name -> how (``:-`` or ``:?``), default or message."""
    return {match["name"]: (match["kind"], match["rest"]) for match in _VARIABLE.finditer(text)}


def compose(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """docker-compose.yml as Compose reads it, with the defaults of its variables."""
    given = {"GRAFANA_ADMIN_PASSWORD": "secret", **(environment or {})}

    def value(match: re.Match[str]) -> str:
        assert match["kind"] == ":-" or given.get(match["name"]), match["rest"]
        return given.get(match["name"]) or match["rest"]

    text = _VARIABLE.sub(value, COMPOSE.read_text())
    assert "${" not in text, "a variable of a form that this test does not know"
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@dataclass(frozen=True)
class Mount:
    """A line of a service's ``volumes``."""

    source: str
    target: str
    read_only: bool

    @property
    def named(self) -> bool:
        """Whether it is a volume, not a path."""
        return not self.source.startswith((".", "/", "~"))


def mounts(service: Mapping[str, Any]) -> list[Mount]:
    """The mounts of a service of the Compose file."""
    parts = [str(line).split(":") for line in service.get("volumes", [])]
    return [Mount(source, target, "ro" in options) for source, target, *options in parts]


def flags(service: Mapping[str, Any]) -> dict[str, str]:
    """Command-line flags of a service, by name."""
    return dict(str(item).removeprefix("--").split("=", 1) for item in service["command"])


def instructions() -> list[list[tuple[str, str]]]:
    """The Dockerfile: for each stage its instructions, with their arguments as one line."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    stages: list[list[tuple[str, str]]] = []
    for line in re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, arguments = line.partition(" ")
            if name == "FROM":
                stages.append([])
            stages[-1].append((name, arguments.strip()))
    return stages


def sent_to_builder(path: str) -> bool:
    """Whether .dockerignore lets a file through: the last pattern that fits it, or a parent, decides."""
    candidates = [path, *map(str, PurePosixPath(path).parents)]
    sent = True
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
            pattern = pattern.replace(r"\[", "[").replace(r"\]", "]")
            if any(re.fullmatch(pattern, candidate) for candidate in candidates if candidate != "."):
                sent = line.startswith("!")
    return sent


def get(url: str) -> tuple[int, str]:
    """Status and body; 0 where nobody answers. Never through a proxy."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


@contextmanager
def running(command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None,
            directory: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A server for as long as the context lasts. Its output goes to ``log``."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   env={**os.environ, **(environment or {})}, cwd=directory)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def address_of(monitor: subprocess.Popen[bytes], log: Path) -> str:
    """Where a monitor that was told to listen on port 0 does listen; waits until it says so."""
    said = re.compile(r"on (http://[\d.]+:\d+)/")
    wait_for(lambda: monitor.poll() is not None or said.search(log.read_text()), 20, "the monitor's address")
    found = said.search(log.read_text())
    assert found, log.read_text()
    return found[1]
