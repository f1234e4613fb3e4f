"""The settings of the service: each declared once, with its kind, default and meaning.

Reading, checking and the example are all made from these declarations.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from monitor.engine import EngineSettings
from monitor.sources.formats import PATTERNS

_ENGINE = EngineSettings()
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_LARGEST = 10**9
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

DetectorValues = Mapping[str, Mapping[str, float | bool]]
"""Detector id -> its settings that were given, and ``enabled``."""


class Kind(NamedTuple):
    """A kind of value. ``parse`` takes the text and the folder of relative paths; ValueError or LookupError: it is not
    of this kind."""

    expected: str
    parse: Callable[[str, str], Any]


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _if(good: object, value: Any) -> Any:
    if not good:
        raise ValueError
    return value


def _address(text: str, _: str) -> Address:
    host, colon, port = text.rpartition(":")
    good = colon and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    return Address(host.strip("[]") or "127.0.0.1", int(_if(good, port)))


def _path(text: str, folder: str) -> str:
    os.fsencode(text)  # raises for what no file can be called
    return os.path.join(folder, os.path.expanduser(_if(text and "\0" not in text, text)))


def _url(text: str, _: str) -> str:
    parts = urlsplit(text)
    # A password in it would be shown on pages and in logs.
    good = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
    return str(_if(good and text.isprintable() and " " not in text, text))


def _ray(text: str, folder: str) -> str:
    if text == "auto":
        return text
    if "://" in text and not text.startswith("ray://"):
        return _url(text, folder)
    _address(_if(not text.startswith("ray://"), text), folder)
    return str(_if(text.rpartition(":")[0], text))


def _number(text: str, least: float, most: float) -> float:
    return float(_if(least <= float(text) <= most, text))


ADDRESS = Kind("HOST:PORT such as 127.0.0.1:9560", _address)
SECONDS = Kind("a number of seconds above 0", lambda text, _: _number(text, 1e-3, _LARGEST))
COUNT = Kind("a whole number from 1 on", lambda text, _: _if(1 <= int(text) <= _LARGEST, int(text)))
NUMBER = Kind("a number from 0 on", lambda text, _: _number(text, 0, sys.float_info.max))  # limits are magnitudes
LEVEL = Kind(", ".join(_LEVELS[:-1]) + " or " + _LEVELS[-1], lambda text, _: _LEVELS[_LEVELS.index(text.upper())])
SWITCH = Kind("true or false", lambda text, _: _SWITCH[text.lower()])
NAME = Kind("a name of 1 to 200 printable characters",
            lambda text, _: _if(text == text.strip() and text.isprintable() and 0 < len(text) <= 200, text))
PATH = Kind("a path", _path)
RAY = Kind("HOST:PORT of a Ray head, auto, or http://HOST:PORT of its dashboard", _ray)
URL = Kind("a URL such as http://HOST:PORT/metrics, without a password", _url)


def key(kind: Kind, help: str, default: str | None = None, *, sample: str = "",  # noqa: A002 - as in detectors
        required: bool = False) -> Any:
    """A setting of one value. ``default`` is text, as a user would write it; without one ``sample`` is shown."""
    metadata = {"kind": kind, "help": help, "shown": sample if default is None else default}
    if required:
        return field(metadata=metadata)
    return field(default=None if default is None else kind.parse(default, ""), metadata=metadata)


def part(kind: Any, help: str, default: Callable[[], Any]) -> Any:  # noqa: A002
    """A setting that holds several. ``kind``: the class of them, or the name of a way that ``reading`` has."""
    shown = {"shown": str(list(default()))} if kind == "texts" else {}
    return field(default_factory=default, metadata={"kind": kind, "help": help, **shown})


@dataclass(frozen=True, kw_only=True)
class Push:
    """What trainers send."""

    enabled: bool = key(SWITCH, "Take steps that trainers send. On more than loopback that needs a token.", "true")


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What is looked at beside the metrics."""

    gpu: bool = key(SWITCH, "Look at this machine's GPUs and processes. Without an NVIDIA driver that is one line in "
                            "the log.", "true")
    checkpoints: bool = key(SWITCH, "Look at the checkpoints of runs whose directory can be found.", "true")
    checkpoint_dir: str | None = key(PATH, "Where to look for checkpoints: the job's working directory, or "
                                           "trainer.default_local_dir itself.", sample="checkpoints")
    ray_address: str | None = key(RAY, "The Ray cluster: HOST:PORT of its head or auto for its state and a probe on "
                                       "every node (needs the package ray), or its dashboard's URL for the state "
                                       "alone.",
                                  sample="head:6379")
    ray_dashboard: str | None = key(URL, "Dashboard of that cluster, where it is not the one that Ray tells.",
                                    sample="http://head:8265")
    every_seconds: float = key(SECONDS, "How often to look.", "5")
    name: str | None = key(NAME, "What the machine room is called on /metrics, in place of node:HOST or ray:HOST:PORT.",
                           sample="cluster-a")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is kept at most."""

    max_runs: int = key(COUNT, "Runs kept at once; beyond it the one that ended longest ago goes.",
                        str(_ENGINE.max_runs))
    max_series: int = key(COUNT, "Series of the catalogue kept per run.", str(_ENGINE.max_series))
    max_unknown_keys: int = key(COUNT, "Keys that the catalogue does not know kept per run.",
                                str(_ENGINE.max_unknown_keys))


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How long a run is kept."""

    ended_seconds: float = key(SECONDS, "How long an ended run stays on /metrics.",
                               f"{_ENGINE.retain_ended_seconds:.0f}")
    gone_after_seconds: float = key(SECONDS, "Silence after which a run counts as gone.",
                                    f"{_ENGINE.gone_after_seconds:.0f}")


_RUN_HELP = "Name of the run, in place of the one found"
_PROJECT_HELP = "Name of the project, in place of the one found."


@dataclass(frozen=True, kw_only=True)
class FileConfig:
    """A log, or a directory of them."""

    file: str = key(PATH, "A log, or a directory that is followed at all depths; it may appear later.", sample="logs",
                    required=True)
    run: str | None = key(NAME, _RUN_HELP + " (one file only).", sample="my-run")
    project: str | None = key(NAME, _PROJECT_HELP, sample="my-project")
    name: str | None = key(NAME, "Name of the source on /metrics.", sample="file:logs")
    patterns: tuple[str, ...] = part("texts", "File names to follow in a directory.",
                                     lambda: PATTERNS)
    ended_after_seconds: float = key(SECONDS, "A log that was untouched for so long when first seen, and that no "
                                              "process holds open, is that of a finished run.", "3600")
    max_files: int = key(COUNT, "Logs followed at once; the least recently written are left out.", "5000")


@dataclass(frozen=True, kw_only=True)
class StdinConfig:
    """A log that is piped in."""

    stdin: bool = key(SWITCH, "Standard input, at most once.", sample="true", required=True)
    run: str | None = key(NAME, _RUN_HELP + ".", sample="my-run")
    project: str | None = key(NAME, _PROJECT_HELP, sample="my-project")


@dataclass(frozen=True, kw_only=True)
class PrometheusConfig:
    """A page of metrics that a trainer serves."""

    prometheus: str = key(URL, "A /metrics page of a trainer.", sample="http://trainer:8000/metrics",
                          required=True)
    run: str | None = key(NAME, _RUN_HELP + ".", sample="my-run")
    project: str | None = key(NAME, _PROJECT_HELP, sample="my-project")
    name: str | None = key(NAME, "Name of the source on /metrics.", sample="prometheus:trainer")
    every_seconds: float = key(SECONDS, "How often to ask.", "5")
    token_file: str | None = key(PATH, "File that holds the token which the page asks for.", sample="page-token")
    token: str = field(default="", repr=False)
    """What ``token_file`` held."""


SourceConfig = FileConfig | StdinConfig | PrometheusConfig


@dataclass(frozen=True, kw_only=True)
class RunRule:
    """What holds for some runs."""

    match: str = key(NAME, "The run's name as its source gives it, or a pattern: * any text, ? one character.",
                     sample="ppo-baseline", required=True)
    name: str | None = key(NAME, "Another name for the run; only without a pattern.", sample="baseline")
    project: str | None = key(NAME, _PROJECT_HELP, sample="my-project")
    detectors: DetectorValues = part("detectors", "As above, for these runs.", dict)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that `serve` can be told."""

    listen: Address = key(ADDRESS, "Address to serve on.", "127.0.0.1:9560")
    log_level: str = key(LEVEL, "What is logged: DEBUG, INFO, WARNING or ERROR.", "INFO")
    poll_seconds: float = key(SECONDS, "How often to look at files.", "0.5")
    token_file: str | None = key(
        PATH, "File that holds the token which senders of steps must know. No secret stands in this file; the variable "
              "VERL_MONITOR_TOKEN goes before it.", sample="/run/secrets/verl-monitor-token")
    push: Push = part(Push, "", Push)
    probes: Probes = part(Probes, "", Probes)
    limits: Limits = part(Limits, "", Limits)
    retention: Retention = part(Retention, "", Retention)
    sources: tuple[SourceConfig, ...] = part(
        "sources", "Where steps come from, each with one of file, stdin, prometheus; those of the command line are "
                   "added. A relative path starts from the folder of this file.", tuple)
    detectors: DetectorValues = part(
        "detectors", "Limits of the detectors. docs/runbooks says where each comes from.", dict)
    runs: tuple[RunRule, ...] = part(
        "rules", "Names and detectors of single runs. Every rule that matches holds; of two that say different things "
                 "the later one.", tuple)
    token: str = field(default="", repr=False)
    """What ``token_file`` held."""

    @property
    def engine(self) -> EngineSettings:
        """Caps and times for the engine."""
        return EngineSettings(
            max_runs=self.limits.max_runs, max_series=self.limits.max_series,
            max_unknown_keys=self.limits.max_unknown_keys, retain_ended_seconds=self.retention.ended_seconds,
            gone_after_seconds=self.retention.gone_after_seconds)


SOURCES: dict[str, type[FileConfig] | type[StdinConfig] | type[PrometheusConfig]] = {
    "file": FileConfig, "stdin": StdinConfig, "prometheus": PrometheusConfig}
"""The key that tells what a source is, and its settings."""
