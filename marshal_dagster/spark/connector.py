"""The jars of the Kafka connector, and of Spark's other packages.

Spark can fetch them itself at each start (`spark.jars.packages`). That costs most of a second and forty lines of output
every time, and two sessions that begin together in an empty cache may spoil each other's download. So they are
downloaded here, under a lock, and a session is given the files.
"""

from pathlib import Path
from typing import Final

from marshal_dagster._internal.jars import DOWNLOAD_TIMEOUT_S, JarSet, Report
from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.errors import ConfigurationError

CONNECTOR: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"
"""Maven coordinates of the connector. Its version need not equal Spark's own within 4.0."""
EXCLUDES: Final = ("org.apache.hadoop:hadoop-client-api", "org.apache.hadoop:hadoop-client-runtime")
"""What the connector depends on and PySpark already ships: 60 MB that are not downloaded."""


def connector_jars(connector: str = CONNECTOR, folder: Path | None = None) -> tuple[Path, ...]:
    """Return the jars that `fetch_connector` has downloaded; none if they are missing or damaged."""
    return _jar_set(connector, folder).jars()


def fetch_connector(
    connector: str = CONNECTOR,
    *,
    folder: Path | None = None,
    report: Report | None = None,
    timeout_s: float = DOWNLOAD_TIMEOUT_S,
) -> tuple[Path, ...]:
    """Return the connector's jars, and download them first if they are missing or damaged (10 s and 14 MB, once).

    They are kept in `folder`, by default one in the user's cache folder.

    Raises:
        UnavailableError: they cannot be downloaded within `timeout_s`.
        ConfigurationError: `connector` is no group:name:version, or there is no fitting Java.
    """
    wanted = _jar_set(connector, folder)
    return wanted.jars() or wanted.download(find_java(), report, timeout_s)


def _jar_set(connector: str, folder: Path | None) -> JarSet:
    parts = connector.split(":")
    if len(parts) != 3 or not all(part and not set(part) & set("/\\ \n\t") for part in parts):  # noqa: PLR2004
        raise ConfigurationError(f"connector: {connector!r}; give Maven coordinates, group:name:version")
    return JarSet(
        title=connector,
        megabytes=14,
        coordinates=(connector,),
        folder=(folder or cache_folder()) / "-".join(parts),
        excludes=EXCLUDES,
    )
