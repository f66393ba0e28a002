"""Check what is installed on this machine: packages, Java, Spark and its connector to Kafka."""

import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.cli.doctor_checks.finding import Finding, ok, problem
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.connector import CONNECTOR, connector_jars

_PACKAGES: Final = ("marshal-dagster", "dagster", "dagster-pyspark", "pyspark", "confluent-kafka", "pydantic")
_SPARK_CORE: Final = re.compile(r"spark-core_(?P<scala>\d+\.\d+)-(?P<release>\d+\.\d+)(?P<rest>[^/]*)\.jar")
_CONNECTOR: Final = re.compile(r"[^:]+:spark-sql-kafka-0-10_(?P<scala>\d+\.\d+):(?P<release>\d+\.\d+)\..+")


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
    home = _spark_home(environ)
    jars = sorted((home / "jars").glob("spark-core_*.jar")) if home else []
    core = next(filter(None, (_SPARK_CORE.fullmatch(jar.name) for jar in jars)), None)
    connector = _CONNECTOR.fullmatch(CONNECTOR)
    fix = "pip install --upgrade marshal-dagster"
    if environ.get("SPARK_HOME"):
        fix = "unset SPARK_HOME"
    elif connector is not None:
        fix = f"pip install 'pyspark=={connector['release']}.*'"
    if core is None or connector is None:
        found = f"no Spark in {home}" if home else "PySpark is not installed"
        return problem("spark", found, "batches are read with Spark", fix)
    found = f"Spark {core['release']}{core['rest']} (Scala {core['scala']}) in {home}"
    if (core["scala"], core["release"]) != (connector["scala"], connector["release"]):
        return problem(
            "spark",
            f"{found}, but the connector is {CONNECTOR}",
            "a connector for another Spark or Scala fails when a batch is read, after it was claimed",
            fix,
        )
    folder = cache_folder(environ)
    fetched = connector_jars(folder=folder)
    state = f"fetched to {fetched[0].parent}" if fetched else f"to be fetched to {folder} by the first session"
    return ok("spark", f"{found}; connector {CONNECTOR}, {state}")


def _spark_home(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the Spark that PySpark would start: SPARK_HOME, else its own."""
    named = environ.get("SPARK_HOME")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("pyspark")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None
