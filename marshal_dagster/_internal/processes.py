"""Detached processes, such as the brokers of `devkafka`, which outlive the process that starts them.

A process is identified by its pid and its start time, so a signal never reaches another process with the same pid.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 0.02
_KILLED_WITHIN_S = 10.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Indexes of fields in /proc/PID/stat, counted from the process state.
_THREADS = 17
_START_TICKS = 19


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """The identity of one process; its pid alone may be reused by another process after it ends.

    `birth` is the boot id and the clock ticks from boot to the start of the process, if /proc has them. These do not
    change when the wall clock is set. Otherwise `birth` is the start time in seconds.
    """

    pid: int
    birth: str


def spawn(argv: Sequence[str], environment: Mapping[str, str], console: Path) -> ProcessMark:
    """Start `argv` in its own session, so that it outlives this process; append its output to the file `console`."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(console), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(argv[0], list(argv), environment, file_actions=actions, setsid=True)
    # A process that ends at once is a zombie until it is reaped, and still has a start time.
    return mark_of(pid)


def mark_of(pid: int) -> ProcessMark:
    """Return the mark of the process that has `pid` now. Raises `psutil.NoSuchProcess` if there is none."""
    return ProcessMark(pid, _birth(pid))


def is_alive(mark: ProcessMark) -> bool:
    """Return whether the marked process still runs; if it has ended and is a child of this process, reap it."""
    return _find(mark) is not None


def send(mark: ProcessMark, action: Callable[[psutil.Process], None]) -> None:
    """Call `action`, which sends a signal, with the marked process; do nothing if that has ended."""
    process = _find(mark)
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            action(process)


def wait_gone(marks: Iterable[ProcessMark], timeout_s: float) -> bool:
    """Wait until all these processes have ended; return False if some still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    waiting = list(marks)
    while waiting := [mark for mark in waiting if is_alive(mark)]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def stop(marks: Sequence[ProcessMark], timeout_s: float) -> None:
    """Send SIGTERM to all, and after `timeout_s` SIGKILL to those that still run."""
    for mark in marks:
        send(mark, psutil.Process.terminate)
    if not wait_gone(marks, timeout_s):
        kill(marks)


def kill(marks: Sequence[ProcessMark]) -> None:
    """Send SIGKILL to all, and wait until they have ended."""
    for mark in marks:
        send(mark, psutil.Process.kill)
    wait_gone(marks, _KILLED_WITHIN_S)


def listens(mark: ProcessMark, port: int) -> bool:
    """Return whether the marked process, or one of its descendants, listens on TCP `port` of this machine."""
    process = _find(mark)
    if process is None:
        return False
    try:
        family = [process, *process.children(recursive=True)]
        sockets = [socket for member in family for socket in member.net_connections("tcp")]
    except psutil.Error:
        return False
    return any(socket.status == psutil.CONN_LISTEN and socket.laddr.port == port for socket in sockets)


def _find(mark: ProcessMark) -> psutil.Process | None:
    try:
        process = psutil.Process(mark.pid)
        if _birth(mark.pid) != mark.birth:
            return None
        if process.status() != psutil.STATUS_ZOMBIE:
            return process
        return None if _is_over(mark.pid) else process
    except psutil.Error:
        return None


def _is_over(zombie: int) -> bool:
    """Return whether all threads of a zombie have ended; reap it if it is a child of this process.

    The main thread of a process that is being killed can be a zombie while other threads still hold ports and files.
    """
    try:
        reaped, _status = os.waitpid(zombie, os.WNOHANG)
    except ChildProcessError:
        fields = _stat_fields(zombie)
        return fields is None or int(fields[_THREADS]) <= 1
    return reaped == zombie


def _birth(pid: int) -> str:
    """Return the birth of the process that has `pid` now. Raises `psutil.NoSuchProcess` if there is none."""
    fields = _stat_fields(pid)
    if fields is None:
        return f"{psutil.Process(pid).create_time():.2f}"
    return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {fields[_START_TICKS]}"


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program name precedes them in parentheses; it may contain any character, also blanks and parentheses.
    return stat.rpartition(")")[2].split()
