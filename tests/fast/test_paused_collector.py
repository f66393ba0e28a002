"""Check that a step pauses the garbage collector, and never leaves it off."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from marshal_dagster._internal.collector import paused_collector
from marshal_dagster._internal.lazy_names import lazy_names


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    """Switch the collector on for each test, and back after it."""
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


def _interrupted_steps(seen: list[bool]) -> None:
    """Run a step within a step, record in each whether the collector is on, and interrupt the outer one."""
    with paused_collector():
        with paused_collector():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
        raise KeyboardInterrupt


def test_the_collector_is_off_within_a_step_and_on_after_it() -> None:
    """This also holds after a step within a step, and after an interrupt."""
    seen: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        _interrupted_steps(seen)
    assert [*seen, gc.isenabled()] == [False, False, True]


def test_a_collector_that_the_user_has_switched_off_stays_off() -> None:
    """Only a step that has switched the collector off switches it on."""
    gc.disable()
    with paused_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_an_interrupt_on_the_way_into_a_step_leaves_the_collector_on() -> None:
    """A step that was entered and never left, as an interrupt can do, resumes the collector when it is forgotten."""
    step = paused_collector()
    step.__enter__()
    assert not gc.isenabled()
    del step
    assert gc.isenabled()


FORK = """
import gc, os
from marshal_dagster._internal.collector import paused_collector

def is_on_in_fork():
    child = os.fork()
    if child == 0:
        os._exit(gc.isenabled())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with paused_collector():
    paused = is_on_in_fork()
gc.disable()
with paused_collector():
    print(paused, is_on_in_fork())
"""


def test_a_process_that_is_forked_during_a_step_collects() -> None:
    """Another thread may fork, and the step never ends in the new process. The user's own choice stays."""
    done = subprocess.run([sys.executable, "-c", FORK], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "0"]


def test_a_name_is_imported_without_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that imports its names on first use pauses the collector for the import, and not longer."""
    (tmp_path / "module_of_names.py").write_text("import gc\nIS_COLLECTING = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "lazy_package", ModuleType("lazy_package"))
    name_of_package, _, _ = lazy_names("lazy_package", {"module_of_names": "IS_COLLECTING"})
    assert name_of_package("IS_COLLECTING") is False
    assert gc.isenabled()
    del sys.modules["module_of_names"]
