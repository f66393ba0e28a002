"""The names, colours and shapes of what the page draws. They differ for any colour vision, and text on them is dark."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from marshal_dagster.timeline.model import MarkKind

BARS, STALENESS, PAUSES, LABELS, LINKS = "bars", "stale", "pauses", "labels", "links"
"""The names of what is drawn, beside those of the kinds of marks."""
INK: Final = "#1b1f24"
RUNS: Final = ("#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#bbcc33", "#c9b3e6")
"""The fills of runs, in the order in which runs first claim; the ninth run has the first one again.

The first seven are of Paul Tol's scheme "light", which is made for dark text on fills.
"""
OPERATOR: Final = "#b6bdc5"
"""The fill of claims by operators' commands."""
STALE: Final = INK
PAUSE: Final = "#7d8590"


class Shape(NamedTuple):
    """How the marks of a kind look, and their legend."""

    marker: str
    """The name of Bokeh's marker."""
    fill: str
    line: str
    path: str
    """The same shape as a path of SVG, within -5 to 5."""
    label: str
    is_routine: bool = False
    """Whether every batch has such a mark, so that the page hides them where they would be too dense."""


WHITE: Final = "#ffffff"
SHAPES: Final[Mapping[MarkKind, Shape]] = {
    MarkKind.PLAN: Shape("triangle", WHITE, INK, "M0 -4L4.6 4H-4.6Z", "plan", is_routine=True),
    MarkKind.COMMIT: Shape("circle", INK, WHITE, "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "commit", is_routine=True),
    MarkKind.REFUSAL: Shape("x", "#b3261e", "#b3261e", "M-4 -4L4 4M4 -4L-4 4", "refused"),
    MarkKind.TAKEOVER: Shape("diamond", "#882255", WHITE, "M0 -5L4 0L0 5L-4 0Z", "takeover"),
    MarkKind.REVOCATION: Shape("square_x", WHITE, "#b3261e", "M-4 -4H4V4H-4ZM-4 -4L4 4M4 -4L-4 4", "revoked"),
    MarkKind.POSITION: Shape("inverted_triangle", "#0b5cad", WHITE, "M0 4L4.6 -4H-4.6Z", "position set"),
    MarkKind.PAUSE: Shape("square", INK, WHITE, "M-4 -4H4V4H-4Z", "pause or resume"),
    MarkKind.SETTINGS: Shape("hex", WHITE, INK, "M4.5 0L2.3 4H-2.3L-4.5 0L-2.3 -4H2.3Z", "settings"),
}
