"""Conversion of configured strings to enum members, with an error that lists the valid values."""

from enum import StrEnum
from typing import TypeVar

from marshal_dagster.errors import ConfigurationError

_Choice = TypeVar("_Choice", bound=StrEnum)


def enum_member(kind: type[_Choice], field: str, value: str) -> _Choice:
    """Return the member of `kind` whose value is `value`.

    Raises `ConfigurationError` for any other value. The error names `field` and lists all values of `kind`.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigurationError(f"{field}: {value!r}; give {' or '.join(kind)}") from None
