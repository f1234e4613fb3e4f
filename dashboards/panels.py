"""The kinds of panels, each with what it always needs: datasource, description, unit, legend, reduction.

The SDK leaves out what Grafana's editor would fill in (panel ids, refIds, the reduction of a stat), so it is set here
and in ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from dashboards.queries import Query
from dashboards.sdk import (
    Builder,
    PromQueryFormat,
    common,
    common_model,
    dashboard,
    model,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from monitor.units import Unit

DATASOURCE_VARIABLE = "datasource"
DATASOURCE = common_model.DataSourceRef(type_val="prometheus", uid=f"${{{DATASOURCE_VARIABLE}}}")
ORDINAL = "none"
"""Grafana unit of a number that must not be shortened to ``1.2 K``: a step's number names the step."""

GREEN, ORANGE, RED, BLUE, GREY = "green", "orange", "red", "blue", "#808080"
# On a plain log axis an exact 0 (an update that was skipped) and the negative half of a signed KL would vanish. This
# scale is logarithmic above the limit, mirrored below zero, and linear between.
_LINEAR_BELOW = 1e-4

Links = Sequence[model.DashboardLink]
Mappings = Sequence[model.ValueMapping]
Override = tuple[str, Mapping[str, object]]
"""Regular expression of field names, and the properties they get."""


def link(title: str, url: str) -> model.DashboardLink:
    """A link that opens a page of its own."""
    made = model.DashboardLink(title=title, url=url, target_blank=True)
    made.placement = None  # type: ignore[assignment]  # else the SDK hides it in the menu of the dashboard's controls
    return made


def mapping(values: Mapping[str, tuple[str, str | None]]) -> list[model.ValueMapping]:
    """Value mappings: value -> (text, colour)."""
    return [model.ValueMap(options={value: model.ValueMappingResult(text=text, color=color, index=index)
                                    for index, (value, (text, color)) in enumerate(values.items())})]


def stat_panel(title: str, description: str, queries: Sequence[Query], *, unit: str, mappings: Mappings = (),
               steps: Sequence[tuple[float | None, str]] = ((None, BLUE),), no_value: str = "no data",
               overrides: Sequence[Override] = (), links: Links = ()) -> model.Panel:
    """Numbers or words of now. ``steps``: colours from a value on; the first one's value is None."""
    builder = (
        stat.Panel().unit(unit).mappings(list(mappings)).thresholds(_thresholds(steps)).no_value(no_value)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .color_mode(common_model.BigValueColorMode.VALUE).graph_mode(common_model.BigValueGraphMode.NONE)
        .text_mode(common_model.BigValueTextMode.AUTO).justify_mode(common_model.BigValueJustifyMode.AUTO)
        .orientation(common_model.VizOrientation.AUTO)
    )
    for pattern, properties in overrides:
        builder = builder.override_by_regexp(pattern, _properties(properties))
    return _finish(builder, title, description, queries, links)


def graph_panel(title: str, description: str, queries: Sequence[Query], *, unit: Unit, log: bool = False,
                stacked: bool = False, limit: float | None = None, no_value: str = "no data",
                overrides: Sequence[Override] = (), links: Links = ()) -> model.Panel:
    """Lines over time. ``limit``: draws a dashed line there, and what is above it in its colour."""
    scale = common.ScaleDistributionConfig().type(common_model.ScaleDistribution.LINEAR)
    if log:
        scale = (common.ScaleDistributionConfig().type(common_model.ScaleDistribution.SYMLOG).log(10)
                 .linear_threshold(_LINEAR_BELOW))
    builder = (
        timeseries.Panel().unit(unit.grafana).no_value(no_value).scale_distribution(scale).axis_label(unit.word)
        .line_width(1).fill_opacity(40 if stacked else 0)
        # A run of few steps, or a single scrape, is invisible as a line.
        .show_points(common_model.VisibilityMode.AUTO)
        .legend(common.VizLegendOptions().display_mode(common_model.LegendDisplayMode.LIST)
                .placement(common_model.LegendPlacement.BOTTOM).show_legend(True).calcs(["lastNotNull"]))
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI)
                 .sort(common_model.SortOrder.NONE))
    )
    if stacked:
        builder = builder.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if limit is not None:
        builder = builder.thresholds(_thresholds(((None, "transparent"), (limit, RED)))).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED))
    for pattern, properties in overrides:
        builder = builder.override_by_regexp(pattern, _properties(properties))
    return _finish(builder, title, description, queries, links)


def timeline_panel(title: str, description: str, queries: Sequence[Query], *, mappings: Mappings,
                   links: Links = ()) -> model.Panel:
    """States over time, one row for each series."""
    builder = (
        statetimeline.Panel().unit(ORDINAL).mappings(list(mappings)).thresholds(_thresholds(((None, GREY),)))
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .merge_values(True).show_value(common_model.VisibilityMode.NEVER).row_height(0.8).fill_opacity(80)
        .legend(common.VizLegendOptions().display_mode(common_model.LegendDisplayMode.LIST)
                .placement(common_model.LegendPlacement.BOTTOM).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.SINGLE))
    )
    return _finish(builder, title, description, queries, links)


def table_panel(title: str, description: str, queries: Sequence[Query], *, columns: Mapping[str, str], unit: str,
                join: str = "", no_value: str, overrides: Sequence[Override] = (), links: Links = ()) -> model.Panel:
    """A table of now. ``columns``: field -> heading, in order; other fields are left out. ``join``: the label that
    the rows of several queries have in common, once in each."""
    builder = table.Panel().unit(unit).no_value(no_value).show_header(True)
    if join:
        builder = builder.with_transformation(_transformation("joinByField", {"byField": join, "mode": "outer"}))
    builder = (
        builder.with_transformation(_transformation("filterFieldsByName", {"include": {"names": list(columns)}}))
        .with_transformation(_transformation("organize", {
            "indexByName": {field: index for index, field in enumerate(columns)}, "renameByName": dict(columns)}))
    )
    for pattern, properties in overrides:
        builder = builder.override_by_regexp(pattern, _properties(properties))
    return _finish(builder, title, description, queries, links, tabular=True)


def _finish(builder: Builder[model.Panel], title: str, description: str, queries: Sequence[Query], links: Links,
            *, tabular: bool = False) -> model.Panel:
    panel = builder.build()
    panel.title, panel.description, panel.datasource = title, description, DATASOURCE
    panel.links = list(links)
    panel.targets = [_target(query, ref, tabular).build() for ref, query in zip(ascii_uppercase, queries, strict=False)]
    return panel


def _target(query: Query, ref: str, tabular: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref).datasource(DATASOURCE).expr(query.expr)
    target = target.legend_format(query.legend) if query.legend else target
    target = target.instant() if query.instant else target.range()
    return target.format(PromQueryFormat.TABLE if tabular else PromQueryFormat.TIME_SERIES)


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> dashboard.ThresholdsConfig:
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(
        [model.Threshold(value=value, color=color) for value, color in steps])


def _properties(properties: Mapping[str, object]) -> list[model.DynamicConfigValue]:
    return [model.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]


def _transformation(kind: str, options: Mapping[str, object]) -> model.DataTransformerConfig:
    return model.DataTransformerConfig(id_val=kind, options=dict(options))
