"""Draw a timeline with Bokeh. Pauses, bars, stale times, run ids and each kind of mark have a renderer and columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.timeline.lane_names import lane_names
from marshal_dagster.timeline.members import Members
from marshal_dagster.timeline.model import Bar, Lane, MarkKind, Span, Timeline
from marshal_dagster.timeline.palette import BARS, INK, LABELS, LINKS, PAUSE, PAUSES, SHAPES, STALE, STALENESS

if TYPE_CHECKING:
    from bokeh.models import ColumnDataSource
    from bokeh.models.renderers import DataRenderer
    from bokeh.plotting import figure as Figure  # noqa: N812 - a class

MOST_LANES: Final = 300
"""How many lanes the page shows at first; one can drag to the others."""
_MOST_LARGE_NAMES: Final = 40
"""With more lanes their names are smaller, because they would cover each other on a screen of usual height."""
_BAR_PART: Final = 0.74
"""The part of a lane's height that its bars take."""
_OUTLINED_PART: Final = 500
"""Bars that are shorter than this part of the picture have an outline, without which they could be invisible."""
_MARK_PX: Final = 10
_LEAST_SPAN_MS: Final = 60_000
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_Place = tuple[float, float]
"""The top and the bottom of what is drawn."""


def draw(timeline: Timeline, members: Members) -> "Figure":
    """Return the figure of a timeline that is not empty."""
    from bokeh.models import BoxZoomTool, CustomJS, HoverTool, PanTool, Range1d, ResetTool, SaveTool, WheelZoomTool
    from bokeh.plotting import figure

    start_ms, end_ms = _shown(timeline.span)
    rows = _Rows(timeline)
    top, bottom = rows.first - 0.5, rows.end - 0.5
    least_ms = max(10.0, (end_ms - start_ms) / 1e6)
    lanes = Range1d(
        start=min(bottom, top + MOST_LANES), end=top, bounds=(top, bottom), min_interval=1 / timeline.most_rows
    )
    bounds = (start_ms - (end_ms - start_ms) / 20, end_ms + (end_ms - start_ms) / 20)
    wheel = WheelZoomTool(dimensions="width")
    plot = figure(
        x_axis_type="datetime",
        x_range=Range1d(start=start_ms, end=end_ms, bounds=bounds, min_interval=least_ms),
        y_range=lanes,
        tools=[PanTool(), wheel, BoxZoomTool(), ResetTool(), SaveTool(filename="timeline")],
        active_scroll=wheel,
        sizing_mode="stretch_both",
        output_backend="webgl",
        lod_threshold=None,
        outline_line_color=None,
        toolbar_location="above",
        name="plot",
    )
    plot.toolbar.logo = None
    _set_axes(plot, timeline.lanes, rows)
    shown = [_draw_pauses(plot, timeline, rows)] if timeline.pauses else []
    shown.append(_draw_bars(plot, timeline, members, rows))
    _draw_stale(plot, timeline, members, rows)
    _draw_links(plot, timeline, members, rows)
    _draw_labels(plot)
    shown += [_draw_marks(plot, kind, timeline, members, rows) for kind in timeline.kinds]
    hover = CustomJS(code="window.marshalTimeline?.hover(cb_data)")
    plot.add_tools(HoverTool(renderers=shown, tooltips=None, callback=hover))
    return plot


def figure_json(plot: "Figure", element: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return a figure as the JSON that `Bokeh.embed.embed_item` puts into an element of the page."""
    from bokeh.core.types import ID
    from bokeh.embed import json_item

    return json_item(plot, ID(element))


def library() -> str:
    """Return Bokeh's own scripts, as the page contains them."""
    from bokeh.resources import Resources

    return Resources(mode="inline", components=["bokeh", "bokeh-gl"]).render_js()


class _Rows:
    """Where each lane, and each row of it, is on the page's y axis: lane n is from n - 0.5 to n + 0.5.

    The first partition is lane 0, so that the axis shows round numbers. The lane of a group before it is lane -1.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.first = -1 if timeline.lanes[0].is_group else 0
        self.end = self.first + len(timeline.lanes)
        self._numbers = {lane: number for number, lane in enumerate(timeline.lanes, self.first)}
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


def _set_axes(plot: "Figure", lanes: Sequence[Lane], rows: _Rows) -> None:
    from bokeh.models import AdaptiveTicker, CustomJSTickFormatter, DatetimeTickFormatter

    plot.yaxis.ticker = AdaptiveTicker(min_interval=1, mantissas=[1, 2, 5], desired_num_ticks=min(len(lanes), 45))
    plot.yaxis.formatter = CustomJSTickFormatter(
        args={"lanes": lane_names(lanes), "first": rows.first}, code="return lanes[tick - first] ?? ''"
    )
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
    if len(lanes) > _MOST_LARGE_NAMES:
        plot.yaxis.major_label_text_font_size = "10px"
    plot.xgrid.grid_line_color = "#e4e8ec"
    plot.ygrid.grid_line_color = None


def _draw_pauses(plot: "Figure", timeline: Timeline, rows: _Rows) -> "DataRenderer":
    places = [rows.of_topic(pause.group, pause.topic) for pause in timeline.pauses]
    spans = [pause.span for pause in timeline.pauses]
    return _draw_rectangles(
        plot,
        source=_rectangles(spans, places, [-1] * len(spans)),
        fill_color=PAUSE,
        fill_alpha=0.25,
        line_color=None,
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
        }
    )


def _draw_bars(plot: "Figure", timeline: Timeline, members: Members, rows: _Rows) -> "DataRenderer":
    import numpy as np

    spans = [bar.held(timeline.span) for bar in timeline.bars]
    source = _rectangles(spans, *_places(timeline.bars, members, rows))
    fills = [int(members.fill(bar.owner.instance)[1:], 16) << 8 | 0xFF for bar in timeline.bars]
    least_ms = (timeline.span.end_ms - timeline.span.start_ms) / _OUTLINED_PART
    source.data["fill"] = np.array(fills, dtype="uint32")
    source.data["alpha"] = np.ones(len(spans), dtype="float32")
    source.data["outline"] = np.array([span.end_ms - span.start_ms < least_ms for span in spans], dtype="float32")
    return _draw_rectangles(
        plot, source=source, fill_color="fill", fill_alpha="alpha", line_color="fill", line_alpha="outline", name=BARS
    )


def _draw_stale(plot: "Figure", timeline: Timeline, members: Members, rows: _Rows) -> None:
    pairs = [(bar, span) for bar in timeline.bars for span in bar.stale]
    _draw_rectangles(
        plot,
        source=_rectangles([span for _, span in pairs], *_places([bar for bar, _ in pairs], members, rows)),
        fill_color=STALE,
        fill_alpha=0.1,
        line_color=None,
        hatch_pattern="right_diagonal_line",
        hatch_color=STALE,
        hatch_scale=9,
        hatch_weight=1,
        name=STALENESS,
    )


def _draw_links(plot: "Figure", timeline: Timeline, members: Members, rows: _Rows) -> None:
    """Draw a line from the end of each lost claim to the claim that continued it in another row."""
    import numpy as np
    from bokeh.models import ColumnDataSource

    pairs = timeline.links
    if not pairs:
        return
    middles = [(sum(rows.of_bar(bar)) / 2, sum(rows.of_bar(heir)) / 2) for bar, heir in pairs]
    source = ColumnDataSource(
        {
            "x0": np.array([bar.end_ms for bar, _ in pairs], dtype="float64"),
            "y0": np.array([start for start, _ in middles], dtype="float32"),
            "x1": np.array([heir.start_ms for _, heir in pairs], dtype="float64"),
            "y1": np.array([end for _, end in middles], dtype="float32"),
            "member": np.array([members.number(heir.owner.instance) for _, heir in pairs], dtype="int32"),
            "alpha": np.ones(len(pairs), dtype="float32"),
        }
    )
    plot.segment(source=source, line_color=INK, line_alpha="alpha", line_width=1.5, name=LINKS)


def _places(bars: Sequence[Bar], members: Members, rows: _Rows) -> tuple[list[_Place], list[int]]:
    return [rows.of_bar(bar) for bar in bars], [members.number(bar.owner.instance) for bar in bars]


def _draw_marks(plot: "Figure", kind: MarkKind, timeline: Timeline, members: Members, rows: _Rows) -> "DataRenderer":
    import numpy as np
    from bokeh.models import ColumnDataSource

    marks, shape = timeline.marks_of(kind), SHAPES[kind]
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
        visible=not shape.is_routine,  # the page's script shows them where there is room
        name=kind.value,
    )


def _draw_labels(plot: "Figure") -> None:
    """Draw the run ids on the bars. The page's script fills in those that there is room for."""
    from bokeh.models import ColumnDataSource

    plot.text(
        "x",
        "y",
        "text",
        source=ColumnDataSource({"x": [], "y": [], "text": [], "right": [], "down": []}),
        text_color=INK,
        text_font={"value": _FONT},
        text_font_size="12px",
        text_baseline="middle",
        x_offset="right",
        y_offset="down",
        name=LABELS,
    )


def _shown(span: Span) -> Span:
    """Return the time that the page shows at first: at least a minute, and a margin."""
    missing_ms = max(0, _LEAST_SPAN_MS - (span.end_ms - span.start_ms)) // 2
    margin_ms = max(1, (span.end_ms - span.start_ms + 2 * missing_ms) // 100)
    return Span(span.start_ms - missing_ms - margin_ms, span.end_ms + missing_ms + margin_ms)
