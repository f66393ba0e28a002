"""What starting a Spark process of its own needs: where Spark is, and settings that no process list shows."""

import importlib.util
import os
from pathlib import Path

from marshal_dagster.errors import ConfigurationError


def spark_home() -> Path:
    """Give the folder of the Spark that PySpark ships. Raises `ConfigurationError` where PySpark is not installed."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigurationError("pyspark is not installed")
    return Path(spec.origin).parent


def write_private(path: Path, text: str) -> None:
    """Write a file, anew, that this user alone can read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
