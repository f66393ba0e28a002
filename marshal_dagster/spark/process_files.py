"""Files for starting a separate Spark process: the folder of Spark, and settings in private files.

Settings are passed in files, because process lists show command lines.
"""

import os
from pathlib import Path

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.packages import find_spark


def spark_home() -> Path:
    """Return the folder of PySpark's Spark. Raises `ConfigurationError` if PySpark is not installed."""
    home = find_spark({})
    if home is None:
        raise ConfigurationError("pyspark is not installed: pip install 'marshal-dagster[spark]'")
    return home


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only this user can read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
