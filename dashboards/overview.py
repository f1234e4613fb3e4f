"""The dashboard's first row: is this run well, and if not, what is it."""

from __future__ import annotations

from dashboards.layout import Placed
from dashboards.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    ORDINAL,
    RED,
    mapping,
    stat_panel,
    table_panel,
    timeline_panel,
)
from dashboards.queries import Name, Query, aggregate, health_code, latest, run_state_code, select, while_active
from dashboards.sdk import model
from monitor.detectors import DETECTORS
from monitor.model import RunState, Severity, Status
from monitor.units import Unit

_HEALTH: dict[str, tuple[str, str | None]] = {
    str(Status.OK.health): ("well", GREEN),
    str(Status.WARNING.health): ("warning", ORANGE),
    str(Status.CRITICAL.health): ("critical", RED),
}
# Green for a detector that cannot see, or whose finding is held back, would be a lie.
_NOT_JUDGED: dict[str, tuple[str, str | None]] = {
    "-1": ("not logged by this run", GREY),
    "-2": ("held back: follows from another finding", BLUE),
}
_STATE_COLORS = {
    RunState.STARTING: BLUE,
    RunState.RUNNING: GREEN,
    RunState.STALLED: RED,
    RunState.FINISHED: GREY,
    RunState.FAILED: RED,
    RunState.GONE: GREY,
}
_TITLES = mapping({detector.spec.id: (detector.spec.title, None) for detector in DETECTORS})
_WAKE = mapping({detector.spec.id: (detector.spec.wake, None) for detector in DETECTORS})
_WRAP = {"type": "auto", "wrapText": True}


def overview() -> list[Placed]:
    """Panels of the first row."""
    return [
        *(Placed(panel, 4, 4) for panel in (_state(), _worst(), _last_step(), _steps())),
        Placed(_silence(), 8, 4),
        Placed(_timeline(), 24, 4 + len(DETECTORS)),
        Placed(_findings(), 13, 8),
        Placed(_blind(), 11, 8),
    ]


def _state() -> model.Panel:
    return stat_panel(
        "Run",
        "State of the run at the end of the time range. *Finished* means that the log's writer has closed it. A run "
        "that is only silent is *stalled*, never finished.",
        [Query(expr=run_state_code(), instant=True)],
        unit=ORDINAL,
        mappings=mapping({str(n): (state.value, _STATE_COLORS[state]) for n, state in enumerate(RunState)}))


def _worst() -> model.Panel:
    return stat_panel(
        "Worst health now",
        "The worst confirmed finding of all detectors at the end of the time range. A finding that follows from "
        "another one is held back and does not count. Good: well.",
        [Query(expr=aggregate("max", latest(select(Name.HEALTH))), instant=True)],
        unit=ORDINAL, mappings=mapping(_HEALTH))


def _last_step() -> model.Panel:
    return stat_panel(
        "Last step", "Number of the last step that the run's log holds.",
        [Query(expr=aggregate("max", latest(select(Name.LAST_STEP))), instant=True)], unit=ORDINAL)


def _steps() -> model.Panel:
    return stat_panel(
        "Steps seen",
        "Training steps that the monitor has seen, steps that were repeated after a restart included: more than the "
        "last step's number means that work was done twice.",
        [Query(expr=aggregate("max", latest(select(Name.STEPS))), instant=True)], unit=ORDINAL)


def _silence() -> model.Panel:
    silent, allowed = f"time() - {select(Name.LAST_STEP_TIME)}", select(Name.ALLOWED_SILENCE)
    return stat_panel(
        "Time since the last step",
        "Time since the last step, and the silence from which on this run counts as stalled; the limit comes from the "
        "run's own steps. Empty when the run is over, since no step is expected then. Good: well below 100 %.",
        [
            Query(expr=while_active(silent), legend="silent for", instant=True),
            Query(expr=while_active(allowed), legend="allowed", instant=True),
            Query(expr=while_active(f"({silent}) / {allowed}"), legend="share", instant=True),
        ],
        unit=Name.ALLOWED_SILENCE.unit.grafana, no_value="the run is over",
        overrides=[("share", {
            "unit": Unit.RATIO.grafana,
            "thresholds": {"mode": "absolute", "steps": [
                {"value": None, "color": GREEN}, {"value": 0.5, "color": ORANGE}, {"value": 1, "color": RED}]},
        })])


def _timeline() -> model.Panel:
    return timeline_panel(
        "Health by detector",
        "Confirmed findings of every detector over time. Grey: the run does not log what the detector needs, so "
        "nothing is being judged. Blue: a finding that follows from another one.",
        [Query(expr=health_code(), legend="{{detector}}")],
        mappings=mapping(_HEALTH | _NOT_JUDGED))


def _findings() -> model.Panel:
    total = f"{aggregate('sum', latest(select(Name.FINDINGS)), ('detector',))} > 0"

    def column(operator: str, selector: str) -> Query:
        # Of the detectors that have found something only; the others would be rows of zeros.
        expr = aggregate(operator, latest(selector), ("detector",))
        return Query(expr=f"{expr} and on (detector) ({total})", instant=True)

    return table_panel(
        "Findings",
        "How often each detector has found something in this run, and where its latest finding was first visible. "
        "Reasons with their numbers are on the monitor's own page.",
        [
            column("max", select(Name.HEALTH)),
            column("sum", select(Name.FINDINGS, severity=Severity.WARNING.value)),
            column("sum", select(Name.FINDINGS, severity=Severity.CRITICAL.value)),
            column("max", select(Name.SINCE_STEP)),
        ],
        join="detector", unit=ORDINAL, no_value="no findings",
        columns={"detector": "Detector", "Value #A": "Now", "Value #B": "Warnings", "Value #C": "Critical",
                 "Value #D": "Since step"},
        overrides=[
            ("Detector", {"mappings": _TITLES}),
            ("Now", {"mappings": mapping(_HEALTH), "custom.cellOptions": {"type": "color-text"}}),
        ])


def _blind() -> model.Panel:
    # A second copy of the label, so that one column can say the detector's name and another what would wake it.
    expr = f'label_replace({latest(select(Name.BLIND))} == 1, "wake", "$1", "detector", "(.+)")'
    return table_panel(
        "Not logged by this run",
        "Detectors that judge nothing because the run does not log what they need, and what would make it. Good: "
        "empty, or a row that says why it does not apply, such as a critic in a run without one.",
        [Query(expr=expr, instant=True)],
        unit=ORDINAL, no_value="every detector sees what it needs",
        columns={"detector": "Detector", "wake": "What it needs"},
        overrides=[
            ("Detector", {"mappings": _TITLES, "custom.width": 180}),
            ("What it needs", {"mappings": _WAKE, "custom.cellOptions": _WRAP}),
        ])
