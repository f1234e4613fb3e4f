"""The dashboard of the machine room: GPUs, nodes, Ray. Its metrics belong to no run."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.layout import Placed, side_by_side
from dashboards.panels import GREEN, GREY, ORANGE, RED, graph_panel, mapping, stat_panel, timeline_panel
from dashboards.queries import Name, Query, aggregate, metric_named, one_of, select
from dashboards.sdk import model
from monitor.detectors import MACHINE_DETECTORS

NODE_VARIABLE = "node"
_OF_NODE = f"~${NODE_VARIABLE}"
_HEIGHT = 8
_NOTHING = "not seen by this monitor"
_IDS = [detector.spec.id for detector in MACHINE_DETECTORS]


def machine_rows() -> list[tuple[str, list[Placed]]]:
    """Rows, each with its heading."""
    return [("Is the machine room well", _health()), ("GPUs", _gpus()), ("Nodes", _nodes()), ("Ray", _ray())]


def _of_node(name: str, **labels: str) -> str:
    return select(metric_named(name), **{NODE_VARIABLE: _OF_NODE}, **labels)


def _graph(title: str, good: str, queries: Sequence[tuple[str, str, str]], *, stacked: bool = False) -> model.Panel:
    """A panel of metrics: name, query and legend of each."""
    metrics = {name: metric_named(name) for name, _, _ in queries}
    helps = " ".join(dict.fromkeys(metric.help for metric in metrics.values()))
    return graph_panel(title, f"{helps}\n\n{good}", [Query(expr=expr, legend=legend) for _, expr, legend in queries],
                       unit=next(iter(metrics.values())).unit, stacked=stacked, no_value=_NOTHING)


def _health() -> list[Placed]:
    titles = mapping({detector.spec.id: (detector.spec.title, None) for detector in MACHINE_DETECTORS})
    states = mapping({"0": ("well", GREEN), "1": ("warning", ORANGE), "2": ("critical", RED)})
    expr = aggregate("max", f'{Name.HEALTH.value}{{detector=~"{"|".join(_IDS)}"}}', ("detector",))
    timeline = timeline_panel(
        "Findings about machines",
        "Confirmed findings of the detectors that judge GPUs, nodes and Ray. Good: green, or no line where there is no "
        "GPU or no Ray to judge.", [Query(expr=expr, legend="{{detector}}")], mappings=[*titles, *states])
    blocked = metric_named("ray_placement_group_blocked_gpus")
    stat = stat_panel(
        "GPUs blocked by leaks",
        f"{blocked.help} Good: 0. Otherwise `verl-monitor placement-groups --remove-leaked`.",
        [Query(expr=aggregate("max", select(blocked)), instant=True)], unit=blocked.unit.grafana,
        steps=((None, GREEN), (1.0, RED)), no_value="Ray is not watched")
    up = metric_named("ray_up")
    answers = stat_panel(
        "Ray's dashboard", f"{up.help} Good: answers. Where it does not, nothing else of Ray is shown.",
        [Query(expr=aggregate("max", select(up)), instant=True)], unit=up.unit.grafana,
        mappings=mapping({"1": ("answers", GREEN), "0": ("does not answer", RED)}), no_value="Ray is not watched")
    return [Placed(timeline, 16, 6), Placed(stat, 4, 6), Placed(answers, 4, 6)]


def _gpus() -> list[Placed]:
    panels = [
        _graph("Memory by role", "Good: the same layers from step to step. Trainer is actor, critic and reference, "
               "which share a process.",
               [("gpu_role_memory_bytes", aggregate("sum", _of_node("gpu_role_memory_bytes"), ("role",)), "{{role}}")],
               stacked=True),
        _graph("Memory free", "Good: never near 0 at a step's peak. The least of all shown GPUs decides.",
               [("gpu_memory_free_bytes", _of_node("gpu_memory_free_bytes"), "{{node}} {{gpu}}")]),
        _graph("Memory used", "Good: level from step to step; what climbs without end is memory_growth.",
               [("gpu_memory_used_bytes", _of_node("gpu_memory_used_bytes"), "{{node}} {{gpu}}")]),
        _graph("Utilisation", "Good: high while verl trains. Full at idle power is how a kernel that waits for ever "
               "looks: read it beside the power.",
               [("gpu_utilization_ratio", _of_node("gpu_utilization_ratio"), "{{node}} {{gpu}}")]),
        _graph("Power", "Good: well above idle while the utilisation is high.",
               [("gpu_power_watts", _of_node("gpu_power_watts"), "{{node}} {{gpu}}")]),
        _graph("Temperature", "Good: level under load; a GPU that is warmer than the others throttles first.",
               [("gpu_temperature_celsius", _of_node("gpu_temperature_celsius"), "{{node}} {{gpu}}")]),
    ]
    return [*side_by_side(panels[:3], _HEIGHT), *side_by_side(panels[3:], _HEIGHT)]


def _nodes() -> list[Placed]:
    states = {"ok": GREEN, "none": GREY, "hung": RED, "lost": RED}
    code = " or ".join(f'{number} * {_of_node("gpu_state", state=state)}' for number, state in enumerate(states, 1))
    timeline = timeline_panel(
        "How the nodes' GPUs answer",
        f"{metric_named('gpu_state').help} Good: ok, or none on a node without GPUs. Hung or lost: see the runbook of "
        "VerlGpuLost.", [Query(expr=aggregate("max", f"({code}) > 0", ("node",)), legend="{{node}}")],
        mappings=mapping({str(number): (state, color) for number, (state, color) in enumerate(states.items(), 1)}))
    panels = [
        timeline,
        _graph("Host memory available", "Good: level. Where it falls step by step, the kernel ends a worker in the "
               "end.",
               [("node_memory_available_bytes", _of_node("node_memory_available_bytes"), "{{node}}")]),
        _graph("Probes that answer", "Good: 1. A node whose probe does not answer may be gone itself.",
               [("node_probe_up", _of_node("node_probe_up"), "{{node}}")]),
    ]
    return side_by_side(panels, _HEIGHT)


def _ray() -> list[Placed]:
    panels = [
        _graph("Placement groups", "Good: none leaked, none pending for long.",
               [("ray_placement_groups", select(metric_named("ray_placement_groups"), state=one_of(
                   ("created", "pending", "rescheduling", "leaked"))), "{{state}}")]),
        _graph("Actors", "Good: none dead while its job runs.",
               [("ray_actors", select(metric_named("ray_actors")), "{{state}}")]),
        _graph("GPUs and CPUs had, and waited for", "Good: nothing is waited for. More waited for than had will never "
               "be placed.",
               [("ray_resources", select(metric_named("ray_resources"), resource=one_of(("CPU", "GPU"))),
                 "{{resource}} had"),
                ("ray_pending_resources", select(metric_named("ray_pending_resources")), "{{resource}} waited for")]),
    ]
    return side_by_side(panels, _HEIGHT)


