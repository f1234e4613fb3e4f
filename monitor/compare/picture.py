"""Both runs in one picture: reward, KL, step time and throughput by step, and the stages of a step.

matplotlib draws it. It is asked for only when a picture is: the service and the trainer's environment do without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monitor.compare.figures import REWARD, STAGES, STEP_TIME, THROUGHPUT, Comparison
from monitor.compare.rows import Record
from monitor.stats import median

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00")
"""Blue and vermilion of Okabe and Ito, which colour-blind readers tell apart."""

SUFFIXES = (".svg", ".png")
MOST_POINTS = 1000
_SMOOTH = 9  # steps of the running median
_KINDS = ("reference", "update", "rollout")


class PictureError(Exception):
    """A picture cannot be drawn; the message says why."""


def check(path: Path) -> None:
    """Whether a picture can be drawn, before long work.

    Raises:
        PictureError: the suffix is unknown, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise PictureError(f"--picture: expected a file ending in {' or '.join(SUFFIXES)}, got {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError("--picture: matplotlib is not installed; pip install 'verl-monitor[pictures]'")


def draw(comparison: Comparison, path: Path, first: int | None, last: int | None) -> None:
    """Draw the steps from ``first`` to ``last`` into a file.

    Raises:
        PictureError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Names are text and no formulas; the same runs give the same file.
    settings: dict[Any, Any] = {
        "text.parse_math": False, "svg.fonttype": "path", "svg.hashsalt": "verl-monitor", "font.size": 9,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(11, 9), layout="constrained", facecolor="white")
        axes = figure.subplots(3, 2)
        _curves(axes[0][0], comparison, REWARD, "reward (mean)", first, last)
        kind = _kind(comparison)
        _curves(axes[0][1], comparison, f"kl_divergence/{kind}", f"KL {kind} (nats)", first, last)
        _curves(axes[1][0], comparison, STEP_TIME, "step time (s)", first, last)
        _curves(axes[1][1], comparison, THROUGHPUT, "throughput (tokens/s/GPU)", first, last)
        _curves(axes[2][0], comparison, "response_length_tokens/mean", "response length (tokens)", first, last)
        _stages(axes[2][1], comparison)
        lines = axes[0][0].get_legend_handles_labels()[0] or axes[1][0].get_legend_handles_labels()[0]
        figure.legend(lines, [f"A  {_shown(comparison.a)}", f"B  {_shown(comparison.b)}"], loc="outside upper center",
                      ncols=2, frameon=False)
        try:
            metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
            figure.savefig(path, dpi=130, metadata=metadata)
        except OSError as error:
            raise PictureError(f"--picture: {path}: {error.strerror or error}") from error


def _kind(comparison: Comparison) -> str:
    """The KL that says most: to the reference, where either run measures it."""
    for kind in _KINDS:
        if any(any(record.columns.values(f"kl_divergence/{kind}").values()) for record in (comparison.a, comparison.b)):
            return kind
    return _KINDS[0]


def _shown(record: Record) -> str:
    """A name in letters that matplotlib's own font has; for any other it warns."""
    name = record.name if len(record.name) <= 60 else record.name[:59] + "…"
    return "".join(letter if ord(letter) < 0x250 or letter == "…" else "?" for letter in name)


def _curves(axes: Axes, comparison: Comparison, series: str, label: str, first: int | None, last: int | None) -> None:
    axes.set_ylabel(label)
    axes.set_xlabel("step")
    speed = series in (STEP_TIME, THROUGHPUT)
    drawn = False
    for record, colour in zip((comparison.a, comparison.b), COLOURS, strict=True):
        points = [(step, value) for step, value in record.columns.values(series).items()
                  if (first is None or step >= first) and (last is None or step <= last)
                  and not (speed and step in record.columns.warm)]
        if not points:
            continue
        drawn = True
        batch = -(-len(points) // MOST_POINTS)
        steps = [points[i][0] for i in range(0, len(points), batch)]
        values = [median([value for _, value in points[i:i + batch]]) for i in range(0, len(points), batch)]
        half = _SMOOTH // 2
        smooth = [median(values[max(0, i - half):i + half + 1]) for i in range(len(values))]
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8, marker="." if len(points) < 3 else None)
        axes.plot(steps, smooth, color=colour, linewidth=1.8, label=colour)
    if not drawn:
        axes.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axes.transAxes, color="0.5")


def _stages(axes: Axes, comparison: Comparison) -> None:
    figures: Mapping[str, tuple[float, float]] = {
        figure.series: (figure.change.a, figure.change.b) for figure in comparison.figures}
    stages = [stage for stage in STAGES if stage != "step" and f"stage_duration_seconds/{stage}" in figures]
    for offset, colour, which in ((-0.2, COLOURS[0], 0), (0.2, COLOURS[1], 1)):
        axes.barh([place + offset for place in range(len(stages))],
                  [figures[f"stage_duration_seconds/{stage}"][which] for stage in stages], height=0.4, color=colour)
    axes.set_yticks(range(len(stages)), stages)
    axes.invert_yaxis()
    axes.set_xlabel("median time of a stage (s)")
    if not stages:
        axes.text(0.5, 0.5, "not logged by both", ha="center", va="center", transform=axes.transAxes, color="0.5")
