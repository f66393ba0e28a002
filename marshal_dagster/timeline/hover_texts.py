"""The texts that the page shows over bars, marks and pauses. The first line is the time, the second the sentence."""

from marshal_dagster._internal.texts import counted
from marshal_dagster.admin.texts import duration, short_instance, utc
from marshal_dagster.timeline.model import Bar, Mark, Pause, Span, Timeline
from marshal_dagster.timeline.palette import BARS, PAUSES


def hover_texts(timeline: Timeline) -> dict[str, list[str]]:
    """Return the texts that a reader sees over each bar, mark and pause, in the order of their columns."""
    shown = {kind.value: [_mark_text(mark) for mark in timeline.marks_of(kind)] for kind in timeline.kinds}
    shown[BARS] = [_bar_text(bar, timeline.span) for bar in timeline.bars]
    shown[PAUSES] = [_pause_text(pause) for pause in timeline.pauses]
    return shown


def _mark_text(mark: Mark) -> str:
    return f"{utc(mark.at_ms)}\n{mark.sentence}"


def _bar_text(bar: Bar, span: Span) -> str:
    held = bar.held(span)
    lasted = duration(held.end_ms - held.start_ms)
    how = "still held at the end of the picture" if bar.ended_by is None else str(bar.ended_by)
    heir = "" if bar.heir is None else f" Continued by {short_instance(bar.heir.owner.instance)}."
    offsets = "" if bar.range_start is None else f"\nOffsets {bar.range_start} to {bar.range_end}"
    beats = f"{counted(bar.heartbeats, 'heartbeat')}, the last at {utc(bar.last_beat_ms)}"
    times = f"{utc(bar.start_ms)} to {utc(held.end_ms)} ({lasted})"
    stale = [f"Stale from {utc(each.start_ms)} for {duration(each.end_ms - each.start_ms)}" for each in bar.stale]
    return "\n".join([times, bar.sentence, f"Then: {how}.{heir}{offsets}", beats, *stale])


def _pause_text(pause: Pause) -> str:
    span = pause.span
    return f"{utc(span.start_ms)} to {utc(span.end_ms)}\nGroup {pause.group} is paused."
