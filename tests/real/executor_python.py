"""Executors whose Python lacks packages, or has another version than the driver's, and what a sink does with them."""

import os
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sysconfig import get_path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import pytest

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks import Sink
from marshal_dagster.spark import executor_check
from marshal_dagster.spark.connect import is_connect
from tests.real.batch_function import values
from tests.real.spark_driver import Work, claimed, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OTHER_VERSION: Final = "3.9"


def python_without(folder: Path, *packages: str) -> str:
    """Make an environment with all packages of this one except some. Return the path of its Python.

    Args:
        folder: The folder of the environment, which does not exist yet.
        packages: The beginnings of the names that are left out.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    place = next(folder.glob("lib/python*/site-packages"))
    for entry in os.scandir(get_path("purelib")):
        if not entry.name.startswith(packages) and not (place / entry.name).exists():
            (place / entry.name).symlink_to(entry.path)
    return str(folder / "bin" / Path(sys.executable).name)


def refused(work: Work, sink: Sink, python: str | None) -> str:
    """Process a batch whose tasks run a Python that does not suit the sink. Return the error.

    Args:
        work: The batch, whose session stays as it is afterwards.
        sink: The sink.
        python: The path of the executors' Python, or None for one with another version than the driver's.
    """
    executor_check._checked.clear()
    with pytest.raises(ConfigurationError) as error:
        write_with(work, sink, python)
    assert "\n" not in str(error.value)
    return str(error.value)


def write_with(work: Work, sink: Sink, python: str | None) -> None:
    """Process a batch whose tasks run this Python (`running`)."""
    spark = session(work.where)
    with running(spark, python), claimed(work, sink) as batch:
        batch.write(values(batch.read(spark)))


@contextmanager
def running(spark: "SparkSession", python: str | None) -> Iterator[None]:
    """Run this Python in the session's tasks inside the block, or let them expect another version.

    A Connect server has chosen its Python when it was started.
    """
    if not is_connect(spark):
        name, value = ("pythonVer", OTHER_VERSION) if python is None else ("pythonExec", python)
        with patch.object(spark.sparkContext, name, value):
            yield
    elif python is None:
        from pyspark.sql.connect import udf

        with patch.object(udf, "sys", SimpleNamespace(version_info=tuple(map(int, OTHER_VERSION.split("."))))):
            yield
    else:
        yield
