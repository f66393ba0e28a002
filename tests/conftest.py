"""Settings for every test: interrupts work, Dagster and garbage collection are quick, Hypothesis measures no time.

A shell starts background commands with SIGINT ignored, and every process that a test starts would inherit that.
"""

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.leftovers import stop_after_this_process
from tests.processor_time import PROPERTY, own_s, tree_s
from tests.quick_dagster import import_migrations_once, start_dagster_quickly
from tests.quick_disk import write_quickly

signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


import_migrations_once()
write_quickly()

_FAST = Path(__file__).parent / "fast"
_CLOCK = pytest.StashKey[Callable[[], float]]()
_BEFORE_S = pytest.StashKey[float]()
"""The processor seconds at the end of the last test."""

gc.disable()  # until all is imported and collected, because that takes a fifth longer with collections


def pytest_configure(config: pytest.Config) -> None:
    """Stop the processes that this one leaves running, however it ends, and report them on stderr."""
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        stop_after_this_process()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave out of garbage collections what was imported and collected, because it stays and is large.

    Fast tests leave no process running, so the cheap measure of processor time does for them.
    """
    if "dagster" in sys.modules:
        start_dagster_quickly()
    gc.collect()
    gc.freeze()
    gc.enable()
    clock = own_s if all(_FAST in item.path.parents for item in session.items) else tree_s
    session.config.stash[_CLOCK], session.config.stash[_BEFORE_S] = clock, clock()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Add the processor seconds of a test, with those of its fixtures, to its last report."""
    if call.when == "teardown":
        stash = item.config.stash
        so_far_s = stash[_CLOCK]()
        # Processes that ended without a parent took their seconds with them.
        item.user_properties.append((PROPERTY, round(max(so_far_s - stash[_BEFORE_S], 0.0), 2)))
        stash[_BEFORE_S] = so_far_s


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port without a listener."""
    with socket.socket() as held:  # so that no other process gets it
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a failure at once, because a test run that is stopped from outside may print no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message.partition("\n")[0] if crash else "see below"
        sys.stderr.write(f"\n{report.nodeid}: {report.when} failed after {report.duration:.0f} s: {reason}\n")
