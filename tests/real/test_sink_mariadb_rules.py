"""The rules of the MariaDB sink on a real MariaDB, with rows of plain Python instead of Spark."""

import pytest

from tests.database_conformance import DatabaseConformance
from tests.sink_conformance import AnyOrderConformance, CrashConformance, KillConformance
from tests.sink_outputs import MariaDBOutput, own_schema
from tests.sink_process import die

__all__ = ["die"]


@pytest.fixture
def output(mariadb: str) -> MariaDBOutput:
    """A separate schema."""
    return MariaDBOutput(mariadb, own_schema())


class TestDatabase(DatabaseConformance):
    """The kit, and other groups."""


class TestCrashes(CrashConformance):
    """Crashes and races."""


class TestAnyOrder(AnyOrderConformance):
    """Ranges in any order."""


class TestKills(KillConformance):
    """Writers killed by SIGKILL."""
