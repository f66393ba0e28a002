"""Actions of a user on Dagster's pages. Elements are found by role and text."""

import re

from playwright.sync_api import Page, expect

DEMO = "/locations/marshal-dagster"
"""How long a run may take on a busy machine, including the start of its JVM."""


def switch_off(page: Page, schedule: str) -> None:
    """Switch a schedule off."""
    page.goto(f"{DEMO}/schedules/{schedule}")
    switch = page.get_by_role("row", name="Running").get_by_role("checkbox")
    expect(switch).to_be_checked()
    switch.locator("xpath=..").click()  # the input itself is hidden by its picture
    expect(switch).not_to_be_checked()


def expect_no_runs(page: Page) -> None:
    """Wait until no run is queued or in progress."""
    page.goto("/runs")
    for state in ("Queued", "In progress"):
        expect(page.get_by_role("tab", name=f"{state} (0)")).to_be_visible()


def open_launchpad(page: Page, job: str, setting: str) -> None:
    """Open a job's launchpad and wait until it shows `setting`, because an empty editor can start runs too."""
    page.goto(f"{DEMO}/jobs/{job}")
    page.get_by_role("tab", name="Launchpad").click()
    expect(page.get_by_text(setting).first).to_be_visible()
    expect(page.get_by_text("No errors")).to_be_visible()


def expect_no_resources(page: Page) -> None:
    """Wait until the launchpad's editor has nothing of resources, and no default is left to scaffold."""
    expect(page.get_by_text("All defaults expanded")).to_be_visible()
    expect(page.locator(".CodeMirror").get_by_text("resources")).to_have_count(0)


def replace_in_launchpad(page: Page, old: str, new: str) -> None:
    """Replace a value in the launchpad's editor."""
    editor = page.locator(".CodeMirror")
    editor.get_by_text(old, exact=True).first.dblclick()
    page.keyboard.type(new)
    expect(editor.get_by_text(new, exact=True).first).to_be_visible()
    expect(page.get_by_text("No errors")).to_be_visible()


def launch(page: Page) -> None:
    """Launch the run in the launchpad, and wait on its page until it has succeeded."""
    page.get_by_role("button", name="Launch Run").click()
    page.wait_for_url("**/runs/*")
    over = page.get_by_text(re.compile(r"^(Success|Failure|Canceled)$")).first
    expect(over).to_be_visible()
    expect(over).to_have_text("Success")
