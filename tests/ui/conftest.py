"""One deployment and one browser for the whole suite; a page for each test, and what it showed as `build/ui/*.png`."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from demo import flights
from demo.deployment import BUILD
from tests.ui.pages import expect_no_runs, launch, open_launchpad, switch_off
from tests.ui.site import FLIGHTS, Site, running_site

SCREENSHOTS = BUILD / "ui"
WIDTH, HEIGHT = 1440, 1000
WAIT_MS = 30_000.0
"""How long the page may take to show what it was asked for, on a machine that has other work."""

Shoot: TypeAlias = Callable[[str], None]

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The deployment, empty of runs."""
    with running_site(tmp_path_factory.mktemp("ui") / "site") as site:
        yield site


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium without a window: the one that `CHROMIUM` names, or Debian's."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert found, "no chromium: `make chromium`, or name one with CHROMIUM=..."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@contextmanager
def _page(browser: Browser, site: Site) -> Iterator[Page]:
    context = browser.new_context(base_url=site.at(), viewport={"width": WIDTH, "height": HEIGHT})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    try:
        yield page
    except BaseException:
        page.screenshot(path=SCREENSHOTS / "failed.png")
        raise
    finally:
        context.close()


@pytest.fixture
def page(browser: Browser, site: Site) -> Iterator[Page]:
    """A window of a user who was never here."""
    with _page(browser, site) as page:
        yield page


@pytest.fixture(scope="session")
def flights_run(browser: Browser, site: Site) -> str:
    """The address of the run that drained the flights in three batches, launched by hand.

    The schedule is switched off, and what it may have started is over, before there are flights.
    """
    some = flights.data_set().head(FLIGHTS)
    with _page(browser, site) as page:
        switch_off(page, "flights_each_minute")
        expect_no_runs(page)
        assert flights.load(site.connection, some) == FLIGHTS
        open_launchpad(page, "flights", "resources:")
        launch(page)
        return page.url


@pytest.fixture
def shoot(page: Page) -> Shoot:
    """Takes a screenshot of what the page shows."""

    def take(name: str) -> None:
        page.wait_for_load_state("networkidle")  # its icons
        page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")

    return take
