"""The API reference shows each field with its description, and hides members for internal use."""

from pathlib import Path
from typing import Any

import pytest

griffe = pytest.importorskip("griffe")

from tools import api_reference  # noqa: E402 - it imports griffe, which not every environment has

LIBRARY = Path(__file__).parents[2] / "marshal_dagster"


def class_of(name: str, *extensions: object) -> Any:  # noqa: ANN401 - griffe is optional
    """Return the class with this name (module and class within the package), parsed from its source."""
    module, _, kind = name.rpartition(".")
    path = LIBRARY.joinpath(*module.split(".")).with_suffix(".py")
    found = griffe.Extensions(*extensions)
    return griffe.visit(f"marshal_dagster.{module}", filepath=path, code=path.read_text(), extensions=found)[kind]


@pytest.mark.parametrize("name", api_reference.INTERNAL)
def test_each_internal_member_exists_and_is_hidden(name: str) -> None:
    """Each member in the table exists, and the extension hides it."""
    names = set(api_reference.INTERNAL[name].split())
    assert names <= class_of(name).members.keys()
    assert not names & class_of(name, api_reference.InternalMembers()).members.keys()


def test_a_field_is_shown_with_its_description_and_default() -> None:
    """Both are read from the class itself, so constants and computed texts are shown, too."""
    resource = class_of("resources.outbox.OutboxResource", api_reference.FieldDocs())
    outbox, dsn = resource.members["outbox"], resource.members["dsn"]
    assert (outbox.docstring is not None, outbox.value) == (True, "'outbox'")
    assert (dsn.docstring is not None, dsn.value) == (True, None)


def test_a_shared_field_is_shown_with_its_description_and_default() -> None:
    """A field that several classes share as a module constant is shown like any other."""
    wait_s = class_of("jobs.admin.PositionsConfig", api_reference.FieldDocs()).members["wait_s"]
    assert (wait_s.docstring is not None, wait_s.value) == (True, "300.0")
