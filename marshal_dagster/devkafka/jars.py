"""The jars of Apache Kafka: which version, and their download."""

from pathlib import Path

from marshal_dagster._internal.jars import DOWNLOAD_TIMEOUT_S, JarSet, Report
from marshal_dagster._internal.java import Java
from marshal_dagster._internal.user_folders import cache_folder

KAFKA_VERSION = "4.3.1"
# Kafka's dependencies include log4j-core of this version and slf4j 1.7, but not the binding between the two.
_LOG4J_VERSION = "2.25.4"


def ensure_jars(java: Java, *, report: Report | None = None, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> tuple[Path, ...]:
    """Return the paths of Kafka's jars; download them first if they are missing or damaged.

    The download takes about 30 s and 44 MB, once.

    Args:
        java: The Java that runs the download.
        report: Called with one line when a download starts.
        timeout_s: How many seconds the download may take.

    Raises:
        UnavailableError: The jars could not be downloaded within `timeout_s`.
        ConfigurationError: PySpark, which brings the downloader, is not installed.
    """
    jars = JarSet(
        title=f"Kafka {KAFKA_VERSION}",
        megabytes=44,
        coordinates=(
            f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
            f"org.apache.logging.log4j:log4j-slf4j-impl:{_LOG4J_VERSION}",
        ),
        folder=cache_folder() / f"kafka-{KAFKA_VERSION}",
        required=frozenset(
            {
                f"kafka_2.13-{KAFKA_VERSION}.jar",
                f"kafka-clients-{KAFKA_VERSION}.jar",
                f"log4j-slf4j-impl-{_LOG4J_VERSION}.jar",
            }
        ),
    )
    return jars.download(java, report, timeout_s)
