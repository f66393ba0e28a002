"""Values that are one of a few names."""

from enum import StrEnum
from typing import TypeVar

from marshal_dagster.errors import ConfigurationError

_Choice = TypeVar("_Choice", bound=StrEnum)


def enum_member(kind: type[_Choice], field: str, value: str) -> _Choice:
    """Give the one of this name. Raises `ConfigurationError`, which names `field` and all that there are."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigurationError(f"{field}: {value!r}; give {' or '.join(kind)}") from None
