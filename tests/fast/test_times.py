"""`python -m tests.times` prints where the time of the tests goes."""

from pathlib import Path

import pytest

from tests import times

REPORT = """<testsuites><testsuite>
<testcase classname="tests.fast.test_claimer" name="test_a[1]" time="1.5"/>
<testcase classname="tests.fast.test_claimer.TestInClass" name="test_b" time="0.5"/>
<testcase classname="tests.real.test_outbox" name="test_c" time="6"/>
</testsuite></testsuites>"""


def test_seconds_are_summed_by_part_file_and_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest is first, with its share; a class belongs to its file."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    times.main([str(report)])
    by_part, by_file, by_test = capsys.readouterr().out.strip().split("\n\n")
    assert by_part.splitlines()[2:] == ["| outbox | 6 | 75 |", "| coordination | 2 | 25 |"]
    assert by_file.splitlines()[2:] == ["| real/test_outbox | 6 | 75 |", "| fast/test_claimer | 2 | 25 |"]
    assert by_test.splitlines()[3] == "| fast/test_claimer: test_a[1] | 2 | 19 |"
