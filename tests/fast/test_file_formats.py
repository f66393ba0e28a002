"""Check which options and types a file sink accepts, without Spark."""

import pytest
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks import FileSink
from marshal_dagster.sinks.files.formats import as_nullable, check_writable, lost_in


@pytest.mark.parametrize(
    ("format_name", "name"),
    [
        ("csv", "nullValue"),
        ("csv", "quoteAll"),
        ("csv", "MULTILINE"),
        ("json", "timestampFormat"),
        ("json", "ignoreNullFields"),
        ("avro", "avroSchema"),
        ("parquet", "ignoreMissingFiles"),
    ],
)
def test_options_that_would_lose_values_are_refused(format_name: str, name: str) -> None:
    """The error is raised when the sink is created, and has the option's name as given."""
    with pytest.raises(ConfigurationError, match=f"^options {name}: a file sink sets these itself"):
        FileSink("/nowhere", format_name, {name: "x"})


@pytest.mark.parametrize("separator", ["", '"', "\n", "a\r"])
def test_a_separator_cannot_be_a_quote_or_a_line_break(separator: str) -> None:
    """Rows and fields could not be distinguished."""
    with pytest.raises(ConfigurationError, match="must be a separator without quotes and line breaks"):
        FileSink("/nowhere", "csv", {"sep": separator})


def test_other_options_are_the_users() -> None:
    """The writer gets all other options."""
    assert FileSink("/nowhere", "csv", {"header": "true", "sep": ";", "compression": "gzip"}).options["sep"] == ";"


def test_a_column_that_a_format_does_not_keep_is_named() -> None:
    """The depth of the type within the column does not matter."""
    kept = t.StructType().add("a", t.ArrayType(t.MapType(t.IntegerType(), t.StringType())))
    schema = t.StructType().add("partition", t.IntegerType()).add("kept", kept)
    with pytest.raises(ConfigurationError, match=r"^column 'kept': it has a map whose keys are of type int"):
        check_writable(None, "json", schema)
    check_writable(None, "parquet", schema)


@pytest.mark.parametrize("format_name", ["orc", "avro"])
def test_a_collation_that_a_format_does_not_keep_is_refused(format_name: str) -> None:
    """Spark writes such an ORC file and cannot read it."""
    schema = t.StructType().add("partition", t.IntegerType()).add("name", t.ArrayType(t.StringType("UTF8_LCASE")))
    with pytest.raises(ConfigurationError, match=r"^column 'name': it has the type string collate UTF8_LCASE"):
        check_writable(None, format_name, schema)
    for kept in ("parquet", "json"):
        check_writable(None, kept, schema)
    check_writable(None, format_name, t.StructType().add("name", t.StringType()))


SEEN = t.ArrayType(t.StructType().add("at", t.TimestampType()))


@pytest.mark.parametrize(
    ("format_name", "kind", "options", "words"),
    [
        ("csv", t.IntegerType(), None, "in which '' is read as null"),
        ("csv", t.IntegerType(), {}, None),
        ("json", SEEN, None, "in which times have no microseconds"),
        ("json", t.MapType(t.StringType(), t.TimestampNTZType()), None, "in which times have no microseconds"),
        ("json", SEEN, {}, None),
        ("json", t.IntegerType(), None, None),
        ("parquet", SEEN, None, None),
        ("orc", SEEN, {}, "in which timestamps are other ones where a JVM has another time zone"),
        ("orc", t.TimestampNTZType(), {}, None),
    ],
)
def test_files_that_may_have_lost_values_are_recognised(
    format_name: str, kind: t.DataType, options: dict[str, str] | None, words: str | None
) -> None:
    """Format, types and recorded options decide."""
    found = lost_in(format_name, t.StructType().add("x", kind).json(), options)
    assert found is None if words is None else words in str(found)


def test_types_are_compared_as_they_are_read() -> None:
    """Spark's readers make every type nullable."""
    strict = t.StructType().add("x", t.StructType().add("a", t.ArrayType(t.LongType(), False), False), False)
    loose = t.StructType().add("x", t.StructType().add("a", t.ArrayType(t.LongType())))
    assert as_nullable(strict) == loose
