"""Settings of this deployment, from environment variables. The defaults fit a single machine."""

import math
import os
from pathlib import Path
from typing import Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.resources.connection import KafkaConnectionConfig

SHORTEST_S: Final = 0.1


def text(name: str, default: str) -> str:
    """Return the variable `name`, or `default` if it is empty or not set."""
    return os.environ.get(name, "").strip() or default


def whole(name: str, default: int) -> int:
    """Return a whole number of at least 1. Raises `ConfigurationError` with the name of the variable."""
    given = text(name, str(default))
    if not (given.isascii() and given.isdigit() and int(given) >= 1):
        raise ConfigurationError(f"{name} is {given!r}; it must be a whole number of at least 1")
    return int(given)


def seconds(name: str, default: float) -> float:
    """Return a number of seconds of at least 0.1. Raises `ConfigurationError` with the name of the variable."""
    given = text(name, str(default))
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not SHORTEST_S <= value < math.inf:
        raise ConfigurationError(f"{name} is {given!r}; it must be a number of seconds, at least {SHORTEST_S}")
    return value


CONNECTION: Final = KafkaConnectionConfig.from_environment(
    {**os.environ, "MARSHAL_BOOTSTRAP_SERVERS": text("MARSHAL_BOOTSTRAP_SERVERS", "127.0.0.1:9092")}
)
OUTPUT: Final = Path(text("MARSHAL_OUTPUT", str(Path(__file__).resolve().parent.parent / "build" / "output")))
COORDINATION_TOPIC: Final = text("MARSHAL_COORDINATION_TOPIC", "__marshal")
HEARTBEAT_INTERVAL_S: Final = seconds("MARSHAL_HEARTBEAT_INTERVAL_S", 10.0)
MAX_RECORDS: Final = whole("MARSHAL_MAX_RECORDS", 100_000)
MAX_BATCHES: Final = whole("MARSHAL_MAX_BATCHES", 10)
SPARK_MASTER: Final = text("MARSHAL_SPARK_MASTER", "local[*]")
