"""`make test-stress` counts each failure of each round, and continues after an interruption."""

from pathlib import Path

import pytest

from tests import stress

FLAKY = """
from pathlib import Path

def test_well():
    pass

def test_that_fails_the_second_time():
    ran = Path(__file__).with_name("ran")
    if ran.exists():
        raise AssertionError
    ran.touch()
"""

JUMPING = """
import time

def test_that_the_clock_jumps():
    before_s = time.monotonic()
    while (now_s := time.monotonic()) < before_s + 1.5:
        before_s = now_s
        time.sleep(0.01)
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite with a test that fails the second time, and a results file."""
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    monkeypatch.setattr(stress, "files_of", lambda *_: [tmp_path / "test_flaky.py"])
    monkeypatch.setattr(stress, "WORKERS", {"fast": ("--rootdir", str(tmp_path))})
    return tmp_path / "stress.jsonl"


@pytest.mark.thorough
def test_each_failure_is_counted(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A round that is stored is not run again."""
    command = ["fast", "--part", "sinks", "--busy", "1", "--results", str(suite)]
    assert stress.main([*command, "--rounds", "1"]) == 0
    assert stress.main([*command, "--rounds", "2"]) == 1
    printed = capsys.readouterr().out
    assert "fast/sinks: 2 rounds, 4 tests beside 1 busy processes" in printed
    assert "   1 times test_flaky::test_that_fails_the_second_time\n" in printed
    assert stress.main([*command, "--rounds", "2"]) == 1
    assert len(suite.read_text().splitlines()) == 2


@pytest.mark.thorough
def test_a_run_that_tests_nothing_has_failed(suite: Path) -> None:
    """For example because the file of tests cannot be read."""
    suite.with_name("test_flaky.py").write_text("this is not Python")
    assert stress.main(["fast", "--part", "sinks", "--busy", "0", "--rounds", "1", "--results", str(suite)]) == 1


@pytest.mark.thorough
def test_each_test_is_stopped_for_a_while(suite: Path) -> None:
    """A test that runs for long enough sees the clock jump."""
    suite.with_name("test_flaky.py").write_text(JUMPING)
    command = ["fast", "--part", "sinks", "--busy", "0", "--rounds", "1", "--freeze", "--results", str(suite)]
    assert stress.main(command) == 0
