"""`python -m tests.times` prints where the time of the tests goes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests import conftest, times
from tests.processor_time import PROPERTY, own_s, tree_s

REPORT = """<testsuites><testsuite>
<testcase classname="tests.fast.test_claimer" name="test_a[1]" time="1.5">
<properties><property name="processor_s" value="1.2"/></properties></testcase>
<testcase classname="tests.fast.test_claimer.TestInClass" name="test_b" time="0.5">
<properties><property name="processor_s" value="0.8"/></properties></testcase>
<testcase classname="tests.real.test_outbox" name="test_c" time="20">
<properties><property name="processor_s" value="6"/></properties></testcase>
</testsuite></testsuites>"""
BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"


def test_seconds_are_summed_by_part_file_and_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test with the most processor seconds is first, with its share; a class belongs to its file."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    times.main([str(report)])
    by_part, by_file, by_test = capsys.readouterr().out.strip().split("\n\n")
    assert by_part.splitlines()[2:] == ["| outbox | 20 | 6 | 75 |", "| coordination | 2 | 2 | 25 |"]
    assert by_file.splitlines()[2:] == ["| real/test_outbox | 20 | 6 | 75 |", "| fast/test_claimer | 2 | 2 | 25 |"]
    assert by_test.splitlines()[3] == "| fast/test_claimer: test_a[1] | 2 | 1 | 15 |"


@pytest.mark.slow
def test_processor_seconds_contain_those_of_processes() -> None:
    """A process counts in the tree while it runs, and afterwards as a child that has ended."""
    tree_before_s, before_s = tree_s(), own_s()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        tree_after_s = tree_s()
        child.communicate(b"\n")
    assert tree_after_s - tree_before_s >= 0.2
    assert own_s() - before_s >= 0.2


def test_processes_that_end_with_a_test_do_not_make_its_seconds_negative() -> None:
    """A process without a parent takes its seconds with it. Its time until then belongs to earlier tests."""
    stash = {conftest._CLOCK: lambda: 5.0, conftest._BEFORE_S: 8.0}
    item = SimpleNamespace(config=SimpleNamespace(stash=stash), user_properties=[])
    call = SimpleNamespace(when="teardown")
    conftest.pytest_runtest_makereport(cast("pytest.Item", item), cast("pytest.CallInfo[None]", call))
    assert item.user_properties == [(PROPERTY, 0.0)]
    assert stash[conftest._BEFORE_S] == 5.0
