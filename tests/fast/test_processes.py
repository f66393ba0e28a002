"""A process is identified by its pid and start time, so a process that only reuses the pid is never signalled."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from marshal_dagster._internal import processes
from marshal_dagster._internal.processes import ProcessMark
from tests.conditions import WITHIN_S, wait_until


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[[str], ProcessMark]]:
    """Yield a function that starts shell scripts as brokers are started. Kill those that still run in the end."""
    marks: list[ProcessMark] = []

    def start(script: str) -> ProcessMark:
        marks.append(processes.spawn(["/bin/sh", "-c", script], os.environ, tmp_path / "console.log"))
        return marks[-1]

    yield start
    processes.kill(marks)


def test_a_process_is_detached_and_what_it_says_is_kept(spawn: Callable[[str], ProcessMark], tmp_path: Path) -> None:
    """The process leads its own session, has no input, and appends both its outputs to the console file."""
    console = tmp_path / "console.log"
    console.write_text("before\n", encoding="utf-8")
    mark = spawn("cat; echo out; echo err >&2; exec sleep 60")
    wait_until(
        lambda: console.read_text(encoding="utf-8") == "before\nout\nerr\n", "both streams are in the console file"
    )
    assert os.getsid(mark.pid) == mark.pid
    assert os.getsid(mark.pid) != os.getsid(0)


def test_a_recycled_pid_is_not_alive_and_never_signalled(spawn: Callable[[str], ProcessMark]) -> None:
    """The same pid with another start time is another process: it counts as dead and is neither stopped nor killed."""
    mark = spawn("exec sleep 60")
    recycled = replace(mark, birth=f"{mark.birth}1")
    assert not processes.is_alive(recycled)
    processes.stop([recycled], 0.0)
    processes.kill([recycled])
    assert processes.is_alive(mark)


def test_a_mark_of_an_earlier_boot_is_not_alive(spawn: Callable[[str], ProcessMark]) -> None:
    """Clock ticks since boot cannot be compared with those of another boot."""
    mark = spawn("exec sleep 60")
    boot, ticks = mark.birth.split()
    assert not processes.is_alive(ProcessMark(mark.pid, f"{boot[::-1]} {ticks}"))


def test_birth_survives_odd_program_names(tmp_path: Path) -> None:
    """A program name with blanks and parentheses does not prevent reading the start time."""
    odd = tmp_path / "a) (b 7"
    odd.symlink_to("/bin/sleep")
    mark = processes.spawn([str(odd), "60"], os.environ, tmp_path / "console.log")
    try:
        assert processes.is_alive(mark)
        assert mark == ProcessMark(mark.pid, processes._birth(mark.pid))
    finally:
        processes.kill([mark])
    assert not processes.is_alive(mark)


def test_stop_ends_in_order_first(spawn: Callable[[str], ProcessMark], tmp_path: Path) -> None:
    """A process that handles SIGTERM can finish by itself."""
    mark = spawn("trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.02; done")
    console = tmp_path / "console.log"
    wait_until(lambda: "ready" in console.read_text(encoding="utf-8"), "the process is ready")
    processes.stop([mark], WITHIN_S)
    assert not processes.is_alive(mark)
    assert console.read_text(encoding="utf-8").endswith("bye\n")


@pytest.mark.slow
def test_stop_kills_what_does_not_heed(spawn: Callable[[str], ProcessMark], tmp_path: Path) -> None:
    """A process that ignores SIGTERM is killed at the deadline."""
    mark = spawn("trap '' TERM; echo ready; while :; do sleep 0.02; done")
    wait_until(lambda: "ready" in (tmp_path / "console.log").read_text(encoding="utf-8"), "the process is ready")
    processes.stop([mark], 0.2)
    assert not processes.is_alive(mark)


def test_a_dead_child_is_reaped(spawn: Callable[[str], ProcessMark]) -> None:
    """A zombie does not count as alive, and none remains."""
    mark = spawn("exit 0")
    assert processes.wait_gone([mark], WITHIN_S)
    assert not psutil.pid_exists(mark.pid)


def test_a_zombie_of_another_parent_is_not_alive() -> None:
    """A broker that died counts as dead, even if its parent does not wait for it."""
    program = "import os, time\npid = os.fork()\nif pid == 0: os._exit(0)\nprint(pid, flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the process is a zombie")
            assert not processes.is_alive(ProcessMark(pid, processes._birth(pid)))
        finally:
            parent.kill()


def test_waiting_has_an_end(spawn: Callable[[str], ProcessMark]) -> None:
    """`wait_gone` returns False after the timeout."""
    assert not processes.wait_gone([spawn("exec sleep 60")], 0.05)


def test_where_there_is_no_proc_the_start_time_is_the_birth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, a process is identified by the start time that psutil reports."""

    def missing(*_arguments: object, **_keywords: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    mark = ProcessMark(os.getpid(), f"{psutil.Process().create_time():.2f}")
    assert processes.is_alive(mark)
    assert not processes.is_alive(replace(mark, birth="1.00"))
