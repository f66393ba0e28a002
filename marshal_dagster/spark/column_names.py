"""Comparison of column names like a Spark session does it: by default `Offset` and `offset` are the same name.

Sinks and decoding use it to reject names that Spark would confuse.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType

_CASE_SENSITIVE: Final = "spark.sql.caseSensitive"


def is_case_sensitive(spark: "SparkSession | None") -> bool:
    """Return whether the session distinguishes names that differ only in case; False without a session."""
    return spark is not None and str(spark.conf.get(_CASE_SENSITIVE, "false")).strip().lower() == "true"


def name_key(name: str, *, case_sensitive: bool) -> str:
    """Return a key that is equal for names that are equal in the session, like Java's `equalsIgnoreCase`."""
    return name if case_sensitive else "".join(map(_folded, name))


def check_names(
    names: Iterable[str], known: Collection[str] = (), *, case_sensitive: bool, what: str = "the result's columns"
) -> None:
    """Raise `ConfigurationError` if two of `names` are equal, or one differs from `known` only in case.

    `known` are the names that this library reads or writes. A column that the session treats as one of them must have
    exactly that name, because Python compares names exactly.
    """
    wanted = {name_key(name, case_sensitive=case_sensitive): name for name in known}
    found: dict[str, str] = {}
    for name in names:
        key = name_key(name, case_sensitive=case_sensitive)
        if key in found:
            raise ConfigurationError(
                f"{what} {found[key]!r} and {name!r} are the same name in this session: rename one of them"
            )
        found[key] = name
        if wanted.get(key, name) != name:
            raise ConfigurationError(
                f"{what}: this session treats {name!r} as {wanted[key]!r}, which this library uses: rename {name!r}"
            )


def check_nested_names(name: str, data_type: "DataType", *, case_sensitive: bool) -> None:
    """Raise `ConfigurationError` if a struct in column `name` has two fields with the same name in the session."""
    from pyspark.sql import types as t

    match data_type:
        case t.StructType():
            check_names(data_type.names, case_sensitive=case_sensitive, what=f"column {name!r}: its fields")
            for field in data_type.fields:
                check_nested_names(f"{name}.{field.name}", field.dataType, case_sensitive=case_sensitive)
        case t.ArrayType():
            check_nested_names(name, data_type.elementType, case_sensitive=case_sensitive)
        case t.MapType():
            check_nested_names(name, data_type.keyType, case_sensitive=case_sensitive)
            check_nested_names(name, data_type.valueType, case_sensitive=case_sensitive)


def _folded(character: str) -> str:
    upper = character.upper()
    lower = (upper if len(upper) == 1 else character).lower()
    return lower[0]  # of İ, for which Java compares only the first character
