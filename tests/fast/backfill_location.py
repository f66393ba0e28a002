"""A code location in the process of a test, which puts its definitions here."""

from typing import Any

DEFINITIONS: Any = None


def definitions() -> Any:  # noqa: ANN401 - Dagster's own type, given by the test
    """Return the definitions that the test has set."""
    return DEFINITIONS
