"""The sentence with numbers in an alert's description, as a template that Prometheus fills in.

The monitor's own reasons are sentences, so they are no labels. Level, limit and steps are on /metrics, and the template
asks for them when the alert is sent. Each query may return nothing (the scrape failed, the detector gave no limit):
then its part of the sentence is left out, and without a level the whole sentence says where to look instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from monitor.catalog import metric_of
from monitor.model import DetectorSpec
from monitor.units import Unit

NOT_FINITE = "Signal {signal} is not a finite number"
NO_NUMBERS = "Its numbers are not on /metrics at this moment; the run's page has them."


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Parts of the sentence. ``{signal}``, ``{value}``, ``{limit}`` and ``{step}`` stand for what is filled in; an
    empty part is left out. ``unit`` replaces the signal's unit."""

    level: str = "Signal {signal} is {value}"
    limit: str = ", limit {limit}"
    since: str = ", since step {step}"
    last: str = ", now step {step}"
    unit: Unit | None = None


_MACHINE = Wording(since="", last="")  # a machine has no steps
_WORDINGS = {
    # Its level is a silence; the step it began at is the last one.
    "rollout_stall": Wording(level="No step for {value}", limit=", allowed are {limit}", since="",
                             last=", last step was {step}", unit=Unit.SECONDS),
}


def wording_of(spec: DetectorSpec) -> Wording:
    """The sentence's parts for a detector."""
    return _WORDINGS.get(spec.id, _MACHINE if spec.machine else Wording())


def _format(unit: Unit) -> str:
    """Template for ``.Value``. ``humanize`` would write 0.2 as 200m, which nobody reads as a KL."""
    if unit is Unit.SECONDS:
        return "{{ humanizeDuration .Value }}"
    if unit is Unit.BYTES:
        return "{{ humanize1024 .Value }}B"
    if unit is Unit.HERTZ:
        return "{{ humanize .Value }}Hz"
    if unit in (Unit.TOKENS, Unit.TOKENS_PER_SECOND):
        return "{{ humanize .Value }} " + unit.word
    return '{{ printf "%.4g" .Value }}' + (f" {unit.word}" if unit.word else "")


EXAMPLES = {Unit.SECONDS: (90.0, "1m 30s"), Unit.BYTES: (3 * 2.0**30, "3GiB"), Unit.TOKENS: (2048.0, "2.048k tokens"),
            Unit.TOKENS_PER_SECOND: (1500.0, "1.5k tokens/s"), Unit.NATS: (1.25, "1.25 nats"),
            Unit.WATTS: (117.0, "117 W"), Unit.CELSIUS: (34.0, "34 °C"), Unit.HERTZ: (1.98e9, "1.98GHz"),
            Unit.RATIO: (0.2, "0.2"), Unit.NUMBER: (1234.5, "1234"), Unit.STEPS: (12.0, "12 steps")}
"""A value of each unit and how it must read: what the promtool tests expect, written by hand."""


def units_of(spec: DetectorSpec) -> dict[str, Unit]:
    """Unit by metric name, of every series that may have decided."""
    units = {}
    for series in chain(*spec.required, spec.optional, spec.panel):
        try:
            units[series.split("/", 1)[0]] = metric_of(series).unit
        except KeyError:  # a fact that is no metric of verl's: a bare number
            continue
    return units


def _number(spec: DetectorSpec, wording: Wording) -> str:
    """Template for ``.Value`` in the unit of ``.Labels.signal``."""
    if wording.unit is not None:
        return _format(wording.unit)
    names: dict[str, list[str]] = {}
    for name, unit in units_of(spec).items():
        names.setdefault(_format(unit), []).append(name)
    plain = _format(Unit.NUMBER)
    names.pop(plain, None)
    out = plain
    for text, metrics in reversed(names.items()):
        pattern = "|".join(sorted(metrics))
        out = f'{{{{ if match "^({pattern})(/|$)" .Labels.signal }}}}{text}{{{{ else }}}}{out}{{{{ end }}}}'
    return out


def sentence(spec: DetectorSpec) -> str:
    """The template. A level that is NaN is the finding; a limit that is (``>= -Inf`` drops it) is none. Queries merge
    replicas of the monitor."""
    wording = wording_of(spec)
    number = _number(spec, wording)
    one = f'run=%q,detector="{spec.id}"'
    value = f"max by (signal) (verl_health_value{{{one}}})"
    threshold = f"max by (signal) (verl_health_threshold{{{one},signal=%q}}) >= -Inf"
    signal = "{{ .Labels.signal }}"
    level = ("{{ if ne .Value .Value }}" + NOT_FINITE.format(signal=signal) + "{{ else }}"
             + wording.level.format(signal=signal, value=number) + "{{ end }}")
    step = '{{ printf "%.0f" .Value }}'
    lines = [f"{{{{ range query (printf `{value}` $labels.run) -}}}}", level]
    if wording.limit:
        lines.append(f"{{{{- range query (printf `{threshold}` $labels.run .Labels.signal) }}}}"
                     f"{wording.limit.format(limit=number)}{{{{ end }}}}")
    if wording.since:
        lines.append(f"{{{{- range query (printf `min by (run) (verl_health_since_step{{{one}}})` $labels.run) }}}}"
                     f"{wording.since.format(step=step)}{{{{ end }}}}")
    last = (f"{{{{- range query (printf `max by (run) (verl_run_last_step{{run=%q}})` $labels.run) }}}}"
            f"{wording.last.format(step=step)}{{{{ end }}}}." if wording.last else '{{- "." }}')
    lines += [last, "{{- else -}}", NO_NUMBERS, "{{- end }}"]
    return "\n".join(lines)


def example(spec: DetectorSpec) -> tuple[str, float, str]:
    """A signal, its value, and the sentence that must come out when the limit is the same value, the finding was seen
    since step 31 and the last step is 37."""
    wording = wording_of(spec)
    signal = spec.panel[0]
    unit = wording.unit or units_of(spec).get(signal.split("/", 1)[0], Unit.NUMBER)
    value, text = EXAMPLES[unit]
    parts = (wording.level.format(signal=signal, value=text), wording.limit.format(limit=text),
             wording.since.format(step=31), wording.last.format(step=37))
    return signal, value, "".join(parts) + "."
