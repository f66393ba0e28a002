"""Check the functions with which tests wait for a condition: their deadline and their failure messages."""

import subprocess
import sys
import time

import pytest

from tests.conditions import wait_for_line, wait_until


def test_what_a_condition_returns_is_given_back() -> None:
    """`wait_until` returns the first true answer; an ignored error counts as "not yet"."""
    answers = iter([None, KeyError(), 7])

    def ask() -> int | None:
        answer = next(answers)
        if isinstance(answer, KeyError):
            raise answer
        return answer

    assert wait_until(ask, "there is a number", ignored=KeyError) == 7


def test_what_does_not_come_in_time_is_said() -> None:
    """The failure has the caller's description, the last state and the ignored error.

    Other errors are raised at once.
    """
    seen: list[int] = []
    with pytest.raises(AssertionError, match=r"^not within 0.05 s: three were seen: \[1, 1") as failed:
        wait_until(lambda: seen.append(1), lambda: f"three were seen: {seen}", 0.05, pause_s=0.001)
    assert failed.value.__cause__ is None
    with pytest.raises(AssertionError, match="a division") as failed:
        wait_until(lambda: 1 // 0, "a division", 0, ignored=ZeroDivisionError)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 // 0, "a division")


def test_a_condition_that_stays_false_is_requested_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses grow to a tenth of a second, unless the caller names another pause."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    for pause_s in (None, 0.5):
        answers = iter([False] * 40 + [True])
        assert wait_until(lambda: next(answers), "it is true", pause_s=pause_s)  # noqa: B023 - called at once
    assert pauses[0] == 0.02
    assert pauses[:40] == sorted(pauses[:40])
    assert pauses[39] == 0.1
    assert pauses[40:] == [0.5] * 40


def _prints(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.thorough
def test_a_line_of_a_process_is_waited_for() -> None:
    """If the process ends early or takes too long, the failure shows what it printed."""
    with _prints("print('begun'); print('ready 7')") as process:
        assert wait_for_line(process, "ready") == "ready 7\n"
    with _prints("print('begun')") as process, pytest.raises(AssertionError, match=r"ended with 0 .*'ready': .*begun"):
        wait_for_line(process, "ready")
    with (
        _prints("import time; print('begun', flush=True); time.sleep(60)") as process,
        pytest.raises(AssertionError, match=r"ended with -9 .*'ready'"),
    ):
        wait_for_line(process, "ready", 0.5)
