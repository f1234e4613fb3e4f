"""The image: the Dockerfile's own commands are run, and what they install is served from, as in the container."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from monitor import cli
from monitor.config import Config
from tests.deploy import DOCKERFILE, address_of, get, instructions, running, sent_to_builder
from tests.helpers import LAB, REPOSITORY, wait_for

# One worker builds the image, once.
pytestmark = pytest.mark.xdist_group("image")

BUILD, FINAL = instructions()
# Not tomllib, which Python 3.10 lacks; the keys that matter here are in one section only.
PROJECT = dict(re.findall(r'^([\w-]+) = "([^"]*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE))


def only(name: str) -> str:
    """The arguments of an instruction that the final stage has once."""
    (arguments,) = (arguments for instruction, arguments in FINAL if instruction == name)
    return arguments


def sources(arguments: str) -> tuple[list[str], str]:
    """What a COPY from the repository takes, and where to."""
    *paths, target = arguments.split()
    return paths, target


COPIED = [path for name, arguments in BUILD if name == "COPY" for path in sources(arguments)[0]]


@dataclass(frozen=True)
class Image:
    """What the build stage made. ``root`` stands for its root directory."""

    root: Path

    def path(self, inside: str) -> Path:
        """A path of the image, here."""
        return self.root / inside.lstrip("/")

    def environment(self) -> dict[str, str]:
        """What the image sets."""
        values = dict(re.findall(r"(\w+)=(\S+)", only("ENV")))
        values["PATH"] = f"{self.path(values['PATH'].partition(':')[0])}:{os.environ['PATH']}"
        return values


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The build stage, done here: only its absolute paths lie below another root. Needs the package index, as the
    real build does."""
    image = Image(tmp_path_factory.mktemp("image"))
    directory = image.root
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name, arguments in BUILD:
        if name == "WORKDIR":
            directory = image.path(arguments)
            directory.mkdir(parents=True)
        elif name == "COPY":
            paths, target = sources(arguments)
            for path in paths:
                copy(path, directory / target)
        elif name == "RUN":
            command = re.sub(r"(?<=\s)/(?=\w)", f"{image.root}/", arguments)
            done = subprocess.run(["sh", "-c", command], cwd=directory, env=here, capture_output=True, text=True,
                                  check=False)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        else:
            assert name == "FROM", f"this test cannot do {name}"
    return image


def copy(path: str, target: Path) -> None:
    """COPY: a directory's content, or a file into a directory; only what the builder is sent."""
    source = REPOSITORY / path
    if source.is_file():
        shutil.copy(source, target)
        return
    for file in source.rglob("*"):
        if file.is_file() and sent_to_builder(file.relative_to(REPOSITORY).as_posix()):
            (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target / file.relative_to(source))


@pytest.fixture
def served(image: Image, tmp_path: Path) -> Iterator[str]:
    """The address of the container's own command, which follows one log."""
    logs, output = tmp_path / "logs", tmp_path / "output"
    logs.mkdir()
    shutil.copy(LAB / "ppo-healthy.jsonl", logs)
    there = {"0.0.0.0:9560": "127.0.0.1:0", "/logs": str(logs)}
    command = [*json.loads(only("ENTRYPOINT")), *(there.get(item, item) for item in json.loads(only("CMD")))]
    command[0] = str(image.path("/opt/verl-monitor/bin") / command[0])
    with running(command, output, environment=image.environment(), directory=tmp_path) as process:
        address = address_of(process, output)
        wait_for(lambda: get(f"{address}/-/ready")[0] == 200, what="readiness")
        yield address


@pytest.mark.parametrize("path", COPIED)
def test_what_is_copied_is_there_and_sent_to_the_builder(path: str) -> None:
    assert (REPOSITORY / path).exists()
    assert sent_to_builder(path)


@pytest.mark.parametrize("path", [".git/config", ".env", "tests/__init__.py", "logs/run.jsonl", "deploy/README.md",
                                  "docs/design.md", "monitor/__pycache__/cli.cpython-311.pyc", "monitor/old.pyc"])
def test_nothing_else_is_sent_to_the_builder(path: str) -> None:
    assert not sent_to_builder(path)


def test_both_stages_start_from_one_pinned_python() -> None:
    bases = {arguments.partition(" ")[0] for stage in (BUILD, FINAL) for name, arguments in stage if name == "FROM"}
    (base,) = bases
    version = re.fullmatch(r"python:3\.(\d+)-slim-\w+", base)
    assert version
    assert int(version[1]) >= int(PROJECT["requires-python"].removeprefix(">=3."))


def test_what_was_built_is_what_is_shipped_and_run() -> None:
    flag, source, target = only("COPY").split()
    assert flag == "--from=build"
    assert source == target, "a virtual environment works only where it was made"
    assert f"PATH={target}/bin:" in only("ENV")
    assert PROJECT[json.loads(only("ENTRYPOINT"))[0]] == "monitor.cli:main"


def test_user_is_a_number_and_not_root() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", only("USER"))


def test_labels_say_what_the_package_says() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', only("LABEL")))
    assert labels["title"] == PROJECT["name"]
    assert labels["licenses"] == PROJECT["license"]
    assert PROJECT["description"].startswith(labels["description"])


def test_command_is_one_that_the_command_line_takes_on_the_exposed_port() -> None:
    arguments = cli._parser().parse_args(json.loads(only("CMD")))
    port = Config().listen.port
    assert arguments.listen == ("0.0.0.0", port)
    assert arguments.source == ["/logs"]
    assert int(only("EXPOSE")) == port
    assert f"127.0.0.1:{port}/-/healthy" in only("HEALTHCHECK")


def test_wheel_has_all_that_is_read_at_run_time(image: Image) -> None:
    (wheel,) = image.path("/wheels").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = REPOSITORY / "monitor"
    data = [file for folder in ("web", "demo_runs") for file in (package / folder).rglob("*") if file.is_file()]
    runbooks = list((REPOSITORY / "docs" / "runbooks").glob("*.md"))
    assert data
    assert runbooks
    missing = {file.relative_to(REPOSITORY).as_posix() for file in data} - names
    missing |= {f"monitor/runbooks/{file.name}" for file in runbooks} - names
    missing |= {"monitor/py.typed"} - names
    assert not missing


def test_health_check_follows_the_service(image: Image, served: str) -> None:
    _, _, command = only("HEALTHCHECK").partition(" CMD ")
    program, option, code = json.loads(command)
    assert "http://127.0.0.1:9560/" in code
    interpreter = str(image.path("/opt/verl-monitor/bin") / program)
    proxied = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}

    def check(base: str) -> int:
        adapted = code.replace("http://127.0.0.1:9560", base)
        return subprocess.run([interpreter, option, adapted], capture_output=True, env=proxied, check=False,
                              timeout=10).returncode

    assert check(served) == 0
    assert check(f"{served}/api/v1/runs/none-such?") != 0, "a status that is not 200"
    assert check("http://127.0.0.1:9") != 0, "nobody there"


def test_pages_runbooks_and_metrics_come_from_the_installed_package(served: str) -> None:
    assert get(f"{served}/")[0] == 200
    for runbook in (REPOSITORY / "docs" / "runbooks").glob("*.md"):
        assert get(f"{served}/runbooks/{runbook.stem}")[0] == 200, runbook.stem
    wait_for(lambda: 'verl_run_last_step{run="ppo-healthy"}' in get(f"{served}/metrics")[1], what="the run on /metrics")


def test_nothing_is_written_beside_the_logs(image: Image, served: str, tmp_path: Path) -> None:
    before = {path for path in image.root.rglob("*") if path.is_file()}
    for page in ("/", "/metrics", "/runs/ppo-healthy", "/api/v1/runs"):
        assert get(served + page)[0] == 200
    assert {path for path in image.root.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "output"}


def test_demo_of_the_compose_file_runs_from_the_image(image: Image, tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = [str(image.path("/opt/verl-monitor/bin/verl-monitor")), "demo", "--listen", "127.0.0.1:0"]
    with running(command, output, environment={**image.environment(), "TMPDIR": str(tmp_path)},
                 directory=tmp_path) as process:
        address = address_of(process, output)
        wait_for(lambda: 'run="grpo-healthy"' in get(f"{address}/metrics")[1], what="the demo on /metrics")


def test_every_instruction_is_known_to_these_tests() -> None:
    known = {"FROM", "LABEL", "COPY", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in FINAL} == known
    assert not re.search(r"^\s*(ADD|VOLUME)\b", DOCKERFILE.read_text(), re.MULTILINE)
