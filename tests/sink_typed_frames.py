"""Frames with columns of given types for tests of database sinks, without Spark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import types as t


@dataclass(frozen=True)
class TypedFrame:
    """The parts of a DataFrame that a sink uses, with given types and rows."""

    schema: t.StructType
    given: Sequence[dict[str, Any]] | None

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """Return the rows. Evaluating a frame without rows fails."""
        assert self.given is not None, "the frame was evaluated"
        return self.given

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.schema.names)


def frame_of(name: str, kind: t.DataType, *values: object, partition: int = 0) -> TypedFrame:
    """Return a frame with rows of a partition from offset 0 on, whose column `name` has these values."""
    fields = [t.StructField("partition", t.IntegerType()), t.StructField("offset", t.LongType())]
    rows = [{"partition": partition, "offset": number, name: value} for number, value in enumerate(values)]
    return TypedFrame(t.StructType([*fields, t.StructField(name, kind)]), rows)
