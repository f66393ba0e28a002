"""Settings with which the Spark sessions of tests are quick, and changes of settings for the duration of a test."""

import importlib
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_DELTA = {"spark.databricks.delta.snapshotPartitions": "1"}
"""Without this setting Delta reads the log of a table with 50 tasks."""
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Spark interprets its plans, which for a few rows takes less time than to compile them."""
QUICK_PLANS = INTERPRETED | {"spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "1"}
"""Spark interprets its plans and runs each as one job. For a few rows that takes half the time of the defaults.

All sessions that tests start from Python have these settings, unless they set others.
"""
USUAL_PLANS = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
}
"""Spark compiles its plans and adapts them, as in production."""
WITHOUT_STATISTICS = {
    "spark.databricks.delta.stats.collect": "false",
    "spark.databricks.delta.stats.skipping": "false",
}
"""Delta does not look for files that a query can leave out, which saves it a Spark job for each query."""
QUICK_HDFS = {"spark.hadoop.dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "10"}
"""HDFS closes a file once a DataNode has reported its block. Without this setting a client asks again after 400 ms."""


def submit_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which all sessions of a process have these settings by default."""
    options = [f"--conf={name}={value}" for name, value in settings.items()]
    return {"PYSPARK_SUBMIT_ARGS": shlex.join([*options, "pyspark-shell"])}


def fetched_delta_settings() -> dict[str, str]:
    """Return the settings of a session with Delta Lake, after its jars were downloaded.

    Spark's own download fails if two sessions start it at the same time.
    """
    from marshal_dagster.sinks.delta.table import delta_settings
    from marshal_dagster.spark.connector import fetch_connector
    from marshal_dagster.spark.packages import delta_package

    fetch_connector(delta_package())
    return delta_settings()


def frames_module() -> Any:  # noqa: ANN401 - a module, which Spark 3.5 and 4 name differently
    """Return the module with the DataFrame that has a JVM."""
    name = "pyspark.sql.classic.dataframe" if find_spec("pyspark.sql.classic") else "pyspark.sql.dataframe"
    return importlib.import_module(name)


def show_frames_without_jvm() -> None:
    """Let a failure report show a DataFrame without its columns, because a blocked JVM never returns them."""
    frames_module().DataFrame.__repr__ = object.__repr__


@contextmanager
def session_settings(spark: "SparkSession", settings: Mapping[str, str]) -> Iterator[None]:
    """Set these settings for the block, and restore the former values afterwards."""
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, former in before.items():
            if former is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, former)
