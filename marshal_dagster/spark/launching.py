"""What starting a Spark process of its own needs: where Spark is, and settings that no process list shows."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from marshal_dagster.errors import ConfigurationError


def spark_home() -> Path:
    """Give the folder of the Spark that PySpark ships. Raises `ConfigurationError` where PySpark is not installed."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigurationError("pyspark is not installed")
    return Path(spec.origin).parent


def rendered(settings: Mapping[str, str]) -> str:
    """Write settings as the file that `spark-submit --properties-file` reads."""
    for name, value in settings.items():
        if {"\n", "\r"} & set(name + value):
            raise ConfigurationError(f"{name}: a setting of a Spark process is one line")
    return "".join(f"{_escaped(name, ' :=#!')}={_escaped(value)}\n" for name, value in settings.items())


def _escaped(text: str, others: str = "") -> str:
    """Write a name or a value as Java's properties have it; in a name, the signs that would end it are `others`."""
    return "".join(f"\\{each}" if each == "\\" or each in others else each for each in text)


def write_private(path: Path, text: str) -> None:
    """Write a file, anew, that this user alone can read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
