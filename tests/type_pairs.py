"""Values of each Spark type, for tests that write them to columns of each type of a database."""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from pyspark.sql import types as t

LARGE: Final = Decimal("9" * 38)
SMALL: Final = Decimal("-0.000000000000000001")


@dataclass(frozen=True, slots=True)
class Source:
    """A Spark type, and values of it."""

    data_type: t.DataType
    values: tuple[tuple[str, Any], ...]
    """Each value in Spark's SQL, and its meaning: a number, a truth value, bytes, what JSON has, or the text by which
    databases name it."""

    def expression(self, offset: str = "offset") -> str:
        """Return SQL of the value whose index is the offset, or null."""
        cases = " ".join(f"WHEN {index} THEN {value}" for index, (value, _) in enumerate(self.values))
        return f"CASE {offset} {cases} END"


def _cast(kind: str, *values: Any) -> tuple[tuple[str, Any], ...]:  # noqa: ANN401 - numbers
    return tuple((f"CAST('{value}' AS {kind})", value) for value in values)


def _decimals(precision: int, scale: int, *values: str) -> Source:
    kind = t.DecimalType(precision, scale)
    return Source(kind, _cast(kind.simpleString(), *map(Decimal, values)))


FLOATS: Final = (float("nan"), float("inf"), float("-inf"))
_STRUCT: Final = t.StructType(
    [
        t.StructField("at", t.TimestampType()),
        t.StructField("local", t.TimestampNTZType()),
        t.StructField("n", t.DecimalType(38, 18)),
        t.StructField("d", t.DoubleType()),
        t.StructField("text", t.StringType()),
        t.StructField("bytes", t.BinaryType()),
        t.StructField("missing", t.LongType()),
    ]
)
_STRUCT_SQL: Final = (
    "named_struct('at', timestamp_micros(1729989000123456), 'local', TIMESTAMP_NTZ '2024-03-31 02:30:00.000001', "
    "'n', CAST('-1E-18' AS decimal(38, 18)), 'd', 4.9E-324D, 'text', 'M\u00fcller \"q\" \\\\', 'bytes', X'00FF', "
    "'missing', CAST(NULL AS bigint))"
)
SOURCES: Final[Mapping[str, Source]] = {
    "tinyint": Source(t.ByteType(), _cast("tinyint", -128, 127)),
    "smallint": Source(t.ShortType(), _cast("smallint", -(2**15), 2**15 - 1)),
    "int": Source(t.IntegerType(), _cast("int", 17, -(2**31), 2**31 - 1)),
    "bigint": Source(t.LongType(), _cast("bigint", 17, -(2**63), 2**53 + 1)),
    "float": Source(t.FloatType(), _cast("float", 0.1, 3.4028235e38, 1.4e-45, -0.0, *FLOATS)),
    "double": Source(t.DoubleType(), _cast("double", 0.1, 1.7976931348623157e308, 4.9e-324, -0.0, *FLOATS)),
    "decimal(5,2)": _decimals(5, 2, "999.99", "-0.01", "0.00"),
    "decimal(5,5)": _decimals(5, 5, "0.00001", "-0.99999"),
    "decimal(10,0)": _decimals(10, 0, "17", "-9999999999"),
    "decimal(38,0)": _decimals(38, 0, "17", str(LARGE)),
    "decimal(38,18)": _decimals(38, 18, str(SMALL), "99999999999999999999.999999999999999999"),
    "boolean": Source(t.BooleanType(), (("true", True), ("false", False))),
    "string": Source(
        t.StringType(),
        (
            ("''", ""),
            ("'M\u00fcller \U0001f600 \\\\N \\'q\\' \"d\" % %s {x}'", "M\u00fcller \U0001f600 \\N 'q' \"d\" % %s {x}"),
            ("'a\\t\\n\\r\\\\,b'", "a\t\n\r\\,b"),
            ("'NULL'", "NULL"),
            ("' yes'", " yes"),
            ("'a '", "a "),
            ("'a\\0b'", "a\0b"),
            ("string(X'4DFC')", None),
        ),
    ),
    "binary": Source(t.BinaryType(), (("X''", b""), ("X'00FF275C78'", b"\0\xff'\\x"))),
    "date": Source(
        t.DateType(),
        (
            ("DATE '1970-01-01'", "1970-01-01"),
            ("DATE '0001-01-01'", "0001-01-01"),
            ("DATE '1582-10-10'", "1582-10-10"),
            ("DATE '9999-12-31'", "9999-12-31"),
            ("date_add(DATE '0001-01-01', -1)", "0001-12-31 BC"),
            ("date_from_unix_date(2147483647)", "5881580-07-11"),
        ),
    ),
    "timestamp": Source(
        t.TimestampType(),
        (
            ("timestamp_micros(1729989000123456)", "2024-10-27 00:30:00.123456+00"),
            ("timestamp_micros(1729992600123456)", "2024-10-27 01:30:00.123456+00"),
            ("timestamp_micros(-1)", "1969-12-31 23:59:59.999999+00"),
            ("timestamp_micros(-62135596800000001)", "0001-12-31 23:59:59.999999+00 BC"),
            ("timestamp_micros(9223372036854775807)", "294247-01-10 04:00:54.775807+00"),
            ("timestamp_micros(-9223372036854775808)", "290309-12-21 19:59:05.224192+00 BC"),
        ),
    ),
    "timestamp_ntz": Source(
        t.TimestampNTZType(),
        (
            ("TIMESTAMP_NTZ '2024-03-31 02:30:00.000001'", "2024-03-31 02:30:00.000001"),
            ("TIMESTAMP_NTZ '0001-01-01 00:00:00'", "0001-01-01 00:00:00"),
            ("TIMESTAMP_NTZ '9999-12-31 23:59:59.999999'", "9999-12-31 23:59:59.999999"),
            ("TIMESTAMP_NTZ '-0044-03-15 12:00:00'", "0045-03-15 12:00:00 BC"),
            ("TIMESTAMP_NTZ '-290308-12-21 19:59:05.224192'", "290309-12-21 19:59:05.224192 BC"),
        ),
    ),
    "array<int>": Source(t.ArrayType(t.IntegerType()), (("array(1, NULL)", [1, None]), ("array()", []))),
    "array<timestamp>": Source(
        t.ArrayType(t.TimestampType()), (("array(timestamp_micros(-1))", ["1969-12-31T23:59:59.999999Z"]),)
    ),
    "array<double>": Source(
        t.ArrayType(t.DoubleType()),
        (("array(0.1D, double('NaN'), double('-Infinity'))", [Decimal("0.1"), "NaN", "-Infinity"]),),
    ),
    "map<string,bigint>": Source(
        t.MapType(t.StringType(), t.LongType()),
        (("map('a', 9007199254740993L, '', NULL)", {"a": 2**53 + 1, "": None}), ("map()", {})),
    ),
    "map<date,decimal>": Source(
        t.MapType(t.DateType(), t.DecimalType(38, 0)),
        (("map(DATE '0001-01-01', 99999999999999999999999999999999999999BD)", {"0001-01-01": int(LARGE)}),),
    ),
    "struct": Source(
        _STRUCT,
        (
            (
                _STRUCT_SQL,
                {
                    "at": "2024-10-27T00:30:00.123456Z",
                    "local": "2024-03-31T02:30:00.000001",
                    "n": SMALL,
                    "d": Decimal("4.9E-324"),
                    "text": 'M\u00fcller "q" \\',
                    "bytes": "AP8=",
                    "missing": None,
                },
            ),
        ),
    ),
}
"""The types that a sink writes, each with values."""

_NOT_WRITTEN: Final = (
    "DayTimeIntervalType",
    "YearMonthIntervalType",
    "CalendarIntervalType",
    "NullType",
    "VariantType",
)
UNWRITTEN: Final[Sequence[t.DataType]] = [getattr(t, name)() for name in _NOT_WRITTEN if hasattr(t, name)]
"""Types that no sink of a database writes, as far as this Spark has them."""


def is_same(source: str, meaning: object, found: str, target: str) -> bool:
    """Return whether a column has the value with a meaning.

    Args:
        source: The name of the Spark type.
        meaning: The value's meaning.
        found: The column's value as text. Bytes are hexadecimal.
        target: The column's type.
    """
    if target.startswith("char("):
        found = found.rstrip(" ")
    if isinstance(meaning, bool):
        return found == str(meaning).lower() if found.isalpha() else Decimal(found) == int(meaning)
    if isinstance(meaning, float):
        return _is_same_float(source, meaning, float(found), target)
    if isinstance(meaning, int | Decimal):
        return Decimal(found) == meaning
    if isinstance(meaning, bytes):
        return bytes.fromhex(found) == meaning
    if isinstance(meaning, list | dict):
        return bool(json.loads(found, parse_float=Decimal) == meaning)
    if source in {"date", "timestamp", "timestamp_ntz"}:
        found = re.sub(r"\.0+(?=$|[ +])", "", found)
    if source == "date":
        found = found.replace(" 00:00:00", "")
    return found == meaning


def _is_same_float(source: str, meaning: float, found: float, target: str) -> bool:
    if math.isnan(meaning) or math.isnan(found):
        return math.isnan(meaning) and math.isnan(found)
    if source == "float" and not target.startswith("double"):
        meaning, found = _single(meaning), _single(found)
    elif source == "float":
        meaning = _single(meaning)
    return meaning == found


def _single(number: float) -> float:
    """Return the number of 32 bits that is nearest."""
    return float(struct.unpack("f", struct.pack("f", number))[0])
