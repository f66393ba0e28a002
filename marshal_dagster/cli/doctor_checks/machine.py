"""Check what is installed on this machine: packages, Java, Spark and its connector to Kafka."""

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from marshal_dagster._internal.extras import Extra
from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.cli.doctor_checks.finding import Finding, not_checked, ok, problem
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.connector import connector_jars
from marshal_dagster.spark.packages import build_in, find_spark, kafka_package

_PACKAGES: Final = ("marshal-dagster", "dagster", "confluent-kafka", "pydantic")
_OPTIONAL: Final = ("pyspark", "dagster-pyspark", "psycopg", "protobuf")
_WITHOUT_SPARK: Final = f"processes that read batches with Spark need it: {Extra.SPARK.command}"


def check_machine(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check what is installed here: packages, Java, Spark and its connector to Kafka."""
    yield _versions()
    home = find_spark(environ)
    yield _java(environ, is_needed=home is not None)
    yield _spark(environ, home) if home else not_checked("spark", f"PySpark is not installed; {_WITHOUT_SPARK}")


def _versions() -> Finding:
    found, missing = [f"Python {platform.python_version()}"], []
    for package in (*_PACKAGES, *_OPTIONAL):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing += [package] if package in _PACKAGES else []
    if not missing:
        return ok("versions", ", ".join(found))
    return problem(
        "versions",
        f"not installed: {', '.join(missing)}",
        "marshal-dagster does not work without them",
        "pip install --upgrade marshal-dagster",
    )


def _java(environ: Mapping[str, str], *, is_needed: bool) -> Finding:
    try:
        java = find_java(environ)
    except ConfigurationError as error:
        if not is_needed and not environ.get("JAVA_HOME"):
            return not_checked("java", f"no Java here, and no Spark that needs one; {_WITHOUT_SPARK}")
        return problem(
            "java",
            str(error),
            "Spark, and a Kafka for this machine, run on Java 17 or newer",
            "apt-get install openjdk-17-jre-headless (or your system's way), or export JAVA_HOME=/path/to/java-17",
        )
    return ok("java", f"Java {java.version} at {java.executable}")


def _spark(environ: Mapping[str, str], home: Path) -> Finding:
    """Check the names of Spark's jars: importing PySpark would take a second, and a session a JVM."""
    build = build_in(home)
    fix = "unset SPARK_HOME" if environ.get("SPARK_HOME") else "pip install --upgrade 'marshal-dagster[spark]'"
    if build is None:
        return problem("spark", f"no Spark in {home}", "batches are read with Spark", fix)
    found = f"{build} in {home}"
    try:
        connector = kafka_package(build)
    except ConfigurationError as error:
        return problem("spark", f"{found}; {error}", "without a connector Spark cannot read Kafka", fix)
    folder = cache_folder(environ)
    fetched = connector_jars(connector, folder)
    state = f"fetched to {fetched[0].parent}" if fetched else f"to be fetched to {folder} by the first session"
    return ok("spark", f"{found}; connector {connector}, {state}")
