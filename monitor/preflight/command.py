"""`verl-monitor preflight`: every check of a configuration and its environment, a line each."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from monitor import api
from monitor.preflight import environment as surroundings
from monitor.preflight.check import Check, Outcome, Result
from monitor.preflight.checks import CHECKS
from monitor.preflight.memory import GPU_MEMORY
from monitor.preflight.saving import CHECKPOINT_DIR
from monitor.preflight.setup import ConfigurationError, Setup, Value, environment, read

EXIT_PASS, EXIT_WARNING, EXIT_ERROR, EXIT_UNREADABLE = 0, 1, 2, 3
_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("config", nargs="*", metavar="CONFIG | KEY=VALUE",
                        help="a YAML of verl's settings, the directory of a run (its .hydra/config.yaml), and "
                             "overrides as verl takes them; with overrides alone verl 0.9.1's defaults hold")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB",
                        help="memory of a GPU (else this machine's first one)")
    parser.add_argument("--model-dir", metavar="DIR", help="where the model lies, in place of its name")
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="where the run's checkpoints are")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="the cluster that it will run on")
    parser.add_argument("--verl-version", default="", metavar="X.Y",
                        help="verl's version, where the file does not tell")
    parser.add_argument("--environment", action=argparse.BooleanOptionalAction, default=None,
                        help="also check PyTorch, Ray and a placement group here (as far as these are installed)")


def run(arguments: argparse.Namespace) -> int:
    """Check, and print; the exit status: 0 pass, 1 warnings, 2 errors, 3 unreadable."""
    files = [text for text in arguments.config if "=" not in text]
    if len(files) > 1:
        return _fail(f"expected one configuration, got {' and '.join(files)}")
    if not arguments.config:
        return _fail("expected a configuration or overrides, got nothing")
    try:
        setup = read(files[0] if files else None, [text for text in arguments.config if "=" in text], environment(),
                     arguments.verl_version)
    except ConfigurationError as error:
        return _fail(str(error))
    setup = _told(setup, arguments)
    checks: Sequence[Check] = CHECKS
    around = arguments.environment
    if around or (around is None and (surroundings.available("torch") or surroundings.available("ray"))):
        checks = (*CHECKS, *surroundings.CHECKS)
    results = [(check, perform(check, setup)) for check in checks]
    print(_json(setup, results) if arguments.format == "json" else _text(setup, results))
    outcomes = {result.outcome for _, result in results}
    return EXIT_ERROR if Outcome.ERROR in outcomes else EXIT_WARNING if Outcome.WARNING in outcomes else EXIT_PASS


def _fail(message: str) -> int:
    print(f"verl-monitor: {message}", file=sys.stderr)
    return EXIT_UNREADABLE


def perform(check: Check, setup: Setup) -> Result:
    """A check's result. One that cannot cope with a value costs itself."""
    try:
        return check.run(setup)
    except Exception as error:  # noqa: BLE001 - a check must not cost the others
        return Result(Outcome.SKIPPED, f"the check itself failed on this configuration: {error!r:.200}")


def _told(setup: Setup, arguments: argparse.Namespace) -> Setup:
    """The configuration with what the options say."""
    values: dict[str, Value] = dict(setup.values)
    memory = arguments.gpu_memory * 2**30 if arguments.gpu_memory else _own_gpu()
    if memory:
        values[GPU_MEMORY] = memory
    if arguments.model_dir:
        values["actor_rollout_ref.model.path"] = arguments.model_dir
    if arguments.checkpoint_dir:
        values[CHECKPOINT_DIR] = arguments.checkpoint_dir
    if arguments.ray_address:
        values[surroundings.RAY_ADDRESS] = arguments.ray_address
    return replace(setup, values=values)


def _own_gpu() -> float:
    import time

    from monitor.probes.node import NodeProbe

    probe = NodeProbe("here", time.monotonic)
    gpus = probe.read().gpus
    probe.close()
    return float(gpus[0].memory_total or 0) if gpus else 0.0


def _json(setup: Setup, results: Sequence[tuple[Check, Result]]) -> str:
    worst = next((outcome for outcome in (Outcome.ERROR, Outcome.WARNING) if any(
        result.outcome is outcome for _, result in results)), Outcome.PASS)
    return api.dumps({
        "config": setup.source, "verl_version": ".".join(map(str, setup.version)) or None, "verdict": worst.value,
        "checks": [{"id": check.id, "title": check.title, "status": result.outcome.value, "found": result.found,
                    "why": check.why, "set": result.set or None, "guide": check.guide, "applies": check.applies,
                    "source": check.source} for check, result in results]}, indent=True).decode()


def _text(setup: Setup, results: Sequence[tuple[Check, Result]]) -> str:
    version = f"verl {'.'.join(map(str, setup.version))}" if setup.version else "verl's version is not known"
    lines = [f"{setup.source} ({version})", ""]
    for check, result in results:
        word = result.outcome.value.upper() if result.outcome in (Outcome.WARNING, Outcome.ERROR) else \
            result.outcome.value
        guide = f" [guide {check.guide}]" if check.guide != "-" else ""
        lines += textwrap.wrap(f"{word:8}{check.id}{guide}: {result.found}.", _WIDTH, subsequent_indent=" " * 10)
        if result.outcome in (Outcome.WARNING, Outcome.ERROR):
            lines += textwrap.wrap(f"why: {check.why}", _WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 15)
            lines += textwrap.wrap(f"set: {result.set}", _WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 15)
    counts = {outcome: sum(result.outcome is outcome for _, result in results) for outcome in Outcome}
    lines += ["", ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)]
    return "\n".join(lines)
