"""Download of the jars of Spark's Kafka connector.

Spark can fetch them itself at each start (`spark.jars.packages`), which takes almost a second and prints forty lines.
If two sessions start at once with an empty cache, they may damage each other's download. Therefore this module
downloads the jars under a lock, and sessions use the files.
"""

from pathlib import Path
from typing import Final

from marshal_dagster._internal.jars import DOWNLOAD_TIMEOUT_S, JarSet, Report
from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.packages import kafka_package

EXCLUDES: Final = ("org.apache.hadoop:hadoop-client-api", "org.apache.hadoop:hadoop-client-runtime")
"""Dependencies of the connector that PySpark already has: 60 MB that are not downloaded."""


def connector_jars(connector: str | None = None, folder: Path | None = None) -> tuple[Path, ...]:
    """Return the jars that `fetch_connector` downloaded; empty if they are missing or damaged."""
    return _jar_set(connector, folder).jars()


def fetch_connector(
    connector: str | None = None,
    *,
    folder: Path | None = None,
    report: Report | None = None,
    timeout_s: float = DOWNLOAD_TIMEOUT_S,
) -> tuple[Path, ...]:
    """Return the connector's jars, and download them first if they are missing or damaged (10 s and 14 MB, once).

    Args:
        connector: Maven coordinates, group:name:version (default: the connector for the installed Spark).
        folder: Where the jars are stored (default: in the user's cache folder).
        report: Called with lines about the download.
        timeout_s: The maximum time of the download, in seconds.

    Returns:
        The paths of the jars.

    Raises:
        UnavailableError: They cannot be downloaded within `timeout_s`.
        ConfigurationError: `connector` is not group:name:version, there is no suitable Java, or no connector is
            known for the installed Spark.
    """
    wanted = _jar_set(connector, folder)
    return wanted.jars() or wanted.download(find_java(), report, timeout_s)


def _jar_set(connector: str | None, folder: Path | None) -> JarSet:
    connector = kafka_package() if connector is None else connector
    parts = connector.split(":")
    if len(parts) != 3 or not all(part and not set(part) & set("/\\ \n\t") for part in parts):  # noqa: PLR2004
        raise ConfigurationError(f"connector is {connector!r}; use Maven coordinates: group:name:version")
    return JarSet(
        title=connector,
        megabytes=14,
        coordinates=(connector,),
        folder=(folder or cache_folder()) / "-".join(parts),
        excludes=EXCLUDES,
    )
