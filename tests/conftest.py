"""Settings for every test: interrupts work, and Spark's JVMs start fast.

A shell starts background commands with SIGINT ignored, and every process that a test starts would inherit that. The
processes also inherit the location of Spark's defaults, which halve the cost of a JVM that lives a few seconds.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "spark_conf"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a failure at once, because a test run that is stopped from outside may print no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message.partition("\n")[0] if crash else "see below"
        sys.stderr.write(f"\n{report.nodeid}: {report.when} failed after {report.duration:.0f} s: {reason}\n")
