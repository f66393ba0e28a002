"""Check what is installed on this machine: packages, Java, Spark and its connector to Kafka."""

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.cli.doctor_checks.finding import Finding, ok, problem
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.connector import connector_jars
from marshal_dagster.spark.packages import build_in, find_spark, kafka_package

_PACKAGES: Final = ("marshal-dagster", "dagster", "dagster-pyspark", "pyspark", "confluent-kafka", "pydantic")


def check_machine(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check what is installed here: packages, Java, Spark and its connector to Kafka."""
    yield _versions()
    yield _java(environ)
    yield _spark(environ)


def _versions() -> Finding:
    found, missing = [f"Python {platform.python_version()}"], []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if not missing:
        return ok("versions", ", ".join(found))
    return problem(
        "versions",
        f"not installed: {', '.join(missing)}",
        "marshal-dagster does not work without them",
        "pip install --upgrade marshal-dagster",
    )


def _java(environ: Mapping[str, str]) -> Finding:
    try:
        java = find_java(environ)
    except ConfigurationError as error:
        return problem(
            "java",
            str(error),
            "Spark, and a Kafka for this machine, run on Java 17 or newer",
            "apt-get install openjdk-17-jre-headless (or your system's way), or export JAVA_HOME=/path/to/java-17",
        )
    return ok("java", f"Java {java.version} at {java.executable}")


def _spark(environ: Mapping[str, str]) -> Finding:
    """Check the names of Spark's jars: importing PySpark would take a second, and a session a JVM."""
    home = find_spark(environ)
    build = build_in(home) if home else None
    fix = "unset SPARK_HOME" if environ.get("SPARK_HOME") else "pip install --upgrade 'marshal-dagster[spark]'"
    if build is None:
        found = f"no Spark in {home}" if home else "PySpark is not installed"
        return problem("spark", found, "batches are read with Spark", fix)
    found = f"{build} in {home}"
    try:
        connector = kafka_package(build)
    except ConfigurationError as error:
        return problem("spark", f"{found}; {error}", "without a connector Spark cannot read Kafka", fix)
    folder = cache_folder(environ)
    fetched = connector_jars(connector, folder)
    state = f"fetched to {fetched[0].parent}" if fetched else f"to be fetched to {folder} by the first session"
    return ok("spark", f"{found}; connector {connector}, {state}")
