"""Check that a step pauses the garbage collector, and never leaves it off."""

import gc
from collections.abc import Iterator

import pytest

from marshal_dagster._internal.collector import paused_collector


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    """Give each test a collector that is on."""
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


def test_the_collector_is_off_within_a_step_and_on_after_it() -> None:
    """Also after a step within a step, and after an exception."""
    with pytest.raises(KeyboardInterrupt), paused_collector():
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyboardInterrupt
    assert gc.isenabled()


def test_a_collector_that_the_user_has_switched_off_stays_off() -> None:
    """Only a step that has switched the collector off switches it on."""
    gc.disable()
    with paused_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_an_interrupt_on_the_way_into_a_step_leaves_the_collector_on() -> None:
    """A step that was entered and never left, as an interrupt can do, resumes the collector when it is forgotten."""
    step = paused_collector()
    step.__enter__()  # noqa: PLC2801 - the statement `with` cannot be interrupted at this place by a test
    assert not gc.isenabled()
    del step
    assert gc.isenabled()
