"""The cluster on which all files of this folder run, and the process with their sessions."""

from collections.abc import Iterator

import pytest

from tests.real.spark_cluster import SparkCluster, running_cluster
from tests.real.spark_driver import Driver, running_driver
from tests.real.spark_fixtures import has_delta
from tests.session_settings import SMALL_DELTA, fetched_delta_settings


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A master and two workers."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def delta() -> dict[str, str]:
    """Settings of a session with Delta Lake, if this Spark has one: a JVM only has the jars of its first session."""
    return SMALL_DELTA | fetched_delta_settings() if has_delta() else {}


@pytest.fixture(scope="package")
def driver() -> Iterator[Driver]:
    """A separate process for sessions on the cluster."""
    with running_driver() as driver:
        yield driver
