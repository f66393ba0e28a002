"""Work that continues until a signal ends it."""

import os
import signal
import threading

import pytest

from marshal_dagster.cli import service
from marshal_dagster.cli.service import run_until_signal
from marshal_dagster.errors import UnavailableError


def signalled() -> None:
    """Send this process a signal after 0.1 s."""
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()


def test_a_signal_stops_work() -> None:
    """The signal requests the end, and the work ends normally."""
    stopped = threading.Event()
    signalled()
    assert run_until_signal(stopped.wait, stopped.set)


def test_work_that_ends_by_itself_is_not_stopped() -> None:
    """An error of the work is raised."""
    assert not run_until_signal(lambda: None, lambda: None)
    with pytest.raises(ZeroDivisionError):
        run_until_signal(lambda: 1 / 0, lambda: None)


def test_work_that_does_not_end_holds_up_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is reported as hung and left running."""
    monkeypatch.setattr(service, "_END_WITHIN_S", 0.2)
    hung = threading.Event()
    signalled()
    with pytest.raises(UnavailableError, match="did not end within"):
        run_until_signal(hung.wait, lambda: None)
    hung.set()
