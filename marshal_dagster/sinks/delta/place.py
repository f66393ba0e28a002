"""Where a Delta table is: in a folder, or under a name in a catalog of the Spark session."""

import re
from dataclasses import dataclass
from typing import Final

from marshal_dagster.errors import ConfigurationError

_PART: Final = re.compile(r"`((?:[^`]|``)+)`|([^`.]+)")
_PATHS: Final = "delta"
"""Spark reads the name delta.`/data/orders` as a path."""


@dataclass(frozen=True, slots=True)
class DeltaPlace:
    """The folder of a table, or its name in a catalog."""

    path: str | None = None
    name: tuple[str, ...] = ()
    """The name's parts without quotes, from the catalog or schema to the table."""

    def __str__(self) -> str:
        return self.path if self.path is not None else ".".join(map(_shown, self.name))

    @property
    def sql(self) -> str:
        """The table in a statement of Spark SQL."""
        if self.path is not None:
            return f"delta.{_quoted(self.path)}"
        return ".".join(map(_quoted, self.name))

    @property
    def schema(self) -> str:
        """The catalog and schema of a named table in a statement of Spark SQL."""
        return ".".join(map(_quoted, self.name[:-1]))


def delta_place(path: str | None, table: str | None) -> DeltaPlace:
    """Return the place of a table that is given by exactly one of path and name.

    Raises:
        ConfigurationError: Both or none are given, or the name has no schema or is not one of Spark SQL.
    """
    if path is not None and table is not None:
        raise ConfigurationError("both path and table are given, but a Delta table has one of them: leave one out")
    if table is None:
        if not path:
            given = "path is empty" if path is not None else "neither path nor table is given"
            raise ConfigurationError(f"{given}; give path, the folder of the Delta table, or table, its name")
        return DeltaPlace(path=path)
    parts = _parts(table)
    if len(parts) < 2:  # noqa: PLR2004 - schema and table
        raise ConfigurationError(
            f"table: {table!r}; give catalog.schema.table or schema.table, with backquotes around a part that has a "
            "dot, so that the table does not depend on the session's current schema"
        )
    if len(parts) == 2 and parts[0].lower() == _PATHS:  # noqa: PLR2004 - as above
        raise ConfigurationError(f"table: {table!r} is a path to Spark. Give it as path, without {_PATHS}")
    return DeltaPlace(name=parts)


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a name without quotes, or nothing if it is not a name."""
    parts: list[str] = []
    position = 0
    while found := _PART.match(name, position):
        parts.append(found[1].replace("``", "`") if found[1] else found[2])
        position = found.end()
        if position == len(name):
            return tuple(parts)
        if name[position] != ".":
            return ()
        position += 1
    return ()


def _quoted(part: str) -> str:
    return f"`{part.replace('`', '``')}`"


def _shown(part: str) -> str:
    return _quoted(part) if set(part) & {"`", "."} else part
