"""Session settings that silently change Spark's conversions, and the values that this library needs.

A session may have such a setting because of older code. If an option of a conversion can fix the result, the conversion
passes that option. All other settings are listed here, and sessions with another value are rejected.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNKNOWN: Final = "SQL_CONF_NOT_FOUND"
Settings = Mapping[str, tuple[str, ...]]
"""For each setting, the values with which a conversion has the right result; the first is Spark's default."""

_TRUE, _FALSE = ("true",), ("false",)
_CORRECTED = ("CORRECTED",)

TEXT_TIMES: Final[Settings] = {"spark.sql.legacy.timeParserPolicy": _CORRECTED}
"""For conversions that read or write dates and times as text."""
JSON_SCHEMAS: Final[Settings] = {"spark.sql.variant.allowDuplicateKeys": _FALSE}
JSON_VALUES: Final[Settings] = {
    **TEXT_TIMES,
    **JSON_SCHEMAS,
    "spark.sql.legacy.json.allowEmptyString.enabled": _FALSE,
    "spark.sql.json.enableExactStringParsing": _TRUE,
}
JSON_WITHOUT_VARIANTS: Final[Settings] = {"spark.sql.json.enablePartialResults": _TRUE}
"""For JSON values in Spark 3.5, which has no variants."""
DDL_SCHEMAS: Final[Settings] = {"spark.sql.timestampType": ("TIMESTAMP_LTZ",)}
"""For schemas in DDL text, where `timestamp` otherwise means another type."""
AVRO_VALUES: Final[Settings] = {"spark.sql.legacy.avro.allowIncompatibleSchema": _FALSE}
CSV_FILES: Final[Settings] = {**TEXT_TIMES, "spark.sql.legacy.nullValueWrittenAsQuotedEmptyStringCsv": _FALSE}
JSON_FILES: Final[Settings] = {**TEXT_TIMES, "spark.sql.legacy.json.allowEmptyString.enabled": _FALSE}
AVRO_FILES: Final[Settings] = {"spark.sql.avro.datetimeRebaseModeInWrite": _CORRECTED}
PARQUET_FILES: Final[Settings] = {
    "spark.sql.parquet.outputTimestampType": ("INT96", "TIMESTAMP_MICROS"),
    "spark.sql.parquet.datetimeRebaseModeInWrite": _CORRECTED,
    "spark.sql.parquet.int96RebaseModeInWrite": _CORRECTED,
}
"""Also for the files of Delta tables."""
GREGORIAN_DATES: Final[Mapping[str, str]] = dict.fromkeys(
    (
        "spark.sql.legacy.timeParserPolicy",
        "spark.sql.avro.datetimeRebaseModeInWrite",
        "spark.sql.parquet.datetimeRebaseModeInWrite",
        "spark.sql.parquet.int96RebaseModeInWrite",
    ),
    "CORRECTED",
)
"""Spark 4's defaults, which Spark 3.5 must be given."""
QUOTED_NAMES: Final[Settings] = {"spark.sql.parser.quotedRegexColumnNames": _FALSE}
"""For columns that are selected from a frame by their quoted name."""


def check_settings(spark: "SparkSession | None", needed: Settings, what: str) -> None:
    """Raise `ConfigurationError` if the session has another value than those `needed` for `what`.

    Each setting costs one call to the session's JVM or server, but no Spark job. Nothing is checked without a session.
    """
    if spark is None:
        return
    for name, allowed in needed.items():
        value = _value_of(spark, name, allowed[0])
        if value.lower() not in {one.lower() for one in allowed}:
            raise ConfigurationError(
                f"{what}: with {name}={value} in this session Spark silently changes values, so nothing was read "
                f"or written. Set it to {' or '.join(allowed)}: spark.conf.set({name!r}, {allowed[0]!r})"
            )


def settings_of(spark: "SparkSession") -> Mapping[str, str]:
    """Return the settings that a session has been given, without those whose values Spark hides."""
    if (settings := getattr(spark.conf, "getAll", None)) is not None:  # from Spark 4.0 on
        return dict(settings)
    return {row["key"]: row["value"] for row in spark.sql("SET").collect() if "(redacted)" not in row["value"]}


def _value_of(spark: "SparkSession", name: str, default: str) -> str:
    """Return the value of a setting, also if it was set by an older name of the setting."""
    try:
        return str(spark.conf.get(name)).strip()  # with a default Spark would ignore older names
    except Exception as error:
        if _UNKNOWN in str(error):  # a release without this setting
            return default
        raise
