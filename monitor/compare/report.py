"""A comparison as a table that is read in a hundred columns, and as JSON."""

from __future__ import annotations

from typing import Any

import orjson

from monitor.compare.figures import Comparison, Figure, Finding
from monitor.compare.interval import FLOOR, LEVEL, UNSURE, Change, Statistic
from monitor.compare.rows import Record
from monitor.model import Incident
from monitor.units import Unit, quantity

WIDTH = 100
_LEAST_LABEL = 26
_GAP = "  "

METHOD = (f"{LEVEL:.0%} interval of the noise between steps (block bootstrap, both runs by the same blocks of steps); "
          "what another seed or another day would change it cannot know. clear: it excludes 0 and the change is beyond "
          f"{FLOOR:.0%}. spread: half the width of the middle 68%, a standard deviation that single steps do not move.")


def as_json(comparison: Comparison) -> str:
    """The whole comparison; what is not known is null."""
    return orjson.dumps({
        "a": _run_json(comparison.a), "b": _run_json(comparison.b),
        "common_steps": comparison.common, "first_step": comparison.first, "last_step": comparison.last,
        "figures": [_figure_json(figure) for figure in comparison.figures],
        "only_in_a": list(comparison.only_a), "only_in_b": list(comparison.only_b),
        "zero_in_both": list(comparison.zero),
        "findings": [_finding_json(finding) for finding in comparison.findings],
        "notes": list(comparison.notes), "method": METHOD,
    }, option=orjson.OPT_INDENT_2).decode()


def _run_json(record: Record) -> dict[str, Any]:
    steps = record.steps
    return {"run": record.name, "files": [str(file) for file in record.files], "steps": len(steps),
            "first_step": steps[0], "last_step": steps[-1]}


def _figure_json(figure: Figure) -> dict[str, Any]:
    change = figure.change
    return {
        "group": figure.group, "series": figure.series, "statistic": figure.statistic.value,
        "unit": figure.unit.suffix or None, "a": change.a, "b": change.b, "change": change.change,
        "low": change.low, "high": change.high, "relative": change.relative, "clear": change.clear,
        "steps": figure.steps, "paired": figure.paired}


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {"detector": finding.detector, "title": finding.title,
            "a": _incident_json(finding.a), "b": _incident_json(finding.b)}


def _incident_json(incident: Incident | None) -> dict[str, Any] | None:
    return None if incident is None else {
        "severity": incident.severity.value, "first_step": incident.first_step, "last_step": incident.last_step,
        "raised_step": incident.raised_step, "reason": incident.reason}


def as_text(comparison: Comparison) -> str:
    """The table."""
    lines = [_run_line("A", comparison.a), _run_line("B", comparison.b)]
    if comparison.common:
        lines += _wrapped(f"Over the {comparison.common} steps that both have ({comparison.first} to "
                          f"{comparison.last}); times and speed without the first step of a start.")
    for note in comparison.notes:
        lines += _wrapped(f"Note: {note}.")
    lines += ["", *_table(comparison.figures)]
    for title, labels in (("Only in A", comparison.only_a), ("Only in B", comparison.only_b),
                          ("0 in both", comparison.zero)):
        if labels:
            lines += ["", *_wrapped(f"{title}: " + "; ".join(labels))]
    lines += ["", "Findings" if comparison.findings else "No findings in either run."]
    for finding in comparison.findings:
        lines.append(f"  {finding.title} ({finding.detector})")
        for letter, incident in (("A", finding.a), ("B", finding.b)):
            lines.append(f"    {letter}  " + ("-" if incident is None else (
                f"{incident.severity.value}, since step {incident.first_step}, until step {incident.last_step}")))
    return "\n".join([*lines, "", *_wrapped(METHOD)])


def _run_line(letter: str, record: Record) -> str:
    steps = record.steps
    more = f" and {len(record.files) - 1} more" if len(record.files) > 1 else ""
    return f"{letter}  {record.name}: {len(steps)} steps ({steps[0]} to {steps[-1]}), {record.files[0]}{more}"


def _table(figures: tuple[Figure, ...]) -> list[str]:
    told: dict[str, set[Statistic]] = {}
    for figure in figures:
        told.setdefault(figure.group, set()).add(figure.statistic)
    head = ("", "A", "B", "change", f"{LEVEL:.0%} interval", "")
    rows = [("  " + (figure.label if len(told[figure.group]) == 1 else f"{figure.label}, {figure.statistic.value}"),
             quantity(figure.change.a, figure.unit), quantity(figure.change.b, figure.unit),
             change_text(figure.change, figure.unit), _interval_text(figure),
             "clear" if figure.change.clear else "") for figure in figures]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(5)]
    widths[0] = min(widths[0], max(_LEAST_LABEL, WIDTH - sum(widths[1:]) - 5 * len(_GAP) - len("clear")))
    lines = []
    group = ""
    for title, row in zip(("", *(figure.group for figure in figures)), (head, *rows), strict=True):
        if title != group:
            group = title
            lines.append(f"{title} ({next(iter(told[title])).value})" if len(told[title]) == 1 else title)
        cells = [cell.rjust(width) for cell, width in zip(row[1:5], widths[1:], strict=True)]
        lines.append(_GAP.join([_shortened(row[0], widths[0]).ljust(widths[0]), *cells, row[5]]).rstrip())
    return lines


def _shortened(label: str, width: int) -> str:
    """A label without its middle, where it is too long: its end tells apart what begins alike."""
    if len(label) <= width:
        return label
    return f"{label[:width - 1 - width // 2]}…{label[-(width // 2):]}"


def change_text(change: Change, unit: Unit) -> str:
    """A change: in percent, as a factor from tenfold on, or in its unit where the first run's figure is too near 0."""
    if not change.relative:
        return _signed(change.change, _beside(unit))
    return f"× {1 + change.change:.3g}" if change.change >= 9 else f"{_percent(change.change)} %"


def _beside(unit: Unit) -> Unit:
    """The unit of a number that stands beside others with their unit; bytes are told in GiB, so they need theirs."""
    return unit if unit is Unit.BYTES else Unit.NUMBER


def _percent(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def _signed(value: float, unit: Unit) -> str:
    return ("+" if value > 0 else "") + quantity(value, unit)


def _interval_text(figure: Figure) -> str:
    change = figure.change
    if change.low != change.low:
        return "-" if figure.statistic in UNSURE else f"- ({figure.steps} steps)"
    if not change.relative:
        unit = _beside(figure.unit)
        return f"{_signed(change.low, unit)} to {_signed(change.high, unit)}"
    if change.change >= 9:
        return f"× {1 + change.low:.3g} to {1 + change.high:.3g}"
    return f"{_percent(change.low)} to {_percent(change.high)} %"


def _wrapped(text: str) -> list[str]:
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = "   " + word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]
