"""The page of a timeline: it needs no network, shows text of a log as text, and stays small."""

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

import pytest

from marshal_dagster.protocol.state import Owner
from marshal_dagster.protocol.world import World
from marshal_dagster.timeline.builder import TimelineBuilder, Wanted
from marshal_dagster.timeline.figure import draw
from marshal_dagster.timeline.members import Members
from marshal_dagster.timeline.model import Bar, BarEnd, Lane, Span, Timeline
from marshal_dagster.timeline.page import render_page
from marshal_dagster.timeline.palette import BARS, PAUSES, RUNS
from tests.fast.test_timeline_builder import BEAT, CLAIM, PLAN, RELEASE, T0, log, record, spelled, timeline

EMPTY = "The log has no records."
STORY = log(
    (1, f"{CLAIM} a"),
    (2, f"{BEAT} a 0"),
    (4, f"{PLAN} a 10"),
    (30, f"{CLAIM} b"),
    (31, f"{BEAT} b 10"),
    (32, f"{BEAT} a 10"),
    (33, f"ReleaseGroup p {T0 // 1_000 + 60}"),
    (34, f"{RELEASE} b 10"),
)


def script(page: str, name: str) -> str:
    """Return the content of one of the page's own script elements."""
    found = re.search(rf'<script type="[a-z/]+" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return found[1]


def texts(page: str) -> Mapping[str, list[str]]:
    """Return what the page shows when one points at a bar, a mark or a pause."""
    return dict(json.loads(zlib.decompress(base64.b64decode(script(page, "texts")))))


def columns(page: str) -> dict[str, dict[str, Any]]:
    """Return the columns of each renderer of the page."""
    found: dict[str, dict[str, Any]] = {}

    def walk(value: Any) -> None:  # noqa: ANN401 - any JSON
        if isinstance(value, list):
            for each in value:
                walk(each)
        elif isinstance(value, dict):
            if value.get("name") == "GlyphRenderer":
                attributes = value["attributes"]
                source = attributes["data_source"]["attributes"]["data"]["entries"]
                found[attributes["name"]] = dict(source)
            for each in value.values():
                walk(each)

    walk(json.loads(script(page, "figure")))
    return found


@pytest.fixture(scope="module")
def page() -> str:
    """The page of a crash, a takeover, a refused heartbeat and a pause."""
    return render_page(timeline(STORY), empty=EMPTY)


@pytest.mark.slow
def test_a_page_names_no_address_from_which_it_would_load_anything(page: str) -> None:
    """Scripts and styles are in the page itself."""
    loads = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)\s*=|@import|url\(\s*['"]?https?:""")
    own = re.sub(r"<script[^>]*>.*?</script>", "<script></script>", page, flags=re.DOTALL)
    assert loads.search(own) is None
    assert "<script src" not in page


@pytest.mark.slow
def test_a_page_is_small(page: str) -> None:
    """Nearly all of it is the library that draws."""
    assert len(page) < 2_000_000
    assert len(script(page, "figure")) + len(script(page, "texts")) < 60_000


def test_each_bar_mark_and_pause_has_its_text(page: str) -> None:
    """The texts are in the order of the columns, and only what is drawn has one."""
    shown = texts(page)
    assert {name: len(found) for name, found in shown.items()} == {
        "settings": 1,
        "position": 1,
        "plan": 1,
        "takeover": 1,
        "commit": 1,
        "refusal": 1,
        "pause": 1,
        BARS: 2,
        PAUSES: 2,
    }
    assert shown[BARS][0].splitlines()[2:] == [
        "Then: taken over by another claim. Continued by b.1.",
        f"1 heartbeat, the last at {iso(2)}",
        f"Stale from {iso(22)} for 8 s",
    ]
    assert "could not" in shown["refusal"][0]
    assert set(columns(page)) == set(shown) | {"stale", "labels"}


@pytest.mark.slow
def test_a_line_leads_from_a_lost_range_to_the_claim_that_continues_it() -> None:
    """Without such a range there is no line."""
    first, heir = bar_of("a.1", 0, 5, row=0), bar_of("b.1", 7, 9, row=1)
    first.heir = heir
    lanes, span = [first.lane], Span(T0, T0 + 9_000)
    found = Timeline(span, lanes, [first, heir], [], [], rows={first.lane: 2}, records=2)
    (line,) = [column for name, column in columns(render_page(found, empty=EMPTY)).items() if name == "links"]
    assert set(line) == {"x0", "y0", "x1", "y1", "member", "alpha"}
    first.heir = None
    assert "links" not in columns(render_page(found, empty=EMPTY))


def test_a_lane_with_many_rows_is_high_and_one_can_zoom_into_it() -> None:
    """A partition of many runs has a row for each claim at the same time."""
    bars = [bar_of(f"r{row}.1", 0, 5, row=row) for row in range(50)]
    found = Timeline(Span(T0, T0 + 9_000), [bars[0].lane], bars, [], [], rows={bars[0].lane: 50}, records=50)
    page = render_page(found, empty=EMPTY)
    assert "max-height: 1200px" in page
    assert '"min_interval": 0.02' in script(page, "figure")


def bar_of(instance: str, start_s: int, end_s: int, *, row: int) -> Bar:
    """Return the bar of a range."""
    lane, start_ms = Lane("g", "ev", 0), T0 + start_s * 1_000
    owner = Owner(instance, "client", start_s)
    bar = Bar(lane, owner, start_ms, start_s, start_ms, "a sentence", end_ms=T0 + end_s * 1_000, row=row)
    bar.ended_by, bar.range_start, bar.range_end = BarEnd.REVOKED, 0, 10
    return bar


def iso(second: int) -> str:
    """Return a time as the page shows it."""
    return f"2026-11-18 11:06:{40 + second}.000Z" if second < 20 else f"2026-11-18 11:07:{second - 20:02}.000Z"


def test_the_heading_has_the_group_and_the_time_in_utc(page: str) -> None:
    """The second line counts what is drawn."""
    assert "<h1>Group g</h1>" in page
    assert (
        "2026-11-18 11:06:40 to 2026-11-18 11:07:14 UTC (34 s) · 1 partition · 2 claims by 2 runs · 9 records" in page
    )


@pytest.mark.slow
def test_only_marks_that_the_picture_has_are_in_the_legend() -> None:
    """A picture without pauses explains none."""
    found = render_page(timeline(log((1, f"{CLAIM} a"), (2, f"{BEAT} a 0"))), empty=EMPTY)
    assert re.findall(r'data-kind="(\w+)"', found) == ["position", "settings"]


def test_names_from_a_log_cannot_become_part_of_the_page() -> None:
    """A member can choose its names; they reach the page as data, never as markup."""
    evil = "<img src=x onerror=alert(1)><\u2028script>"
    value = f"{CLAIM}/1/1/{evil}.1/{evil}/{evil}/ev/0"
    found = render_page(timeline([record(0, 0, value), record(1, 1, "<b>")]), empty=EMPTY)
    own = found.replace(script(found, "figure"), "")
    assert "<img" not in own
    assert "&lt;img src=x onerror=alert(1)&gt;" in own
    assert "<" not in script(found, "figure") + script(found, "data") + script(found, "texts")


@pytest.mark.slow
def test_a_lane_with_an_unusual_name_is_short_and_no_formula() -> None:
    """Bokeh would load a library for text between two pairs of dollar signs."""
    names = [r"$$x$$\(y\)\[z\]", "l" * 255]
    claims = [record(n, n, f"{CLAIM}/1/1/a.1/c/{name}/{'t' * 249}/0") for n, name in enumerate(names)]
    found = json.loads(script(render_page(timeline(claims), empty=EMPTY), "data"))
    assert max(map(len, found["lanes"])) < 50
    assert not re.search(r"\$\$|\\\(|\\\[", "".join(found["lanes"]))


@pytest.mark.parametrize(("records", "says"), [([], EMPTY), ([record(0, 0, "nonsense")], "1 record is invalid")])
def test_an_empty_picture_is_explained_in_words(records: list[Any], says: str) -> None:
    """It has no script at all."""
    found = render_page(timeline(records), empty=EMPTY)
    assert EMPTY in found
    assert says in found
    assert "<script" not in found


@pytest.mark.slow
def test_what_the_reader_of_a_picture_must_know_is_below_it() -> None:
    """A log that lost its beginning."""
    found = render_page(timeline([record(7, 0, spelled(f"{BEAT} a 3"))]), empty=EMPTY)
    assert "<p>The log of coordination partition 0 begins at offset 7." in found


@pytest.mark.slow
def test_a_picture_of_many_lanes_begins_with_the_first_ones() -> None:
    """The others can be reached."""
    builder = TimelineBuilder(World(1), Wanted())
    for number in range(400):
        builder.add(record(number, number, spelled(f"{CLAIM} a").replace("ev/0", f"ev/{number}")))
    found = render_page(builder.build(), empty=EMPTY)
    assert "The page begins with 300 of 400 lanes." in found


def claims(*instances: str) -> Timeline:
    """Return a timeline in which each instance claims a partition of its own."""
    return timeline([record(n, n, f"{CLAIM}/1/1/{name}/c/g/ev/{n}") for n, name in enumerate(instances)])


@pytest.mark.parametrize(("lanes", "size"), [(40, "13px"), (41, "10px")])
def test_the_names_of_many_lanes_are_smaller(lanes: int, size: str) -> None:
    """On a screen of usual height they would cover each other."""
    found = claims(*(f"r{number}.1" for number in range(lanes)))
    assert draw(found, Members(found)).yaxis.major_label_text_font_size == size


def test_only_the_instances_of_one_run_share_a_fill() -> None:
    """The instance id of a Go consumer may have dots, as a host name has."""
    run = "5b1c0d3e-0000-4000-8000-000000000000"
    found = claims(f"{run}.0123456789ab", f"{run}.ba9876543210", "10.0.0.1", "10.0.0.2")
    assert "4 claims by 3 runs" in render_page(found, empty=EMPTY)
    fills = [Members(found).fill(bar.owner.instance) for bar in found.bars]
    assert fills == [RUNS[0], RUNS[0], RUNS[1], RUNS[2]]


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "repeats"), [(len(RUNS), False), (len(RUNS) + 1, True)])
def test_a_page_says_that_runs_share_colours(*, runs: int, repeats: bool) -> None:
    """Without that sentence two bars of one colour look like those of one run."""
    page = render_page(claims(*(f"run{n}" for n in range(runs))), empty=EMPTY)
    assert (f"{runs} runs share {len(RUNS)} colours" in page) == repeats
