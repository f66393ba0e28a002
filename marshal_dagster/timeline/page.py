"""Draw a timeline as one HTML page that needs no network. Bokeh draws the lanes; `page.js` adds search and hover.

Text from a log is untrusted. It reaches the page as JSON without `<`, and is shown as text.
"""

import base64
import html
import json
import zlib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, Final

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.texts import counted, first_few
from marshal_dagster.admin.texts import duration, utc, without_suffix
from marshal_dagster.coordination.claims import is_operator
from marshal_dagster.timeline.figure import MOST_LANES, draw, figure_json, library
from marshal_dagster.timeline.hover_texts import hover_texts
from marshal_dagster.timeline.lane_names import lane_names
from marshal_dagster.timeline.members import Members
from marshal_dagster.timeline.model import Lane, Timeline
from marshal_dagster.timeline.palette import LINKS, RUNS, SHAPES, WHITE, Shape

_LANE_PX: Final = 60
"""The largest height of a lane whose claims are in few rows."""
_ROW_PX: Final = 22
"""The largest height of a row."""
_AXES_PX: Final = 100
_MOST_GROUPS: Final = 3


def render_page(timeline: Timeline, *, empty: str) -> str:
    """Return the page.

    Args:
        timeline: What it shows.
        empty: The sentence that is shown if there is nothing to draw.

    Raises:
        ConfigurationError: The extra `timeline` is not installed.
    """
    require_extra(Extra.TIMELINE, "the timeline")
    parts = {
        "TITLE": html.escape(_title(timeline.lanes)),
        "SUBTITLE": html.escape(_subtitle(timeline)),
        "STYLE": _part("page.css"),
        "NOTES": _notes(timeline),
    }
    if timeline.is_empty:
        content = f'<main class="empty"><p>{html.escape(empty)}</p></main>'
        return _filled(_part("frame.html"), parts | {"LIBRARY": "", "SEARCH": "", "CONTENT": content})
    drawn = {"LIBRARY": library(), "SEARCH": _part("search.html"), "CONTENT": _picture(timeline)}
    return _filled(_part("frame.html"), parts | drawn)


def _picture(timeline: Timeline) -> str:
    """Return the legend, the lanes, and the data and the script that belong to them."""
    members = Members(timeline)
    texts = json.dumps(hover_texts(timeline)).encode()
    return _filled(
        _part("picture.html"),
        {
            "LEGEND": _legend(timeline),
            "HEIGHT": str(_AXES_PX + max(_LANE_PX, _ROW_PX * timeline.most_rows) * len(timeline.lanes)),
            "FIGURE": _json(figure_json(draw(timeline, members), "plot")),
            "DATA": _json(_script_data(timeline, members)),
            "TEXTS": base64.b64encode(zlib.compress(texts, 9)).decode(),
            "SCRIPT": _part("page.js"),
        },
    )


def _title(lanes: Iterable[Lane]) -> str:
    groups = sorted({lane.group for lane in lanes})
    if not groups:
        return "Nothing to show"
    return f"{'Group' if len(groups) == 1 else 'Groups'} {first_few(groups, _MOST_GROUPS)}"


def _subtitle(timeline: Timeline) -> str:
    span, partitions = timeline.span, sum(not lane.is_group for lane in timeline.lanes)
    if not timeline.records:
        return "No records"
    parts = [
        f"{_seconds(span.start_ms)} to {_seconds(span.end_ms)} UTC ({duration(span.end_ms - span.start_ms)})",
        counted(partitions, "partition"),
        f"{counted(len(timeline.bars), 'claim')} by {counted(_runs(timeline), 'run')}",
        counted(timeline.records, "record") + " read",
    ]
    return " · ".join(parts)


def _runs(timeline: Timeline) -> int:
    instances = (bar.owner.instance for bar in timeline.bars)
    return len({without_suffix(instance) for instance in instances if not is_operator(instance)})


def _seconds(at_ms: int) -> str:
    return utc(at_ms // 1_000 * 1_000).removesuffix(".000Z")


def _notes(timeline: Timeline) -> str:
    notes = list(timeline.notes)
    if timeline.invalid:
        are = "record is" if timeline.invalid == 1 else "records are"
        notes.append(f"{timeline.invalid:,} {are} invalid and belong to no lane.")
    runs = _runs(timeline)
    if runs > len(RUNS):
        notes.append(f"{runs:,} runs share {len(RUNS)} colours. Click a bar to dim those of other runs.")
    if len(timeline.lanes) > MOST_LANES:
        notes.append(
            f"The page begins with {MOST_LANES} of {len(timeline.lanes):,} lanes. Drag it up to see the others."
        )
    return "".join(f"<p>{html.escape(note)}</p>" for note in notes)


def _legend(timeline: Timeline) -> str:
    return "".join(_legend_entry(kind.value, SHAPES[kind]) for kind in timeline.kinds)


def _legend_entry(name: str, shape: Shape) -> str:
    fill = "none" if shape.marker == "x" else shape.fill
    line = shape.fill if shape.line == WHITE else shape.line
    width = 2 if shape.marker == "x" else 1.2
    icon = (
        f'<svg viewBox="-6 -6 12 12" aria-hidden="true"><path d="{shape.path}" fill="{fill}" stroke="{line}" '
        f'stroke-width="{width}"/></svg>'
    )
    return f'<button type="button" data-kind="{name}" aria-pressed="true">{icon}{shape.label}</button>'


def _script_data(timeline: Timeline, members: Members) -> dict[str, Any]:
    """Return what the page's script needs besides the figure."""
    return {
        "members": members.as_json(),
        "lanes": lane_names(timeline.lanes),
        "kinds": [kind.value for kind in timeline.kinds],
        "links": [LINKS] if timeline.links else [],
        "routine": [kind.value for kind in timeline.kinds if SHAPES[kind].is_routine],
    }


def _json(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a value as JSON that cannot end the script element in which it is."""
    return json.dumps(value).replace("<", "\\u003c")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Replace each `@@NAME@@` of a template. What is filled in is not searched again."""
    pieces = template.split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))
