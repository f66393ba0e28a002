"""Draw a timeline as one HTML page that needs no network. Bokeh draws the lanes; `page.js` adds search and hover.

Text from a log is untrusted. It reaches the page as JSON without `<`, and is shown as text.
"""

import base64
import html
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.texts import first_few
from marshal_dagster.admin.texts import duration, is_operator, short_instance, utc
from marshal_dagster.timeline.model import Bar, Lane, Mark, MarkKind, Pause, Span, Timeline
from marshal_dagster.timeline.palette import INK, OPERATOR, PAUSE, RUNS, SHAPES, STALE, WHITE, Shape

if TYPE_CHECKING:
    from bokeh.models import ColumnDataSource
    from bokeh.models.renderers import DataRenderer
    from bokeh.plotting import figure as Figure  # noqa: N812 - a class

BARS, STALENESS, PAUSES, LABELS = "bars", "stale", "pauses", "labels"
"""The names of the renderers, and of their texts in the page, beside those of the kinds of marks."""
_BAR_PART: Final = 0.74
"""The part of a lane's height that its bars take."""
_MOST_LANES: Final = 300
"""How many lanes the page shows at first; one can drag to the others."""
_MARK_PX: Final = 10
_LANE_PX: Final = 60
"""The largest height of a lane."""
_AXES_PX: Final = 70
_LEAST_SPAN_MS: Final = 60_000
_MOST_GROUPS: Final = 3
_Place = tuple[float, float]
"""The top and the bottom of what is drawn."""
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


def render_page(timeline: Timeline, *, empty: str) -> str:
    """Return the page.

    Args:
        timeline: What it shows.
        empty: The sentence that is shown if there is nothing to draw.

    Raises:
        ConfigurationError: the extra `timeline` is not installed.
    """
    require_extra(Extra.TIMELINE, "the timeline")
    title = _title(timeline.lanes)
    parts = {
        "TITLE": html.escape(title),
        "SUBTITLE": html.escape(_subtitle(timeline)),
        "STYLE": _part("page.css"),
        "NOTES": _notes(timeline),
    }
    if timeline.is_empty:
        return _filled(_part("empty.html"), parts | {"EMPTY": html.escape(empty)})
    members = _Members(timeline)
    figure = _figure(timeline, members)
    texts = _texts(timeline)
    return _filled(
        _part("page.html"),
        parts
        | {
            "LEGEND": _legend(timeline),
            "HEIGHT": str(_AXES_PX + _LANE_PX * len(timeline.lanes)),
            "LIBRARY": _library(),
            "FIGURE": _figure_json(figure),
            "DATA": _json(members.as_json(timeline)),
            "TEXTS": base64.b64encode(zlib.compress(json.dumps(texts).encode(), 9)).decode(),
            "SCRIPT": _part("page.js"),
        },
    )


class _Members:
    """The members that hold or send something: each has a number, a name and a fill."""

    def __init__(self, timeline: Timeline) -> None:
        senders = [*(bar.owner.instance for bar in timeline.bars), *(mark.instance for mark in timeline.marks)]
        self._numbers = {instance: number for number, instance in enumerate(dict.fromkeys(senders))}
        runs = dict.fromkeys(_run_name(each) for each in self._numbers if not is_operator(each))
        self._fills = {run: RUNS[number % len(RUNS)] for number, run in enumerate(runs)}

    def number(self, instance: str) -> int:
        """Return the number of a member."""
        return self._numbers[instance]

    def fill(self, instance: str) -> str:
        """Return the fill of a member's bars. All members of one run have the same."""
        return OPERATOR if is_operator(instance) else self._fills[_run_name(instance)]

    def as_json(self, timeline: Timeline) -> dict[str, Any]:
        """Return what the page's script needs besides the figure."""
        clients = {bar.owner.instance: bar.owner.client for bar in timeline.bars}
        return {
            "members": [
                {
                    "id": instance,
                    "short": short_instance(instance).removeprefix("run "),
                    "client": clients.get(instance, ""),
                }
                for instance in self._numbers
            ],
            "lanes": _lane_names(timeline.lanes),
            "kinds": [kind.value for kind in SHAPES],
            "routine": [kind.value for kind, shape in SHAPES.items() if shape.is_routine],
            "span": list(_shown(timeline.span)),
        }


def _run_name(instance: str) -> str:
    """Return the text before the last dot, which is the run's id in the instances of one run."""
    return instance.rpartition(".")[0] or instance


def _figure(timeline: Timeline, members: _Members) -> "Figure":
    from bokeh.models import BoxZoomTool, CustomJS, HoverTool, PanTool, Range1d, ResetTool, SaveTool, WheelZoomTool
    from bokeh.plotting import figure

    start_ms, end_ms = _shown(timeline.span)
    lanes = len(timeline.lanes)
    least_ms = max(10.0, (end_ms - start_ms) / 1e6)
    bounds = (start_ms - (end_ms - start_ms) / 20, end_ms + (end_ms - start_ms) / 20)
    wheel = WheelZoomTool(dimensions="width")
    plot = figure(
        x_axis_type="datetime",
        x_range=Range1d(start=start_ms, end=end_ms, bounds=bounds, min_interval=least_ms),
        y_range=Range1d(start=min(lanes, _MOST_LANES) - 0.5, end=-0.5, bounds=(-0.5, lanes - 0.5), min_interval=1),
        tools=[PanTool(), wheel, BoxZoomTool(), ResetTool(), SaveTool(filename="timeline")],
        active_scroll=wheel,
        sizing_mode="stretch_both",
        output_backend="webgl",
        lod_threshold=None,
        outline_line_color=None,
        toolbar_location="right",
        name="plot",
    )
    plot.toolbar.logo = None
    _set_axes(plot, timeline.lanes)
    rows = _Rows(timeline)
    shown = [_draw_pauses(plot, timeline, rows), _draw_bars(plot, timeline, members, rows)]
    _draw_stale(plot, timeline, members, rows)
    _draw_labels(plot)
    shown += [_draw_marks(plot, kind, timeline, members, rows) for kind in SHAPES]
    hover = CustomJS(code="window.marshalTimeline?.hover(cb_data)")
    plot.add_tools(HoverTool(renderers=shown, tooltips=None, callback=hover))
    return plot


def _set_axes(plot: "Figure", lanes: Sequence[Lane]) -> None:
    from bokeh.models import AdaptiveTicker, CustomJSTickFormatter, DatetimeTickFormatter

    plot.yaxis.ticker = AdaptiveTicker(min_interval=1, mantissas=[1, 2, 5], desired_num_ticks=min(len(lanes), 45))
    plot.yaxis.formatter = CustomJSTickFormatter(args={"lanes": _lane_names(lanes)}, code="return lanes[tick] ?? ''")
    plot.xaxis.formatter = DatetimeTickFormatter(
        milliseconds="%H:%M:%S.%3N",
        seconds="%H:%M:%S",
        minsec="%H:%M:%S",
        minutes="%H:%M",
        hourmin="%H:%M",
        hours="%H:%M",
        days="%d %b",
        months="%b %Y",
        years="%Y",
        context="%d %b %Y",
        context_which="start",
        hide_repeats=True,
    )
    plot.xaxis.axis_label = "Log time (UTC)"
    for axis in (plot.xaxis, plot.yaxis):
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "13px"
        axis.major_label_text_font = axis.axis_label_text_font = _FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_line_color = axis.minor_tick_line_color = None
        axis.major_tick_line_color = "#afb8c1"
    plot.xgrid.grid_line_color = "#e4e8ec"
    plot.ygrid.grid_line_color = None


class _Rows:
    """Where each lane, and each row of it, is on the page's y axis: lane n is from n - 0.5 to n + 0.5."""

    def __init__(self, timeline: Timeline) -> None:
        self._numbers = {lane: number for number, lane in enumerate(timeline.lanes)}
        self._rows = timeline.rows

    def of_lane(self, lane: Lane) -> int:
        """Return the number of a lane."""
        return self._numbers[lane]

    def of_bar(self, bar: Bar) -> _Place:
        """Return the top and the bottom of a bar."""
        height = _BAR_PART / self._rows.get(bar.lane, 1)
        top = self._numbers[bar.lane] - _BAR_PART / 2 + bar.row * height
        return top, top + height

    def of_topic(self, group: str, topic: str) -> _Place:
        """Return the top and the bottom of the lanes of a topic, which are adjacent."""
        found = [number for lane, number in self._numbers.items() if (lane.group, lane.topic) == (group, topic)]
        return min(found) - 0.5, max(found) + 0.5


def _draw_pauses(plot: "Figure", timeline: Timeline, rows: _Rows) -> "DataRenderer":
    places = [rows.of_topic(pause.group, pause.topic) for pause in timeline.pauses]
    spans = [pause.span for pause in timeline.pauses]
    return _draw_rectangles(
        plot,
        source=_rectangles(spans, places, [-1] * len(spans)),
        fill_color=PAUSE,
        fill_alpha=0.22,
        line_color=PAUSE,
        line_alpha=0.6,
        level="underlay",
        name=PAUSES,
    )


def _draw_rectangles(plot: "Figure", source: "ColumnDataSource", **style: Any) -> "DataRenderer":  # noqa: ANN401 - Bokeh's own
    return plot.quad(left="left", right="right", top="top", bottom="bottom", source=source, **style)


def _rectangles(
    spans: Sequence[Span], places: Sequence[tuple[float, float]], members: Sequence[int]
) -> "ColumnDataSource":
    import numpy as np
    from bokeh.models import ColumnDataSource

    return ColumnDataSource(
        {
            "left": np.array([span.start_ms for span in spans], dtype="float64"),
            "right": np.array([span.end_ms for span in spans], dtype="float64"),
            "top": np.array([top for top, _ in places], dtype="float32"),
            "bottom": np.array([bottom for _, bottom in places], dtype="float32"),
            "member": np.array(members, dtype="int32"),
            "alpha": np.ones(len(spans), dtype="float32"),
        }
    )


def _draw_bars(plot: "Figure", timeline: Timeline, members: _Members, rows: _Rows) -> "DataRenderer":
    import numpy as np

    spans = [_held(bar, timeline.span) for bar in timeline.bars]
    source = _rectangles(spans, *_places(timeline.bars, members, rows))
    fills = [int(members.fill(bar.owner.instance)[1:], 16) << 8 | 0xFF for bar in timeline.bars]
    source.data["fill"] = np.array(fills, dtype="uint32")
    return _draw_rectangles(
        plot, source=source, fill_color="fill", fill_alpha="alpha", line_color="fill", line_alpha="alpha", name=BARS
    )


def _draw_stale(plot: "Figure", timeline: Timeline, members: _Members, rows: _Rows) -> None:
    pairs = [(bar, span) for bar in timeline.bars for span in bar.stale]
    _draw_rectangles(
        plot,
        source=_rectangles([span for _, span in pairs], *_places([bar for bar, _ in pairs], members, rows)),
        fill_color=STALE,
        fill_alpha=0.18,
        line_color=None,
        hatch_pattern="right_diagonal_line",
        hatch_color=STALE,
        hatch_alpha="alpha",
        hatch_scale=9,
        hatch_weight=1.2,
        name=STALENESS,
    )


def _places(bars: Sequence[Bar], members: _Members, rows: _Rows) -> tuple[list[_Place], list[int]]:
    return [rows.of_bar(bar) for bar in bars], [members.number(bar.owner.instance) for bar in bars]


def _held(bar: Bar, span: Span) -> Span:
    return Span(bar.start_ms, span.end_ms if bar.end_ms is None else bar.end_ms)


def _draw_marks(plot: "Figure", kind: MarkKind, timeline: Timeline, members: _Members, rows: _Rows) -> "DataRenderer":
    import numpy as np
    from bokeh.models import ColumnDataSource

    marks, shape = _marks_of(kind, timeline), SHAPES[kind]
    source = ColumnDataSource(
        {
            "x": np.array([mark.at_ms for mark in marks], dtype="float64"),
            "y": np.array([rows.of_lane(mark.lane) for mark in marks], dtype="float32"),
            "member": np.array([members.number(mark.instance) for mark in marks], dtype="int32"),
            "alpha": np.ones(len(marks), dtype="float32"),
        }
    )
    return plot.scatter(
        "x",
        "y",
        source=source,
        marker=shape.marker,
        size=_MARK_PX,
        fill_color=shape.fill,
        fill_alpha="alpha",
        line_color=shape.line,
        line_alpha="alpha",
        line_width=2 if kind is MarkKind.REFUSAL else 1.2,
        level="overlay",
        name=kind.value,
    )


def _marks_of(kind: MarkKind, timeline: Timeline) -> list[Mark]:
    return [mark for mark in timeline.marks if mark.kind is kind]


def _draw_labels(plot: "Figure") -> None:
    """Draw the run ids on the bars. The page's script fills in those that there is room for."""
    from bokeh.models import ColumnDataSource

    plot.text(
        "x",
        "y",
        "text",
        source=ColumnDataSource({"x": [], "y": [], "text": []}),
        text_color=INK,
        text_font={"value": _FONT},
        text_font_size="12px",
        text_baseline="middle",
        x_offset=6,
        name=LABELS,
    )


def _texts(timeline: Timeline) -> dict[str, list[str]]:
    """Return the texts that a reader sees over each bar, mark and pause, in the order of their columns."""
    shown = {kind.value: [_mark_text(mark) for mark in _marks_of(kind, timeline)] for kind in SHAPES}
    shown[BARS] = [_bar_text(bar, timeline.span) for bar in timeline.bars]
    shown[PAUSES] = [_pause_text(pause) for pause in timeline.pauses]
    return shown


def _mark_text(mark: Mark) -> str:
    return f"{utc(mark.at_ms)}\n{mark.sentence}"


def _bar_text(bar: Bar, span: Span) -> str:
    held = _held(bar, span)
    lasted = duration(held.end_ms - held.start_ms)
    how = "still held at the end of the picture" if bar.ended_by is None else str(bar.ended_by)
    offsets = "" if bar.range_start is None else f"\nOffsets {bar.range_start} to {bar.range_end}"
    beats = f"{_count(bar.heartbeats, 'heartbeat')}, the last at {utc(bar.last_beat_ms)}"
    times = f"{utc(bar.start_ms)} to {utc(held.end_ms)} ({lasted})"
    stale = [f"Stale from {utc(each.start_ms)} for {duration(each.end_ms - each.start_ms)}" for each in bar.stale]
    return "\n".join([times, bar.sentence, f"Then: {how}.{offsets}", beats, *stale])


def _pause_text(pause: Pause) -> str:
    span = pause.span
    return f"{utc(span.start_ms)} to {utc(span.end_ms)}\nGroup {pause.group} is paused."


def _lane_names(lanes: Sequence[Lane]) -> list[str]:
    """Return the names of lanes, with the group if there are several."""
    groups = {lane.group for lane in lanes}
    return [_lane_name(lane, with_group=len(groups) > 1) for lane in lanes]


def _lane_name(lane: Lane, *, with_group: bool) -> str:
    if lane.is_group:
        return f"group {lane.group}"
    place = f"{lane.topic}/{lane.partition}"
    return f"{lane.group}: {place}" if with_group else place


def _shown(span: Span) -> Span:
    """Return the time that the page shows at first: at least a minute, and a margin."""
    missing_ms = max(0, _LEAST_SPAN_MS - (span.end_ms - span.start_ms)) // 2
    margin_ms = max(1, (span.end_ms - span.start_ms + 2 * missing_ms) // 100)
    return Span(span.start_ms - missing_ms - margin_ms, span.end_ms + missing_ms + margin_ms)


def _title(lanes: Iterable[Lane]) -> str:
    groups = sorted({lane.group for lane in lanes})
    if not groups:
        return "Nothing to show"
    return f"{'Group' if len(groups) == 1 else 'Groups'} {first_few(groups, _MOST_GROUPS)}"


def _subtitle(timeline: Timeline) -> str:
    span, partitions = timeline.span, sum(not lane.is_group for lane in timeline.lanes)
    if not timeline.records:
        return "No records"
    runs = {_run_name(bar.owner.instance) for bar in timeline.bars if not is_operator(bar.owner.instance)}
    parts = [
        f"{_seconds(span.start_ms)} to {_seconds(span.end_ms)} UTC ({duration(span.end_ms - span.start_ms)})",
        _count(partitions, "partition"),
        f"{_count(len(timeline.bars), 'claim')} by {_count(len(runs), 'run')}",
        _count(timeline.records, "record") + " read",
    ]
    return " · ".join(parts)


def _seconds(at_ms: int) -> str:
    return utc(at_ms // 1_000 * 1_000).removesuffix(".000Z")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _notes(timeline: Timeline) -> str:
    notes = list(timeline.notes)
    if timeline.invalid:
        are = "record is" if timeline.invalid == 1 else "records are"
        notes.append(f"{timeline.invalid:,} {are} invalid and belong to no lane.")
    if len(timeline.lanes) > _MOST_LANES:
        notes.append(
            f"The page begins with {_MOST_LANES} of {len(timeline.lanes):,} lanes. Drag it up to see the others."
        )
    return "".join(f"<p>{html.escape(note)}</p>" for note in notes)


def _legend(timeline: Timeline) -> str:
    present = {mark.kind for mark in timeline.marks}
    kinds = [(kind.value, shape) for kind, shape in SHAPES.items() if kind in present]
    return "".join(_legend_entry(name, shape) for name, shape in kinds)


def _legend_entry(name: str, shape: Shape) -> str:
    fill = "none" if shape.marker == "x" else shape.fill
    line = shape.fill if shape.line == WHITE else shape.line
    width = 2 if shape.marker == "x" else 1.2
    icon = (
        f'<svg viewBox="-6 -6 12 12" aria-hidden="true"><path d="{shape.path}" fill="{fill}" stroke="{line}" '
        f'stroke-width="{width}"/></svg>'
    )
    return f'<button type="button" data-kind="{name}" aria-pressed="true">{icon}{shape.label}</button>'


def _library() -> str:
    """Return Bokeh's own scripts, as the page contains them."""
    from bokeh.resources import Resources

    return Resources(mode="inline", components=["bokeh", "bokeh-gl"]).render_js()


def _figure_json(plot: "Figure") -> str:
    from bokeh.core.types import ID
    from bokeh.embed import json_item

    return _json(json_item(plot, ID("plot")))


def _json(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a value as JSON that cannot end the script element in which it is."""
    return json.dumps(value).replace("<", "\\u003c")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Replace each `@@NAME@@` of a template. What is filled in is not searched again."""
    pieces = template.split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))
