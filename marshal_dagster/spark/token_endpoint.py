"""Allow Kafka's Java client in Spark's processes to request tokens for OAUTHBEARER at an address.

From Kafka 3.9.1 on, the client requests tokens only at the addresses that a system property of its JVM lists.
"""

import re
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark import connect
from marshal_dagster.spark.session import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALLOWED_URLS: Final = "org.apache.kafka.sasl.oauthbearer.allowed.urls"
"""The system property."""
OPTION: Final = "kafka.sasl.oauthbearer.token.endpoint.url"
"""The option of Spark's Kafka source that has the address."""
_EXECUTORS: Final = ("spark.executor.extraJavaOptions", "spark.executor.defaultJavaOptions")
_FIRST_TO_ASK: Final = (3, 9, 1)


def allow_token_endpoint(spark: "SparkSession", url: str) -> None:
    """Allow the address in the driver's JVM, and check that the executors allow it.

    A session on a Spark Connect server is not changed or checked: its server must allow the address.

    Args:
        spark: The session.
        url: The token endpoint.

    Raises:
        ConfigurationError: The executors of a cluster do not allow the address.
    """
    if connect.is_connect(spark):
        return
    jvm = spark._jvm  # noqa: SLF001 - there is no public name
    system = jvm.java.lang.System  # type: ignore[union-attr]
    allowed = [known for known in (system.getProperty(ALLOWED_URLS) or "").split(",") if known]
    if url not in allowed:
        system.setProperty(ALLOWED_URLS, ",".join([*allowed, url]))
    context = spark.sparkContext
    if is_local(str(context.master)):
        return
    options = " ".join(str(context.getConf().get(name, "")) for name in _EXECUTORS)
    version = jvm.org.apache.kafka.common.utils.AppInfoParser.getVersion()  # type: ignore[union-attr]
    if _numbers(str(version)) >= _FIRST_TO_ASK and f"-D{ALLOWED_URLS}=" not in options:
        raise ConfigurationError(
            f"the executors of this session may not request tokens at {url}, which Kafka's client {version} needs: "
            f"start the session with spark.executor.extraJavaOptions=-D{ALLOWED_URLS}={url}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
