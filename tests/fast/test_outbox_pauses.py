"""How long a harvester that leads waits after a failure before it begins another session."""

from typing import Any, cast

import pytest

from marshal_dagster.election.rules import Term
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.tables import OutboxTables
from marshal_dagster.postgres import Database


class Ending:
    """A stop that comes after so many waits, and keeps how long these were."""

    def __init__(self, count: int) -> None:
        self.waits_s: list[float] = []
        self._count = count

    def is_set(self) -> bool:
        """Tell whether it has come."""
        return len(self.waits_s) >= self._count

    def wait(self, timeout_s: float) -> None:
        """Wait for no time."""
        self.waits_s.append(round(timeout_s, 1))


class End:
    """An end of the harvest, and an elector, that agree to everything."""

    def leads(self, _: Term) -> bool:
        """Lead for ever."""
        return True

    def close(self) -> None:
        """Do nothing."""

    wait = leads


class Failing:
    """A session that fails after some turns, or at its beginning."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    def begin(self) -> None:
        """Fail, unless there are to be turns."""
        if not self._turns:
            raise UnavailableError("no database")

    def turn(self) -> int:
        """Fail after some."""
        if not self._turns:
            raise UnavailableError("no database")
        self._turns -= 1
        return 0


def test_pauses_grow_while_nothing_succeeds_and_are_short_again_after_a_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that one failure now and then costs a moment, however long the term lasts."""
    harvester = Harvester(OutboxTables(Database("")), KafkaConnection(bootstrap_servers="127.0.0.1:1"))
    sessions = iter([0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0])
    stop = Ending(12)
    monkeypatch.setattr(harvester, "_stop", stop)
    monkeypatch.setattr(harvester, "_ends", lambda _: (End(), End()))
    monkeypatch.setattr(harvester, "_harvest", lambda *_: Failing(next(sessions)))
    harvester._lead(cast("Any", None), cast("Any", End()), Term(1, "id"), lambda: False)
    assert stop.waits_s == [0.1, 0.2, 0.4, 0.1, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
