"""The package's names, and what importing it brings with it."""

import subprocess
import sys

import pytest

import marshal_dagster

HEAVY = ("dagster", "dagster_pyspark", "confluent_kafka", "pyspark", "psycopg", "pandas", "pyarrow", "typer", "rich")


def _loaded_by(code: str) -> set[str]:
    """Tell which of the heavy packages a fresh interpreter has loaded after `code`."""
    told = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*(set({HEAVY!r}) & sys.modules.keys()))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(told.stdout.split())


def test_importing_the_package_alone_brings_nothing_heavy() -> None:
    """`import marshal_dagster` imports neither Dagster nor a Kafka client nor Spark."""
    assert _loaded_by("import marshal_dagster") == set()


def test_a_process_that_only_claims_never_imports_dagster() -> None:
    """The delivery floor comes without Dagster and, until a session is used, without Spark."""
    assert _loaded_by("from marshal_dagster import Delivery, BatchRequest, FileSink") == set()


@pytest.mark.thorough
def test_the_dagster_floor_brings_no_kafka_client_and_no_spark() -> None:
    """Building ops, jobs, sensors and resources imports Dagster alone."""
    names = "ClaimerResource, build_set_position_job, build_stale_claim_sensor"
    assert _loaded_by(f"from marshal_dagster import {names}") == {"dagster"}


@pytest.mark.parametrize("name", marshal_dagster.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """Each name of `__all__` can be had, is documented, and is listed by `dir`."""
    assert getattr(marshal_dagster, name).__doc__
    assert name in dir(marshal_dagster)


def test_a_name_that_is_not_public_is_an_error() -> None:
    """An unknown name is an AttributeError that names it, not an import of something."""
    with pytest.raises(AttributeError, match="no attribute 'transitions'"):
        _ = marshal_dagster.transitions
