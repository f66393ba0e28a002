"""Session settings that change what Spark's conversions do without an error, and the values that ours need.

A session may have been given such a setting for older code. Where an option of the conversion can hold its result, the
conversion gives that option; each other setting is listed here, and a session with another value is refused.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNKNOWN: Final = "SQL_CONF_NOT_FOUND"
Settings = Mapping[str, tuple[str, ...]]
"""For each setting the values with which a conversion gives its one result; the first is Spark's default."""

_TRUE, _FALSE = ("true",), ("false",)
_CORRECTED = ("CORRECTED",)

TEXT_TIMES: Final[Settings] = {"spark.sql.legacy.timeParserPolicy": _CORRECTED}
"""For all that reads or writes dates and times as text."""
JSON_SCHEMAS: Final[Settings] = {"spark.sql.variant.allowDuplicateKeys": _FALSE}
JSON_VALUES: Final[Settings] = {
    **TEXT_TIMES,
    **JSON_SCHEMAS,
    "spark.sql.legacy.json.allowEmptyString.enabled": _FALSE,
    "spark.sql.json.enableExactStringParsing": _TRUE,
}
DDL_SCHEMAS: Final[Settings] = {"spark.sql.timestampType": ("TIMESTAMP_LTZ",)}
"""For schemas that are given as text: `timestamp` means another type otherwise."""
AVRO_VALUES: Final[Settings] = {"spark.sql.legacy.avro.allowIncompatibleSchema": _FALSE}
CSV_FILES: Final[Settings] = {**TEXT_TIMES, "spark.sql.legacy.nullValueWrittenAsQuotedEmptyStringCsv": _FALSE}
JSON_FILES: Final[Settings] = {**TEXT_TIMES, "spark.sql.legacy.json.allowEmptyString.enabled": _FALSE}
AVRO_FILES: Final[Settings] = {"spark.sql.avro.datetimeRebaseModeInWrite": _CORRECTED}
PARQUET_FILES: Final[Settings] = {
    "spark.sql.parquet.outputTimestampType": ("INT96", "TIMESTAMP_MICROS"),
    "spark.sql.parquet.datetimeRebaseModeInWrite": _CORRECTED,
    "spark.sql.parquet.int96RebaseModeInWrite": _CORRECTED,
}
"""For Delta's files, too."""
QUOTED_NAMES: Final[Settings] = {"spark.sql.parser.quotedRegexColumnNames": _FALSE}
"""For columns that are looked up in a frame by their quoted name."""


def check_settings(spark: "SparkSession | None", needed: Settings, what: str) -> None:
    """Raise `ConfigurationError` where the session has another value than those `needed` for `what`.

    Each setting costs a call to the session's JVM or server, and no Spark job. Rows without a session need none.
    """
    if spark is None:
        return
    for name, allowed in needed.items():
        value = _value_of(spark, name, allowed[0])
        if value.lower() not in {one.lower() for one in allowed}:
            raise ConfigurationError(
                f"{what}: with {name}={value} in this session Spark silently gives other values, so nothing was read "
                f"or written. Set it to {' or '.join(allowed)}: spark.conf.set({name!r}, {allowed[0]!r})"
            )


def _value_of(spark: "SparkSession", name: str, default: str) -> str:
    """Return a setting's value, also one that was given by an older name of the setting."""
    try:
        return str(spark.conf.get(name)).strip()  # with a default Spark would look under this name alone
    except Exception as error:
        if _UNKNOWN in str(error):  # a release without this setting
            return default
        raise
