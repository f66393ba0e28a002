"""Check that docs/reference/errors.md describes every public error class, and that no error is missing."""

import re

import pytest

import marshal_dagster
from marshal_dagster import errors
from tools import error_reference

PUBLIC = [kind for module in error_reference.PUBLIC_MODULES.values() for kind in error_reference.error_classes(module)]


class WellDescribedError(Exception):
    """Something happened.

    Meaning:
        Nothing was lost.

    Cause:
        A cause with
        two lines.

    Action:
        Do this.

    More:
        docs/how-to/use.md
        docs/operate/runbook.md#claimlosterror
    """

    count: int
    """How often."""


class NoActionError(Exception):
    """Something happened.

    Meaning:
        Nothing was lost.

    Cause:
        A cause.
    """


class EmptyCauseError(Exception):
    """Something happened.

    Meaning:
        Nothing was lost.

    Cause:

    Action:
        Do this.
    """


class LongSummaryError(Exception):
    """Something happened, and
    the first line continues.

    Meaning:
        Nothing was lost.

    Cause:
        A cause.

    Action:
        Do this.
    """  # noqa: D205 - the test needs this form


def test_the_page_is_up_to_date() -> None:
    """docs/reference/errors.md is generated from the docstrings; to update it: python -m tools.error_reference."""
    assert error_reference.PAGE.read_text(encoding="utf-8") == error_reference.render()


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_each_public_error_has_meaning_cause_and_action(kind: type[Exception]) -> None:
    """The class's section on the page has the three parts of its docstring."""
    page = error_reference.PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^##+ {kind.__name__}\n(.*?)(?=^##+ |\Z)", page, re.MULTILINE | re.DOTALL)
    entry = error_reference.entry_of(kind)
    assert entry.summary in section
    for title, text in (("Meaning", entry.meaning), ("Cause", entry.cause), ("Action", entry.action)):
        assert f"**{title}.** {text}\n" in section


def test_every_error_class_of_errors_py_is_exported() -> None:
    """`marshal_dagster` exports each class of errors.py, and no other exception."""
    assert error_reference.exported_errors() == {kind.__name__ for kind in error_reference.error_classes(errors)}
    assert all(issubclass(kind, marshal_dagster.MarshalError) for kind in PUBLIC)


@pytest.mark.thorough
def test_every_error_class_of_the_library_is_public_or_listed_as_internal() -> None:
    """Each class is on the page, or in `INTERNAL` with a reason; `INTERNAL` has no other entries."""
    internal = error_reference.defined_errors() - error_reference.public_errors()
    assert internal == error_reference.INTERNAL.keys()
    assert all(error_reference.INTERNAL.values())


@pytest.mark.thorough
def test_every_exception_that_the_library_raises_is_known() -> None:
    """Each `raise` names a class of the library, or a listed class with the reason for raising it."""
    own = {name.rpartition(".")[2] for name in error_reference.defined_errors()}
    listed = {name.rpartition(".")[2] for name in (*error_reference.SHOWN, *error_reference.HIDDEN)}
    assert error_reference.raised_names() - own == listed


def test_a_docstring_of_the_right_form_is_read() -> None:
    """All parts are read, with their line breaks; links and attributes too."""
    entry = error_reference.entry_of(WellDescribedError)
    assert (entry.summary, entry.meaning, entry.action) == ("Something happened.", "Nothing was lost.", "Do this.")
    assert entry.cause == "A cause with\ntwo lines."
    assert entry.more == ("docs/how-to/use.md", "docs/operate/runbook.md#claimlosterror")
    assert entry.attributes == {"count": ("int", "How often.")}


@pytest.mark.parametrize("kind", [NoActionError, EmptyCauseError, LongSummaryError, KeyError])
def test_a_docstring_of_another_form_is_refused(kind: type[Exception]) -> None:
    """If a part is missing or empty, or the summary has two lines, the error names the class."""
    with pytest.raises(ValueError, match=kind.__name__):
        error_reference.entry_of(kind)
