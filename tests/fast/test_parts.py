"""The parts of the test suite cover all of its files."""

import pytest

from tests.parts import PARTS, files_of, main, without_part


@pytest.mark.parametrize("folder", ["fast", "real"])
def test_each_file_belongs_to_a_part(folder: str) -> None:
    """A new file of tests must be given to a part."""
    assert without_part(folder) == []


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_files(part: str) -> None:
    """`make test` runs both suites of a part."""
    assert files_of(part, "fast")
    assert files_of(part, "real")


def test_the_command_prints_the_files_of_a_part() -> None:
    """It is what the Makefile gives to pytest."""
    assert "test_sink_files.py" in {path.name for path in main(["sinks", "fast"])}
