"""The JDBC drivers with which Spark's own writer fills databases in benchmarks of sinks."""

from typing import Final

from marshal_dagster.spark.connector import fetch_connector

POSTGRES: Final = "org.postgresql:postgresql:42.7.4"
MARIADB: Final = "org.mariadb.jdbc:mariadb-java-client:3.4.1"


def jars() -> str:
    """Return the paths of all drivers, separated by commas. A JVM loads only the jars of its first session."""
    return ",".join(str(jar) for driver in (POSTGRES, MARIADB) for jar in fetch_connector(driver))
