"""What the pages of a deployment show of its batches, pauses, sensors and checks."""

import re
from typing import TYPE_CHECKING

from playwright.sync_api import Page, expect

from demo import flights
from tests.conditions import wait_until
from tests.ui.conftest import WAIT_MS
from tests.ui.pages import DEMO, expect_no_resources, launch, open_launchpad, replace_in_launchpad
from tests.ui.site import BATCHES, FLIGHTS, MAX_RECORDS

if TYPE_CHECKING:
    from tests.ui.conftest import Shoot

EVENTS = """query Events($asset: [String!]!) {
    assetOrError(assetKey: {path: $asset}) {
        ... on Asset { assetMaterializations { metadataEntries { label ... on IntMetadataEntry { intValue } } } }
    }
}"""


def ranges_shown(page: Page) -> list[tuple[int, int, int]]:
    """Return (partition, start, end) of all tables of ranges, sorted. The page shows some twice, and in any order."""
    rows = page.get_by_role("row").filter(has=page.get_by_role("cell", name="committed", exact=True))
    found = [row.split("\t")[:3] for row in rows.all_inner_texts() if row.rstrip().endswith(f"\t{flights.TOPIC}")]
    return sorted({(int(partition), int(start), int(end)) for partition, start, end in found if partition.isdigit()})


def expect_plot(page: Page, asset: str, lags: list[int]) -> None:
    """Wait until the page has a plot of an asset's lag. Dagster draws what its server returns, so that is compared."""
    page.get_by_role("tab", name="Overview").first.click()
    page.get_by_role("button", name="Plots").click()
    plot = page.get_by_text("lag", exact=True).first.locator("xpath=following::canvas[1]")
    plot.scroll_into_view_if_needed()
    expect(plot).to_be_visible()
    requested = {"query": EVENTS, "variables": {"asset": [asset]}}
    answer = page.request.post("/graphql", data=requested, timeout=WAIT_MS).json()
    events = answer["data"]["assetOrError"]["assetMaterializations"]
    entries = [entry for event in reversed(events) for entry in event["metadataEntries"] if entry["label"] == "lag"]
    assert [entry.get("intValue") for entry in entries] == lags


def test_a_run_shows_what_each_of_its_batches_did(page: Page, flights_run: str, shoot: "Shoot") -> None:
    """From the list of runs a user reaches a table of each batch. The ranges are contiguous and contain all flights."""
    page.goto("/runs")
    expect(page.get_by_text("marshal/outcome: done").first).to_be_visible()
    shoot("runs")
    page.get_by_role("link", name=flights_run.rpartition("/")[2][:8]).click()
    for lag in range(FLIGHTS - MAX_RECORDS, -1, -MAX_RECORDS):
        expect(page.get_by_role("row", name=f"lag {lag}", exact=True).first).to_be_visible()
    expect(page.get_by_role("row", name=f"batches {BATCHES}", exact=True)).to_be_visible()
    page.get_by_text("ASSET_MATERIALIZATION").last.scroll_into_view_if_needed()
    shoot("run")
    positions = dict.fromkeys(range(flights.PARTITIONS), 0)
    for partition, start, end in ranges_shown(page):
        assert start == positions[partition]
        positions[partition] = end
    assert sum(positions.values()) == FLIGHTS


def test_the_catalog_shows_each_batch(page: Page, flights_run: str, shoot: "Shoot") -> None:
    """The asset of an op has an event for each batch, with its figures and ranges."""
    page.goto(flights_run)
    page.get_by_role("link", name="View Asset").first.click()
    page.get_by_role("tab", name="Events").click()
    expect(page.get_by_text("Materialized in run")).to_be_visible()
    expect(page.get_by_role("row", name=f"offsets {MAX_RECORDS}", exact=True)).to_be_visible()
    expect(page.get_by_role("row", name="delivery effectively_once")).to_be_visible()
    assert len(ranges_shown(page)) == flights.PARTITIONS
    shoot("batch")
    expect_plot(page, "flights_by_carrier", list(range(FLIGHTS - MAX_RECORDS, -1, -MAX_RECORDS)))
    shoot("plots-of-an-op")


def skip_reason(page: Page) -> str:
    """Return the newest tick of the demo's sensor, which shows why it requested no run."""
    page.goto(f"{DEMO}/sensors/stale_flights")
    page.get_by_role("button", name="0 runs requested").first.click()
    tick = page.get_by_role("dialog")
    expect(tick).to_contain_text("Skip reason:")
    return tick.inner_text()


def wait_for_reason(page: Page, reason: str) -> str:
    """Wait until the newest tick was skipped for `reason`, and return its text."""

    def look() -> str | None:
        reported = skip_reason(page)
        return reported if reason in reported else None

    return wait_until(look, f"a tick was skipped for {reason!r}", pause_s=0.1)


def test_a_group_is_paused_and_resumed_by_clicking(page: Page, flights_run: str, shoot: "Shoot") -> None:  # noqa: ARG001 - its run comes first
    """A launchpad opens with a dry run, which shows a preview. With `dry_run: false` the job acts; ticks show why."""
    wait_for_reason(page, "nothing to redo")
    shoot("tick")
    open_launchpad(page, "pause_flights", "duration: 1h")
    shoot("launchpad")
    expect_no_resources(page)
    launch(page)
    expect(page.get_by_role("cell", name=re.compile("^paused until 2"))).to_be_visible()
    shoot("preview")
    open_launchpad(page, "pause_flights", "duration: 1h")
    replace_in_launchpad(page, "true", "false")
    launch(page)
    expect(page.get_by_role("row", name="group flights-by-carrier", exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name="not paused", exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name=re.compile("^paused until 2"))).to_be_visible()
    shoot("pause")
    reported = wait_for_reason(page, "group 'flights-by-carrier' is paused by")
    assert "s more: no runs" in reported
    shoot("tick-paused")
    open_launchpad(page, "resume_flights", "dry_run: true")
    replace_in_launchpad(page, "true", "false")
    launch(page)
    wait_for_reason(page, "nothing to redo")


def test_the_asset_graph_shows_checks_and_the_asset_its_plots(page: Page, shoot: "Shoot") -> None:
    """An asset is materialized from the graph, which then shows its checks. Its figures are plotted by batch."""
    page.goto("/asset-groups")
    page.get_by_role("button", name="Materialize (1)").click()
    passed = page.get_by_role("link", name="6 / 6 Passed")
    expect(passed).to_be_visible()
    shoot("graph")
    passed.click()
    expect(page.get_by_text("Succeeded", exact=True)).to_have_count(6)
    page.get_by_text("lag", exact=True).first.click()
    expect(page.get_by_text("0 offsets are unread; 0 are allowed")).to_be_visible()
    shoot("checks")
    expect_plot(page, "orders_per_shop", [150, 50, 0])
    shoot("plots")
