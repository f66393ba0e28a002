"""The page of a timeline in a real Chromium without a network: it draws, explains, searches and zooms."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from marshal_dagster.protocol.world import World
from marshal_dagster.timeline.builder import TimelineBuilder
from marshal_dagster.timeline.page import render_page
from tests.timeline_logs import COORDINATION_PARTITIONS, START_MS, incident
from tests.ui.conftest import SCREENSHOTS, WAIT_MS

WIDTH, HEIGHT = 1000, 560
PLACE = """([atMs, lane]) => {
    const [view] = Bokeh.index.roots, frame = view.frame.bbox, at = view.el.getBoundingClientRect()
    const { x_range: x, y_range: y } = view.model
    return [
        at.left + frame.left + (atMs - x.start) / (x.end - x.start) * frame.width,
        at.top + frame.top + (lane - y.end) / (y.start - y.end) * frame.height,
    ]
}"""
"""Returns where a time and a lane are on the screen."""
RENDERER = """() => {
    const gl = document.createElement('canvas').getContext('webgl')
    return gl.getParameter(gl.getExtension('WEBGL_debug_renderer_info').UNMASKED_RENDERER_WEBGL)
}"""
ALPHAS = "() => [...Bokeh.documents[0].get_model_by_name('bars').data_source.data.alpha]"
SHOWN_MS = "() => { const { start, end } = Bokeh.documents[0].get_model_by_name('plot').x_range; return end - start }"


@dataclass
class Opened:
    """A page that is open, and what went wrong on it."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def point(self, at_s: float, lane: int) -> None:
        """Move the mouse to a time, in seconds after the log's start, and the lane of a partition."""
        x, y = self.page.evaluate(PLACE, [START_MS + at_s * 1_000, lane])
        self.page.mouse.move(x - 2, y)
        self.page.mouse.move(x, y)


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    """Open the page of an incident: three partitions, a crash, a takeover and a pause."""
    builder = TimelineBuilder(World(COORDINATION_PARTITIONS))
    for record in incident():
        builder.add(record)
    path = tmp_path / "incident.html"
    path.write_text(render_page(builder.build(), empty=""), encoding="utf-8")
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, offline=True)
    context.set_default_timeout(WAIT_MS)
    shown = Opened(context.new_page())
    page, problems = shown.page, shown.problems
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if request.url == path.as_uri() else problems.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    yield shown
    context.close()
    assert shown.problems == []


def test_a_timeline_is_drawn_without_a_network_and_explains_what_one_points_at(opened: Opened) -> None:
    """A bar shows the record that won the claim; a mark shows its own record. Beside them nothing is shown."""
    tip = opened.page.get_by_role("tooltip")
    expect(opened.page.get_by_role("heading", name="Group shops")).to_be_visible()
    opened.page.screenshot(path=SCREENSHOTS / "timeline.png")
    opened.point(50, 1)
    expect(tip).to_contain_text("claimed orders/1 in group shops")
    expect(tip).to_contain_text("Then: taken over by another claim.")
    opened.point(20, 2)
    expect(tip).to_contain_text("claimed orders/2 in group shops")
    opened.page.screenshot(path=SCREENSHOTS / "timeline-hover.png")
    opened.point(99, 1)
    expect(tip).to_contain_text("could not")
    opened.point(113, 0)
    expect(tip).to_be_hidden()


def test_without_a_gpu_the_page_draws_on_a_plain_canvas(opened: Opened) -> None:
    """WebGL in software needs several times as long for a step of the zoom."""
    is_software = "SwiftShader" in opened.page.evaluate(RENDERER)
    backend = opened.page.evaluate("() => Bokeh.documents[0].get_model_by_name('plot').output_backend")
    assert backend == ("canvas" if is_software else "webgl")


def test_a_search_dims_the_claims_of_other_runs(opened: Opened) -> None:
    """The count is beside the search. Without a text nothing is dimmed. A click on a bar searches for its run."""
    page, search = opened.page, opened.page.get_by_role("searchbox")
    assert set(page.evaluate(ALPHAS)) == {1}
    opened.point(50, 1)
    expect(page.get_by_role("tooltip")).to_be_visible()
    page.mouse.down()
    page.mouse.up()
    expect(page.get_by_text("3 claims of 1 member")).to_be_visible()
    run = search.input_value()
    assert f"/{run}".encode() in (incident()[1].value or b"")
    alphas = page.evaluate(ALPHAS)
    assert [alpha == 1 for alpha in alphas].count(True) == 3
    assert min(alphas) < 0.2
    page.screenshot(path=SCREENSHOTS / "timeline-search.png")
    search.fill("no such run")
    expect(page.get_by_text("no claim matches")).to_be_visible()
    search.fill("")
    assert set(page.evaluate(ALPHAS)) == {1}


def test_the_address_keeps_the_search_even_if_it_was_shortened(opened: Opened) -> None:
    """A percent sign without its two digits is text."""
    page = opened.page
    page.evaluate("location.hash = '#run=100%'")
    page.reload()
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    expect(page.get_by_role("searchbox")).to_have_value("100%")


def test_the_wheel_zooms_in_time_and_enter_zooms_to_what_was_found(opened: Opened) -> None:
    """The page shows less time afterwards."""
    page, all_ms = opened.page, opened.page.evaluate(SHOWN_MS)
    opened.point(60, 1)
    page.mouse.wheel(0, -400)
    page.wait_for_function(f"({SHOWN_MS})() < {all_ms * 0.9}")
    page.get_by_role("searchbox").fill("ada@ops-1")
    page.get_by_role("searchbox").press("Enter")
    page.wait_for_function(f"({SHOWN_MS})() < 10000")


def test_a_kind_of_mark_is_hidden_and_shown_by_its_legend(opened: Opened) -> None:
    """The button has the state of its marks."""
    page = opened.page
    button = page.get_by_role("button", name="commit")
    visible = "() => Bokeh.documents[0].get_model_by_name('commit').visible"
    page.wait_for_function(visible)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    assert not page.evaluate(visible)
    button.click()
    page.wait_for_function(visible)
