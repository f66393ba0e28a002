"""One deployment and one browser for all tests, a page for each test, and screenshots in `build/ui/*.png`."""

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from demo import flights
from demo.deployment import BUILD
from tests.conditions import WITHIN_S
from tests.session_settings import QUICK_PLANS, submit_environment
from tests.spark_archive import start_spark_quickly
from tests.ui.pages import expect_no_resources, expect_no_runs, launch, open_launchpad, switch_off
from tests.ui.site import FLIGHTS, Site, running_site

SCREENSHOTS = BUILD / "ui"
WIDTH, HEIGHT = 1440, 1000
WAIT_MS = 1_000 * WITHIN_S
"""How long a page may take to show the expected content on a busy machine."""

Shoot: TypeAlias = Callable[[str], None]

expect.set_options(timeout=WAIT_MS)


def pytest_configure() -> None:
    """Let the Spark sessions of runs start quickly and interpret plans, which the pages do not show."""
    start_spark_quickly()
    os.environ.update(submit_environment(QUICK_PLANS))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield the deployment, which has no runs yet."""
    with running_site(tmp_path_factory.mktemp("ui") / "site") as site:
        yield site


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Yield a headless Chromium: the one in `CHROMIUM`, or Debian's."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert found, "Chromium was not found: run `make chromium`, or set CHROMIUM to its path"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Take a screenshot of the page of a test that fails, while the page is open."""
    report = yield
    page = item.funcargs.get("page")
    if report.failed and report.when == "call" and isinstance(page, Page):
        page.screenshot(path=SCREENSHOTS / "failed.png")
    return report


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
    """Yield a page in a new browser context."""
    with _page(browser, site) as page:
        yield page


@pytest.fixture(scope="session")
def flights_run(browser: Browser, site: Site) -> str:
    """Return the address of the run that processed the flights in three batches, launched by hand.

    Before the flights exist, the schedule is switched off and its runs are over.
    """
    some = flights.data_set().head(FLIGHTS)
    with _page(browser, site) as page:
        switch_off(page, "flights_each_minute")
        expect_no_runs(page)
        assert flights.load(site.connection, some) == FLIGHTS
        open_launchpad(page, "flights", "max_batches:")
        expect_no_resources(page)
        page.screenshot(path=SCREENSHOTS / "launchpad-of-batches.png", animations="disabled")
        launch(page)
        return page.url


@pytest.fixture
def shoot(page: Page) -> Shoot:
    """Return a function that takes a screenshot of the page."""

    def take(name: str) -> None:
        page.wait_for_load_state("networkidle")  # wait for its icons
        page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")

    return take
