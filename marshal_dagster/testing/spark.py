"""The local Spark session of runs in memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkInMemory:
    """A resource with the session of the test or process, or with a small local one that the first batch starts."""

    spark_config: ClassVar[Mapping[str, str]] = {
        "spark.app.name": "marshal-dagster in memory",
        "spark.master": "local[1]",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    """The settings of a session that is started here; it needs no Kafka connector."""

    def __init__(self, session: "SparkSession | None") -> None:
        self._session = session

    @property
    def spark_session(self) -> "SparkSession":
        """The session."""
        if self._session is None:
            from pyspark.sql import SparkSession

            self._session = SparkSession.getActiveSession() or self._start()
        return self._session

    def _start(self) -> "SparkSession":
        from pyspark.sql import SparkSession

        builder = SparkSession.builder
        for name, value in self.spark_config.items():
            builder = builder.config(name, value)
        return builder.getOrCreate()
