"""Processes that outlive who starts them: started detached, known by pid and birth, stopped by that alone."""

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
# Places in /proc/PID/stat, counted from the process's state.
_THREADS = 17
_START_TICKS = 19


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process and no other: its pid may belong to another one when it has ended.

    `birth` is the boot's id and the clock ticks from boot to the process's start where /proc tells them (a
    start time by the wall clock changes when that clock is set), else the start time in seconds.
    """

    pid: int
    birth: str


def spawn(argv: Sequence[str], environment: Mapping[str, str], console: Path) -> ProcessMark:
    """Start `argv` in a session of its own, so that it outlives this process; it prints to `console`."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(console), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(argv[0], list(argv), environment, file_actions=actions, setsid=True)
    # One that has died at once is a zombie until it is waited for, and has a birth too.
    return mark_of(pid)


def mark_of(pid: int) -> ProcessMark:
    """Give the mark of the process that has `pid` now. Raises `psutil.NoSuchProcess` when none has it."""
    return ProcessMark(pid, _birth(pid))


def is_alive(mark: ProcessMark) -> bool:
    """Tell whether that very process still runs; one that has ended is reaped if it is a child of this."""
    return _find(mark) is not None


def send(mark: ProcessMark, action: Callable[[psutil.Process], None]) -> None:
    """Let `action` signal that very process; nothing happens when it has ended."""
    process = _find(mark)
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            action(process)


def wait_gone(marks: Iterable[ProcessMark], timeout_s: float) -> bool:
    """Wait until none of these processes lives; False when time ran out."""
    deadline = time.monotonic() + timeout_s
    waiting = list(marks)
    while waiting := [mark for mark in waiting if is_alive(mark)]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def stop(marks: Sequence[ProcessMark], timeout_s: float) -> None:
    """End all with SIGTERM, and after `timeout_s` what is left with SIGKILL."""
    for mark in marks:
        send(mark, psutil.Process.terminate)
    if not wait_gone(marks, timeout_s):
        kill(marks)


def kill(marks: Sequence[ProcessMark]) -> None:
    """End all with SIGKILL, and wait until they are gone."""
    for mark in marks:
        send(mark, psutil.Process.kill)
    wait_gone(marks, _KILLED_WITHIN_S)


def listens(mark: ProcessMark, port: int) -> bool:
    """Tell whether that very process, or one that it has started, listens on TCP `port` of this machine."""
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
    """Tell whether a zombie has ended altogether, and reap it if it is a child of this process.

    The first thread of a process that is being killed can be a zombie while others still hold ports and files.
    """
    try:
        reaped, _status = os.waitpid(zombie, os.WNOHANG)
    except ChildProcessError:
        fields = _stat_fields(zombie)
        return fields is None or int(fields[_THREADS]) <= 1
    return reaped == zombie


def _birth(pid: int) -> str:
    """Return the birth of the process that has `pid` now; raises `psutil.NoSuchProcess` when none has it."""
    fields = _stat_fields(pid)
    if fields is None:
        return f"{psutil.Process(pid).create_time():.2f}"
    return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {fields[_START_TICKS]}"


def _stat_fields(pid: int) -> list[str] | None:
    """Return what /proc tells of a process, from its state on; None where there is no such process, or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program's name comes before, in parentheses; it may hold anything, blanks and parentheses too.
    return stat.rpartition(")")[2].split()
