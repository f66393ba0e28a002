"""Check how column names are compared, with and without case, in each place where Python looks up a column."""

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks import check_columns
from marshal_dagster.sinks.kafka.records import check_record_columns
from marshal_dagster.spark.column_names import check_names, check_nested_names, name_key

KINDS = {"partition": IntegerType(), "offset": LongType()}


def schema(*names: str) -> StructType:
    """Return a schema with columns of these names."""
    return StructType([StructField(name, KINDS.get(name.lower(), StringType())) for name in names])


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("Offset", "oFFSET", True),
        ("ÄÖ", "äö", True),
        ("\u017f", "S", True),
        ("İ", "i", True),
        ("ß", "SS", False),
        ("a", "b", False),
    ],
)
def test_names_are_compared_as_java_does(one: str, other: str, are_one: bool) -> None:
    """Case-insensitive names are compared character by character, as `String.equalsIgnoreCase` does."""
    assert (name_key(one, case_sensitive=False) == name_key(other, case_sensitive=False)) is are_one
    assert name_key(one, case_sensitive=True) == one


def test_two_columns_of_one_name_are_refused() -> None:
    """Two columns that the session treats as one name are refused, in case-insensitive and case-sensitive sessions."""
    with pytest.raises(
        ConfigurationError, match="the result's columns 'town' and 'Town' are the same name in this session"
    ):
        check_columns(schema("partition", "town", "Town"), ())
    check_columns(schema("partition", "town", "Town"), (), case_sensitive=True)
    with pytest.raises(ConfigurationError, match="'town' and 'town' are the same name"):
        check_columns(schema("partition", "town", "town"), (), case_sensitive=True)


@pytest.mark.parametrize("name", ["Marshal_Range", "MARSHAL_RANGE"])
def test_a_reserved_name_is_refused_in_any_case(name: str) -> None:
    """A case-insensitive session refuses each spelling of the name; a case-sensitive session allows other spellings."""
    with pytest.raises(ConfigurationError, match=f"the result's columns {name} are the sink's own"):
        check_columns(schema("partition", name), {"marshal_range"})
    check_columns(schema("partition", name), {"marshal_range"}, case_sensitive=True)


def test_the_messages_columns_are_spelt_as_they_were_read() -> None:
    """`Offset` is refused where the session treats it as `offset`, because Python code would not find the column."""
    with pytest.raises(ConfigurationError, match=r"this session treats 'Offset' as 'offset'.*: rename 'Offset'"):
        check_columns(schema("partition", "Offset"), ())
    check_columns(schema("partition", "offset", "Offset"), (), case_sensitive=True)


def test_a_records_columns_are_spelt_as_a_sink_knows_them() -> None:
    """Columns of a Kafka record must be spelt as the sink spells them."""
    value = StructType([StructField("partition", IntegerType()), StructField("Value", BinaryType())])
    with pytest.raises(ConfigurationError, match="this session treats 'Value' as 'value'"):
        check_record_columns(value, "orders")
    with pytest.raises(ConfigurationError, match="no column 'value'"):
        check_record_columns(value, "orders", case_sensitive=True)


def test_fields_within_a_column_are_compared_too() -> None:
    """Names of nested fields are compared too, at any depth."""
    inner = schema("id", "ID")
    for kind in (inner, ArrayType(inner), MapType(StringType(), inner), schema("x").add("y", ArrayType(inner))):
        with pytest.raises(ConfigurationError, match="its fields 'id' and 'ID' are the same name"):
            check_nested_names("value", kind, case_sensitive=False)
        check_nested_names("value", kind, case_sensitive=True)


def test_no_names_clash() -> None:
    """Names without a conflict are accepted."""
    check_names(["partition", "offset", "value"], ["partition", "offset"], case_sensitive=False)
