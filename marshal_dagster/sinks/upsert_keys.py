"""The columns by which rows replace each other in a table with one row for each key (decision 20)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

WITHOUT_ORDER: Final = (
    "Only messages of one partition have an order: give the messages the table's key as their Kafka key, or the sink "
    "`order_by` with a column that decides, such as a version or a time"
)


class WriteMode(StrEnum):
    """What a sink does with a row whose key the table has."""

    APPEND = "append"
    """Each row of the result is added."""
    UPSERT = "upsert"
    """The table has one row for each key. A newer row replaces it."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The columns by which rows replace each other, by the result's names."""

    columns: Sequence[str]
    order_by: str | None

    def check(self, schema: "StructType") -> None:
        """Raise `ConfigurationError` if rows of this schema cannot replace each other."""
        order = [] if self.order_by is None else [self.order_by]
        if missing := [name for name in (*self.columns, *order, OFFSET_COLUMN) if name not in schema.names]:
            raise ConfigurationError(
                f"the result lacks the columns {', '.join(missing)}, which mode='upsert' needs to find the newest row "
                "of each key. Keep them in the result"
            )
        for name in self.columns:
            if isinstance(schema[name].dataType, t.ArrayType | t.MapType | t.StructType | t.FloatType | t.DoubleType):
                raise ConfigurationError(
                    f"keys: column {name!r} has type {schema[name].dataType.simpleString()}, of which equal values "
                    "cannot be found exactly. Use a column of whole numbers, decimals, strings, bytes, dates or times"
                )
        for name in order:
            kind = schema[name].dataType
            if not isinstance(kind, t.IntegralType | t.DecimalType | t.DateType | t.TimestampType | t.TimestampNTZType):
                raise ConfigurationError(
                    f"order_by: column {name!r} has type {kind.simpleString()}, whose order depends on the database. "
                    "Use a column of whole numbers, decimals, dates or times"
                )


def keys_of(mode: WriteMode | str, keys: Sequence[str], order_by: str | None, *, shared_by_groups: bool) -> Keys | None:
    """Return the keys of a sink's options, None if it appends.

    Raises:
        ConfigurationError: The options contradict each other.
    """
    if enum_member(WriteMode, "mode", mode) is WriteMode.APPEND:
        if keys or order_by is not None:
            raise ConfigurationError("keys and order_by belong to mode='upsert': set the mode, or leave them out")
        return None
    if isinstance(keys, str) or not keys or len(set(keys)) < len(keys):
        raise ConfigurationError(f"keys: {keys!r}; mode='upsert' needs a list of the key's columns, each one once")
    if order_by in keys or order_by in {PARTITION_COLUMN, OFFSET_COLUMN}:
        why = "one of the keys" if order_by in keys else "no order between partitions"
        raise ConfigurationError(f"order_by: {order_by!r} is {why}, so it decides nothing. Use another column")
    if shared_by_groups:
        raise ConfigurationError(
            "mode='upsert' cannot be combined with shared_by_groups, because groups would replace each other's rows. "
            "Give each group a table"
        )
    return Keys(tuple(keys), order_by)
