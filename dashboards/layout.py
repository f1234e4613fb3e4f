"""Places panels on Grafana's grid of 24 columns and numbers them.

The SDK's own placement runs over the right edge when widths do not happen to add up to 24, so every place is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.sdk import Given, dashboard, model

COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel and the room it takes."""

    panel: model.Panel
    width: int
    height: int


def side_by_side(panels: Sequence[model.Panel], height: int) -> list[Placed]:
    """Panels of one line, which share its width; what a division leaves over goes to the first ones."""
    width, rest = divmod(COLUMNS, len(panels))
    return [Placed(panel, width + (index < rest), height) for index, panel in enumerate(panels)]


class Grid:
    """Adds rows of panels to a dashboard, from left to right and downward."""

    def __init__(self, builder: dashboard.Dashboard) -> None:
        self._builder = builder
        self._y = 0
        self._id = 0

    def row(self, title: str, panels: Sequence[Placed]) -> None:
        """A heading and the panels under it, wrapped where a line is full."""
        # Not Row.with_panel: that makes a collapsed row.
        self._builder.with_row(dashboard.Row(title).id(self._next_id()).grid_pos(
            model.GridPos(h=1, w=COLUMNS, x=0, y=self._y)))
        self._y += 1
        x = line_height = 0
        for placed in panels:
            if x + placed.width > COLUMNS:
                self._y, x, line_height = self._y + line_height, 0, 0
            placed.panel.id_val = self._next_id()
            placed.panel.grid_pos = model.GridPos(h=placed.height, w=placed.width, x=x, y=self._y)
            self._builder.with_panel(Given(placed.panel))
            x, line_height = x + placed.width, max(line_height, placed.height)
        self._y += line_height

    def _next_id(self) -> int:
        self._id += 1
        return self._id
