"""The optional dependencies of this package, and the error of code that needs one that is not installed."""

import importlib.util
from enum import StrEnum
from typing import Final

from marshal_dagster.errors import ConfigurationError


class Extra(StrEnum):
    """An extra of this package, as `pip install 'marshal-dagster[spark]'` names it."""

    SPARK = "spark"
    CONNECT = "connect"
    POSTGRES = "postgres"
    MARIADB = "mariadb"
    PROTOBUF = "protobuf"
    METRICS = "metrics"
    PROMETHEUS = "prometheus"
    MSK = "msk"
    ICEBERG = "iceberg"
    OBJECT_STORE = "object-store"
    TIMELINE = "timeline"

    @property
    def command(self) -> str:
        """The command that installs the extra."""
        return f"pip install 'marshal-dagster[{self.value}]'"


MODULES: Final = {
    Extra.SPARK: "pyspark",
    Extra.CONNECT: "grpc_status",
    Extra.POSTGRES: "psycopg",
    Extra.MARIADB: "pymysql",
    Extra.PROTOBUF: "google.protobuf",
    Extra.METRICS: "opentelemetry.metrics",
    Extra.PROMETHEUS: "opentelemetry.exporter.prometheus",
    Extra.MSK: "aws_msk_iam_sasl_signer",
    Extra.ICEBERG: "pyiceberg",
    Extra.OBJECT_STORE: "obstore",
    Extra.TIMELINE: "bokeh",
}
"""A module that only the extra installs, and without which its code cannot work."""


def has_extra(extra: Extra) -> bool:
    """Return whether an extra's packages are installed; nothing is imported but the module's parent package."""
    try:
        return importlib.util.find_spec(MODULES[extra]) is not None
    except (ImportError, ValueError):
        return False


def require_extra(extra: Extra, user: str) -> None:
    """Raise `ConfigurationError` with the command that installs `extra`, unless it is installed.

    Args:
        extra: What is needed.
        user: What needs it, as the subject of "needs" in the message.
    """
    if not has_extra(extra):
        raise ConfigurationError(f"{user} needs {MODULES[extra]}, which is not installed: {extra.command}")
