"""Check that the table of sentences and tests is complete and equal to the one in the documentation."""

import re

from tests.fast.seed_protocol.sentences import NO_PROMISE, SECTIONS
from tools import seed_table


def test_the_page_is_what_would_be_written() -> None:
    """docs/verification/seed-protocol.md is up to date; to update it: python -m tools.seed_table."""
    assert seed_table.PAGE.read_text() == seed_table.render()


def test_every_test_here_is_of_a_sentence() -> None:
    """The table has each test of this folder."""
    folder = seed_table.TOP / seed_table.FOLDER
    names = [name for path in folder.glob("test_*.py") for name in re.findall(r"(?m)^def (test_\w+)", path.read_text())]
    here = [name for name in globals() if name.startswith("test_")]
    assert sorted(names) == sorted([*(test.__name__ for test, _ in seed_table.tests()), *here])


def test_each_test_is_named_for_its_sentence() -> None:
    """A test's name starts with section and place, and names are unique."""
    marked = list(seed_table.tests())
    assert [test.__name__ for test, one in marked if not test.__name__.startswith(one.prefix)] == []
    assert len({test.__name__ for test, _ in marked}) == len(marked)


def test_no_sentence_is_both_tested_and_said_to_promise_nothing() -> None:
    """Each section of the seed is present, and each sentence is in one of the two tables."""
    tested = {(one.section, one.number) for _, one in seed_table.tests()}
    untested = [(one.section, one.number) for one in NO_PROMISE]
    assert tested.isdisjoint(untested)
    assert len(set(untested)) == len(untested)
    assert {section for section, _ in [*tested, *untested]} == set(SECTIONS)
