"""Runs benchmarks in one process: `python -m tests.real.benchmark_runner`, with a JSON list of command lines.

They share a broker, a database server and a Spark session. Spark interprets plans.
The Python processes that they start use the byte code of the sources, instead of compiling them to a temporary folder.
"""

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING
from unittest.mock import patch

import psycopg
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import make_conninfo

from benchmarks import batch, interpreters, services
from marshal_dagster.coordination import rationalizer_cache
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks import delta_settings
from marshal_dagster.spark.connector import fetch_connector
from marshal_dagster.spark.packages import delta_package, iceberg_package
from tests.session_settings import QUICK_PLANS, submit_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVERS = (
    "org.mariadb.jdbc:mariadb-java-client:3.4.1",
    "org.postgresql:postgresql:42.7.4",
    "org.xerial:sqlite-jdbc:3.46.1.3",
)
"""The packages of the databases' drivers, which the shared session has."""
INTERNAL = ("__consumer_offsets", "__transaction_state")


@contextmanager
def emptied(connection: KafkaConnection) -> Iterator[KafkaConnection]:
    """Delete all topics of the shared broker, and forget what this process knows of them."""
    rationalizer_cache._places.clear()
    with Topics(connection) as topics:
        for name in AdminClient({"bootstrap.servers": connection.bootstrap_servers}).list_topics(timeout=60).topics:
            if name not in INTERNAL:
                topics.delete(name)
    yield connection


@contextmanager
def new_database(dsn: str) -> Iterator[str]:
    """Create a database on the shared server."""
    name = f"benchmark_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(dsn, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}".encode())
    yield make_conninfo(dsn, dbname=name)


@contextmanager
def shared_services() -> Iterator[None]:
    """Start what benchmarks share, and give it to those that run inside the block."""
    packages = (*DRIVERS, iceberg_package(), delta_package())
    jars = {str(jar) for package in packages for jar in fetch_connector(package)}
    settings = {name: value for name, value in delta_settings().items() if name != "spark.jars"}

    def session(needed: str = "", also: Mapping[str, str] | None = None) -> AbstractContextManager["SparkSession"]:
        missing = {*filter(None, needed.split(","))} - jars, dict(also or {}).items() - settings.items()
        assert missing == (set(), set()), f"add {missing} to the shared session"
        return nullcontext(spark)

    with (
        services.broker() as connection,
        services.postgres() as dsn,
        batch.local_session(",".join(sorted(jars)), settings) as spark,
        patch.object(services, "broker", lambda: emptied(connection)),
        patch.object(services, "postgres", lambda: new_database(dsn)),
        patch.object(batch, "local_session", session),
        patch.object(interpreters, "environment", lambda: nullcontext(dict(os.environ))),
    ):
        yield


def main() -> None:
    """Run the benchmarks of the command lines in turn."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.update(submit_environment(QUICK_PLANS))
    with shared_services():
        from benchmarks.__main__ import main as run  # its modules take what is shared when they are imported

        for arguments in json.loads(sys.argv[1]):
            run(arguments)


if __name__ == "__main__":
    main()
