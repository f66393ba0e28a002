"""A pytest plugin that stops the process once in each test, as a busy machine does: `pytest -p tests.freezing`.

A helper process stops it at a random moment and lets it continue after two seconds. A test that ends before that moment
is not stopped. Short delays are as probable as long ones, so over some rounds tests of any duration are stopped.
"""

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import pytest

STOPPED_S: Final = 2.0
SHORTEST_S: Final = 0.001
LONGEST_S: Final = 10.0


class Freezer:
    """The helper process and the requests to it: after how many seconds to stop this process, or -1 for never."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__, str(os.getpid())]
        self._helper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Request a stop during the test."""
        self._request(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** random.random())
        try:
            return (yield)
        finally:
            self._request(-1)

    def pytest_sessionfinish(self) -> None:
        """End the helper."""
        self._helper.communicate()

    def _request(self, after_s: float) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.write(f"{after_s}\n".encode())
        self._helper.stdin.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Stop the process that runs tests: a worker of pytest-xdist, if there are any."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Freezer())


def main(process: int) -> None:
    """Stop and continue the process, as it requests, until it ends."""
    while requests := os.read(0, 4_096).split():
        after_s = float(requests[-1])
        if after_s < 0 or select.select([0], [], [], after_s)[0]:
            continue
        os.kill(process, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(process, signal.SIGCONT)


if __name__ == "__main__":
    main(int(sys.argv[1]))
