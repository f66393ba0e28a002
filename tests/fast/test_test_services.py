"""The test run reports a service that has ended, and stops the processes that a worker left running."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conditions import wait_until
from tests.real.services import ended_services, stop_left_running, watched

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_service_that_has_ended_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    """A service that runs is not named."""
    log = tmp_path / "broker.log"
    log.write_text("out of memory\n")
    with subprocess.Popen(SLEEP) as process, watched("the broker", process.pid, log, tmp_path / "missing.log"):
        assert ended_services() == []
        process.kill()
        wait_until(ended_services, "the end is noticed")
        [(title, text)] = ended_services()
    assert title == f"the broker (process {process.pid}) has ended"
    assert text == f"{log}:\nout of memory\n"
    assert ended_services() == []


def test_what_a_worker_left_running_is_stopped() -> None:
    """Processes of other workers and other runs continue."""
    started = {
        name: subprocess.Popen(
            SLEEP, env=os.environ | {"PYTEST_XDIST_TESTRUNUID": name[0], "PYTEST_XDIST_WORKER": name[1]}
        )
        for name in (("this run", "gw0"), ("this run", "gw1"), ("another run", "gw0"))
    }
    try:
        [command] = stop_left_running("this run", "gw0")
        assert command.startswith(sys.executable)
        assert {name for name, process in started.items() if process.poll() is None} == set(started) - {
            ("this run", "gw0")
        }
    finally:
        for process in started.values():
            process.kill()
            process.wait()
