"""Settings for every test: interrupts work, Dagster and garbage collection are quick, Hypothesis measures no time.

A shell starts background commands with SIGINT ignored, and every process that a test starts would inherit that.
"""

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, settings

signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


_load_migrations = ScriptDirectory.from_config
_migrations: dict[str | None, ScriptDirectory] = {}


def _migrations_of(config: Config) -> ScriptDirectory:
    folder = config.get_main_option("script_location")
    if folder not in _migrations:
        _migrations[folder] = _load_migrations(config)
    return _migrations[folder]


# Each instance of Dagster would import all migrations of its databases, which is a third of the time of many tests.
ScriptDirectory.from_config = _migrations_of  # type: ignore[method-assign]


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what was imported and collected, because it stays and is large."""
    gc.collect()
    gc.freeze()


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
