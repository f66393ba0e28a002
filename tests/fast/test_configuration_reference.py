"""Check that docs/reference/configuration.md has every option, with its unit and default as in the code."""

import enum
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pytest

import marshal_dagster

pytest.importorskip("griffe")

from tools import configuration_reference

PACKAGE = Path(marshal_dagster.__file__).parent


class Colour(enum.Enum):
    """An option's values."""

    RED = "red"


def paint(colour: Colour | str = Colour.RED, *, wait_s: float = 2.0, partitions: Sequence[int] | None = None) -> None:
    """Paint.

    Args:
        colour: The colour of
            the paint.
        wait_s: How long to wait.
        partitions: What to paint (default: all (of them)).
    """


class Policy(enum.Enum):
    """An option's values, which are numbers without a meaning."""

    KEEP = enum.auto()
    DROP = enum.auto()


class Answers(TypedDict, total=False):
    """Options that a caller may leave out."""

    loud: bool
    """Whether it is loud (default: true)."""
    slow: bool
    """Whether it is slow (default: it is fast)."""


def dip(
    policy: Policy = Policy.KEEP,
    colours: tuple[Colour, ...] = (Colour.RED,),
    without: frozenset[str] = frozenset(),
    path: str | os.PathLike[str] | None = None,
    brush: "Brush | None" = None,
) -> None:
    """Dip.

    Args:
        policy: The policy.
        colours: The colours.
        without: The exceptions.
        path: The path.
        brush: The brush.
    """


def count(cows: int = 1) -> None:
    """Count.

    Args:
        cows: The cows.
    """


@dataclass
class Brush:
    """A brush."""

    wait_s: float
    """How long to dry."""
    soft: bool = False


ENDINGS = ("Sink", "Options", "Request", "Settings", "Registry")
"""How the names of classes end whose parameters are options."""


def public_owners() -> Iterator[str]:
    """Yield the public names that take options: configs, functions, sinks and options of batches."""
    for name in marshal_dagster.__all__:
        value = getattr(marshal_dagster, name)
        if inspect.isfunction(value) or hasattr(value, "model_fields"):
            yield name
        if inspect.isclass(value) and name.endswith(ENDINGS) and not hasattr(value, "model_fields"):
            yield name


def test_the_page_is_up_to_date() -> None:
    """docs/reference/configuration.md is generated; to update it: python -m tools.configuration_reference."""
    assert configuration_reference.PAGE.read_text(encoding="utf-8") == configuration_reference.render()


def test_every_public_name_with_options_is_on_the_page() -> None:
    """Each one has a table, or a reason why the page leaves it out."""
    shown = {owner.__name__ for owners in configuration_reference.sections().values() for owner in owners}
    assert set(public_owners()) - shown == configuration_reference.WITHOUT_OPTIONS.keys()


@pytest.mark.slow
def test_every_environment_variable_is_on_the_page() -> None:
    """Each variable that a string of the code names as a whole is in the table."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    constants = set(re.findall(r"^ *_?(MARSHAL_[A-Z_]+)\b(?: =|:)", source, re.MULTILINE))
    named = set(re.findall(r"(?<![\w.])MARSHAL_[A-Z]+(?:_[A-Z]+)*\b(?!\.\.\.)", source)) - constants
    assert named - {name for name, _, _ in configuration_reference.variables()} == set()


def test_an_option_has_type_unit_default_and_meaning() -> None:
    """Enums show their values, and the default that a description states replaces None."""
    assert [vars_of(option) for option in configuration_reference.options_of(paint)] == [
        ("colour", "`red`", "", "`red`", "The colour of the paint."),
        ("wait_s", "float", "seconds", "2", "How long to wait."),
        ("partitions", "sequence of int", "partition numbers", "all (of them)", "What to paint."),
    ]


def test_a_boolean_has_the_default_that_its_description_states() -> None:
    """A boolean that may be left out is false, unless its description states that it is true."""
    assert [(option.default, option.about) for option in configuration_reference.options_of(Answers)] == [
        ("true", "Whether it is loud."),
        ("false", "Whether it is slow (default: it is fast)."),
    ]


def test_types_and_defaults_are_names_that_a_user_writes() -> None:
    """An enum of numbers shows its members, a collection its values, and no type ends in None."""
    assert [(option.kind, option.default) for option in configuration_reference.options_of(dip)] == [
        ("`Policy.KEEP`, `Policy.DROP`", "`Policy.KEEP`"),
        ("tuple of `red`", "`red`"),
        ("frozenset of str", "-"),
        ("str or path", "-"),
        ("Brush", "-"),
    ]


def vars_of(option: configuration_reference.Option) -> tuple[str, ...]:
    """Return the cells of an option's row."""
    return option.name, option.kind, option.unit, option.default, option.about


def test_a_number_without_a_unit_is_an_error() -> None:
    """The name of the option must end with a unit, or the tool must know it."""
    with pytest.raises(ValueError, match=r"count\.cows is a number without a unit"):
        configuration_reference.options_of(count)


def test_an_option_without_a_description_is_an_error() -> None:
    """The docstring below the field is missing."""
    with pytest.raises(ValueError, match=r"Brush\.soft has no description"):
        configuration_reference.options_of(Brush)
