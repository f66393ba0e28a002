"""What a test process leaves running ends with it (tests/leftovers.py)."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.conditions import wait_until

STARTER = """
import subprocess, sys, time
from tests.leftovers import stop_after_this_process
stop_after_this_process(after_s=0)
service = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(service.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_services_end_with_the_process_that_started_them(how: signal.Signals) -> None:
    """Also a service with a session of its own ends, whichever signal ends the process that started it."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as starter:
        assert starter.stdout is not None
        service = psutil.Process(int(starter.stdout.readline()))
        assert service.is_running()
        starter.send_signal(how)
        starter.stdout.close()
        wait_until(lambda: not service.is_running() or service.status() == psutil.STATUS_ZOMBIE, "the service ended")


def test_other_processes_are_left_alone() -> None:
    """Only the processes with the mark are killed."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        done = subprocess.run(
            [sys.executable, "-c", "from tests.leftovers import kill_marked; kill_marked('another mark')"],
            check=True,
            capture_output=True,
        )
        assert done.stdout == b""
        assert other.poll() is None
        other.terminate()
