"""The Spark that is installed here, and the Maven packages that fit its version and its Scala.

Each package is listed with the version that was tested. A package works with every patch of a Spark version.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPARK_CORE: Final = re.compile(r"spark-core_(?P<scala>\d+\.\d+)-(?P<release>\d+\.\d+[^/]*)\.jar")
_MINOR: Final = re.compile(r"\d+\.\d+")
_KAFKA: Final = "org.apache.spark:spark-sql-kafka-0-10"
_AVRO: Final = "org.apache.spark:spark-avro"
_DELTA: Final = "io.delta:delta-spark"
_ICEBERG: Final = "org.apache.iceberg:iceberg-spark-runtime-{minor}"
_OF_SPARK: Final = {
    ("3.5", "2.12"): "3.5.3",
    ("3.5", "2.13"): "3.5.1",
    ("4.0", "2.13"): "4.0.0",
    ("4.1", "2.13"): "4.1.1",
    ("4.2", "2.13"): "4.2.0",
    ("4.3", "2.13"): "4.2.0",
}
_VERSIONS: Final[Mapping[str, Mapping[tuple[str, str], str]]] = {
    _KAFKA: _OF_SPARK,
    _AVRO: _OF_SPARK,
    _DELTA: {
        ("3.5", "2.12"): "3.3.2",
        ("3.5", "2.13"): "3.3.2",
        ("4.0", "2.13"): "4.0.0",
        # Delta Lake 4.1 and 4.2 call a constructor that Spark 4.1.4 and 4.2 lack, once a table's log has a checkpoint.
    },
    _ICEBERG: {
        ("3.5", "2.12"): "1.10.0",
        ("4.0", "2.13"): "1.10.1",
        ("4.1", "2.13"): "1.11.0",
    },
}
"""For each package, its tested version by Spark's version and Scala."""


@dataclass(frozen=True, slots=True)
class SparkBuild:
    """A version of Spark and the Scala that it was built with.

    Example:
        ```python
        delta_package(SparkBuild("3.5.9", "2.12"))  # io.delta:delta-spark_2.12:3.3.2
        ```
    """

    release: str
    """The version, such as `4.0.5` or `3.5.4-amzn-0`."""
    scala: str
    """The Scala version, such as `2.13`."""

    @property
    def minor(self) -> str:
        """The first two numbers of the version, such as `4.0`."""
        return minor_version(self.release)

    def __str__(self) -> str:
        return f"Spark {self.release} (Scala {self.scala})"


def minor_version(release: str) -> str:
    """Return the first two numbers of a version of Spark, such as `4.0` for `4.0.5`."""
    found = _MINOR.match(release)
    return found[0] if found else release


def kafka_package(build: SparkBuild | None = None) -> str:
    """Return the Maven coordinates of Spark's Kafka connector.

    Args:
        build: The Spark that loads it (default: the installed one).

    Returns:
        The coordinates, group:name:version.

    Raises:
        ConfigurationError: No tested version fits this Spark, or Spark is not installed.
    """
    return _package(_KAFKA, build, "pass `connector` with the Maven coordinates of that Spark's connector")


def avro_package(build: SparkBuild | None = None) -> str:
    """Return the Maven coordinates of Spark's Avro functions, for `fetch_connector` or `spark.jars.packages`.

    Args:
        build: The Spark that loads them (default: the installed one).

    Returns:
        The coordinates, group:name:version.

    Raises:
        ConfigurationError: No tested version fits this Spark, or Spark is not installed.
    """
    return _package(_AVRO, build, "name that Spark's own spark-avro in spark.jars.packages")


def delta_package(build: SparkBuild | None = None) -> str:
    """Return the Maven coordinates of Delta Lake, for `fetch_connector` or `spark.jars.packages`.

    Args:
        build: The Spark that loads it (default: the installed one).

    Returns:
        The coordinates, group:name:version.

    Raises:
        ConfigurationError: No tested version of Delta Lake fits this Spark, or Spark is not installed.
    """
    return _package(_DELTA, build, "use Spark 3.5 or 4.0")


def iceberg_package(build: SparkBuild | None = None) -> str:
    """Return the Maven coordinates of Iceberg's runtime for Spark, for `fetch_connector` or `spark.jars.packages`.

    `IcebergSink` does not need it. Spark needs it to read or maintain the table.

    Args:
        build: The Spark that loads it (default: the installed one).

    Returns:
        The coordinates, group:name:version.

    Raises:
        ConfigurationError: No tested version of the runtime fits this Spark, or Spark is not installed.
    """
    return _package(_ICEBERG, build, "read the table with pyiceberg, or with Spark 3.5 to 4.1")


def find_spark(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the Spark that PySpark starts: SPARK_HOME, else its own; None without PySpark."""
    named = environ.get("SPARK_HOME")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("pyspark")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def build_in(home: Path) -> SparkBuild | None:
    """Return which Spark is in a folder, by the names of its jars; None if there is none."""
    jars = sorted((home / "jars").glob("spark-core_*.jar"))
    core = next(filter(None, (_SPARK_CORE.fullmatch(jar.name) for jar in jars)), None)
    return SparkBuild(core["release"], core["scala"]) if core else None


def installed_build() -> SparkBuild:
    """Return which Spark PySpark starts, without importing it.

    Raises `ConfigurationError` if PySpark is not installed.
    """
    home = find_spark()
    found = build_in(home) if home else None
    if found is not None:
        return found
    try:
        return _usual_build(version("pyspark"))  # a client without Spark's jars
    except PackageNotFoundError as error:
        raise ConfigurationError("pyspark is not installed: pip install 'marshal-dagster[spark]'") from error


def session_build(spark: "SparkSession") -> SparkBuild:
    """Return which Spark a session runs. Of a Spark on another machine, the usual Scala is assumed."""
    release = spark.version
    home = find_spark()
    installed = build_in(home) if home else None
    return installed if installed and installed.minor == minor_version(release) else _usual_build(release)


def _usual_build(release: str) -> SparkBuild:
    return SparkBuild(release, "2.12" if release.startswith("3.") else "2.13")


def _package(name: str, build: SparkBuild | None, otherwise: str) -> str:
    build = build or installed_build()
    versions = _VERSIONS[name]
    if (build.minor, build.scala) not in versions:
        known = ", ".join(f"{minor} (Scala {scala})" for minor, scala in versions)
        package = name.removesuffix("-{minor}")
        raise ConfigurationError(f"no {package} is known for {build}, only for {known}: {otherwise}")
    return f"{name.format(minor=build.minor)}_{build.scala}:{versions[build.minor, build.scala]}"
