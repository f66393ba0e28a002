"""Settings for every test: interrupts work.

A shell starts background commands with SIGINT ignored, and every process that a test starts would inherit that.
"""

import os
import signal
import sys

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a failure at once, because a test run that is stopped from outside may print no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message.partition("\n")[0] if crash else "see below"
        sys.stderr.write(f"\n{report.nodeid}: {report.when} failed after {report.duration:.0f} s: {reason}\n")
