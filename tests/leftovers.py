"""Stops what a test process leaves running, however it ended: brokers, databases, JVMs and members.

`stop_after_this_process` marks the environment of this process, which all processes that it starts from then on
inherit. It starts this file as a script, which waits for the end of the test process and kills all with the mark
that do not end by themselves.
"""

import atexit
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MARK: Final = "MARSHAL_TEST_PROCESS"
_PAUSE_S: Final = 0.1
_SHOWN: Final = 120
"""How many characters of a command line are shown."""


def stop_after_this_process(after_s: float = 5) -> None:
    """Let all processes that this one starts from now on end with it.

    They have `after_s` seconds to end by themselves, as the JVM of a Spark session does.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, str(after_s)]
    watcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, env={})
    atexit.register(watcher.poll)  # which keeps the object, because Python warns if it is lost before its process ends
    os.environ[MARK] = mark


def marked_processes(mark: str) -> Iterator[tuple[int, str]]:
    """Yield the pid and the command line of each process with this mark."""
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(folder.name), command.decode(errors="replace")
        except OSError:  # it has ended in the meantime, or is another user's
            continue


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([process], [], [])


def kill_marked(mark: str, after_s: float = 0) -> None:
    """Kill all processes with this mark that still run after some seconds, also those that they start meanwhile."""
    deadline_s = time.monotonic() + after_s
    while time.monotonic() < deadline_s and any(marked_processes(mark)):
        time.sleep(_PAUSE_S)
    while found := list(marked_processes(mark)):
        for pid, command in found:
            sys.stdout.write(f"left running by a test process, killed: {pid} {command[:_SHOWN]}\n")
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    wait_for_end(int(sys.argv[1]))
    kill_marked(sys.argv[2], float(sys.argv[3]))
