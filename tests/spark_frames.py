"""Frames of a few rows that cost Spark little."""

from collections.abc import Iterable
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def local_frame(spark: "SparkSession", rows: Iterable[tuple[Any, ...]], schema: "StructType | str") -> "DataFrame":
    """Return a frame of these rows, which Spark itself holds.

    `createDataFrame` of a list would start Python workers for each evaluation.
    """
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.pandas.types import to_arrow_schema

    if not hasattr(DataFrame, "toArrow"):  # Spark 3.5
        return spark.createDataFrame(list(rows), schema)

    if isinstance(schema, str):
        schema = spark.createDataFrame([], schema).schema
    # From Spark 4.2 on, timestamps need a time zone.
    zoned: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    names = schema.fieldNames()
    listed = [dict(zip(names, row, strict=True)) for row in rows]
    return spark.createDataFrame(pa.Table.from_pylist(listed, to_arrow_schema(schema, **zoned)), schema)
