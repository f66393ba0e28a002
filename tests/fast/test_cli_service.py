"""Work that continues until a signal ends it."""

import os
import signal
import threading
from collections.abc import Callable

import pytest

from marshal_dagster.cli import service
from marshal_dagster.cli.service import run_until_signal
from marshal_dagster.errors import UnavailableError


def signalled(then: Callable[[], object]) -> None:
    """Send this process a signal, which is recorded while work runs, and continue with the work."""
    os.kill(os.getpid(), signal.SIGTERM)
    then()


def test_a_signal_stops_work() -> None:
    """The signal requests the end, and the work ends normally."""
    stopped = threading.Event()
    assert run_until_signal(lambda: signalled(stopped.wait), stopped.set)


def test_work_that_ends_by_itself_is_not_stopped() -> None:
    """An error of the work is raised."""
    assert not run_until_signal(lambda: None, lambda: None)
    with pytest.raises(ZeroDivisionError):
        run_until_signal(lambda: 1 / 0, lambda: None)


@pytest.mark.slow
def test_work_that_does_not_end_holds_up_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is reported as hung and left running."""
    monkeypatch.setattr(service, "_END_WITHIN_S", 0.2)
    hung = threading.Event()
    with pytest.raises(UnavailableError, match="did not end within"):
        run_until_signal(lambda: signalled(hung.wait), lambda: None)
    hung.set()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_lost_terminal_is_a_signal_to_stop(is_ignored: bool) -> None:
    """The service hands over. A process that `nohup` started continues."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)

    def work() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        if is_ignored:
            os.kill(os.getpid(), signal.SIGTERM)
        stopped.wait()

    try:
        assert run_until_signal(work, stopped.set)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
