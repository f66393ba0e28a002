"""The names of lanes as the axis shows them."""

import re
from collections.abc import Sequence
from typing import Final

from marshal_dagster.timeline.model import Lane

_MOST_LETTERS, _LAST_LETTERS = 40, 16
"""How long the name of a lane may be, and how much of its end is kept."""
_FORMULA: Final = re.compile(r"[$\\](?=[$(\[])")


def lane_names(lanes: Sequence[Lane]) -> list[str]:
    """Return the names of lanes, with the group if there are several."""
    groups = {lane.group for lane in lanes}
    return [_lane_name(lane, with_group=len(groups) > 1) for lane in lanes]


def _lane_name(lane: Lane, *, with_group: bool) -> str:
    if lane.is_group:
        return drawable(f"group {lane.group}")
    place = f"{lane.topic}/{lane.partition}"
    return drawable(f"{lane.group}: {place}" if with_group else place)


def drawable(name: str) -> str:
    """Return a name as Bokeh draws it: not too long, and never as a formula, for which Bokeh would load a library."""
    if len(name) > _MOST_LETTERS:
        name = f"{name[: _MOST_LETTERS - _LAST_LETTERS]}…{name[-_LAST_LETTERS:]}"
    return _FORMULA.sub("\\g<0>\u200b", name)
