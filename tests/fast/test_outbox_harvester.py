"""The harvester's loop: it starts a new session after each failure while it leads, with pauses in between."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Self

import psycopg
import pytest
from psycopg import errors

from marshal_dagster._internal.health_server import IDLE_AFTER_S
from marshal_dagster._internal.postgres import Database
from marshal_dagster.election.rules import Term
from marshal_dagster.errors import AuthorizationError, ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.kafka import admin_client
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox import harvester
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.interfaces import BatchTransaction, PublishedBatch, TransactionResult
from marshal_dagster.outbox.schema import VERSION, OutboxRegistration, OutboxTables, OutboxTarget

TERM = Term(1, "id")


class Scene:
    """The surroundings of a harvester. Each session ends with the next of the given errors."""

    def __init__(self, *sessions: Exception | None) -> None:
        self.pauses_s: list[float] = []
        self.given_up: list[str] = []
        self.closed = 0
        self.failures: list[Exception | None] = []
        """The harvester's failure at each turn."""
        self.harvester = SceneHarvester(self)
        self._sessions = iter(sessions)

    @property
    def idle_s(self) -> float:
        """How long the election's thread has done nothing."""
        return 0.0

    def wait(self, pause_s: float) -> None:
        """Record the length of a pause."""
        self.pauses_s.append(pause_s)

    def __enter__(self) -> Self:
        """Take part in the election, as the elector does."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the election."""

    def wait_for_term(self, _: float) -> Term:
        """Return a term."""
        return TERM

    def leads(self, _: Term) -> bool:
        """Return True until the harvester steps down."""
        return not self.given_up

    def step_down(self, _: Term, reason: str, __: float) -> None:
        """Record the reason and stop the harvester."""
        self.given_up.append(reason)
        self.harvester.stop()

    def begin(self) -> int:
        """Start a session. It raises the next error; without one it succeeds, and fails after its first turn."""
        following = next(self._sessions, None)
        if following is not None:
            raise following
        return 1

    def turn(self, session: int, turn: BatchTransaction) -> TransactionResult:
        """Return no rows."""
        del session, turn
        self.failures.append(self.harvester.failure)
        return TransactionResult([])

    def noted(self) -> PublishedBatch:
        """Return that nothing was published."""
        return PublishedBatch()

    def close(self) -> None:
        """Count the call."""
        self.closed += 1


class SceneStore:
    """The database of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.begin, self.turn, self.close = scene.begin, scene.turn, scene.close

    def wait(self, _: float) -> None:
        """Fail after a successful turn."""
        raise UnavailableError("it went away later")


class ScenePublisher:
    """The brokers of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.noted, self.close = scene.noted, scene.close

    def begin(self) -> None:
        """Start a session."""


class SceneHarvester(Harvester):
    """The harvester of a scene."""

    recorded = OutboxTarget()

    def __init__(self, scene: Scene) -> None:
        tables = OutboxTables(Database("host=nowhere"))
        super().__init__(tables, KafkaConnection(bootstrap_servers="nowhere:1"))
        self._scene = scene

    def _pause(self, seconds: float) -> None:
        self._scene.wait(seconds)

    def _look_up(self, *, is_recorded: bool = False) -> OutboxRegistration:
        del is_recorded
        return OutboxRegistration("outbox", "uid", VERSION, 0, None, self.recorded)

    def _elector(self, registration: OutboxRegistration) -> Any:  # noqa: ANN401
        del registration
        return self._scene

    def _ends(self, registration: OutboxRegistration) -> Any:  # noqa: ANN401
        del registration
        return SceneStore(self._scene), ScenePublisher(self._scene)


AWAY = UnavailableError("away")
LASTING = AuthorizationError("no right")


def test_pauses_double_while_nothing_succeeds_and_begin_anew_once_something_did() -> None:
    """Pauses double while no turn succeeds and start again at 0.1 s after one that did."""
    scene = Scene(AWAY, AWAY, AWAY, None, AWAY, None, None, LASTING)
    scene.harvester.run()
    assert scene.pauses_s == [0.1, 0.2, 0.4, 0.1, 0.2, 0.1, 0.1]


def test_pauses_are_five_seconds_at_the_most() -> None:
    """However often the harvester fails, a pause is at most five seconds."""
    scene = Scene(*[AWAY] * 9, LASTING)
    scene.harvester.run()
    assert scene.pauses_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_what_lasts_ends_the_term_and_is_reported() -> None:
    """A lasting error makes the harvester step down, report the reason and close its connections."""
    scene = Scene(LASTING)
    scene.harvester.run()
    assert scene.given_up == ["no right"]
    assert scene.harvester.failure is LASTING
    assert scene.harvester.term is None
    assert scene.closed == 2


def test_a_failed_term_is_a_failure_on_standby_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby's checks find nothing wrong, yet the harvester cannot lead: it must not count as healthy."""
    for error in (LASTING, AWAY):
        monkeypatch.setattr(harvester, "_HAND_OVER_AFTER_S", -1.0)
        monkeypatch.setattr(harvester, "_LOOK_AT_ENDS_S", 0.0)
        monkeypatch.setattr(admin_client, "Topics", lambda _: nullcontext(SimpleNamespace(require=lambda _: None)))
        scene = Scene(error)
        scene.harvester.run()
        elector: Any = SimpleNamespace(topic="t", failure=None)
        scene.harvester._look_at_ends(elector)
        assert scene.harvester.failure is error


def test_who_fails_for_long_leaves_it_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """After failing for long the leader steps down, because another process may reach what it cannot."""
    monkeypatch.setattr(harvester, "_HAND_OVER_AFTER_S", -1.0)
    scene = Scene(AWAY)
    scene.harvester.run()
    assert scene.given_up == ["away"]
    assert scene.pauses_s == []


def test_another_partitioner_than_that_of_the_migration_is_refused() -> None:
    """A harvester that places keys in another way would end their order."""
    scene = Scene()
    scene.harvester.recorded = OutboxTarget(partitioner="consistent_random")
    with pytest.raises(ConfigurationError, match="--partitioner consistent_random"):
        scene.harvester.run()
    with pytest.raises(ConfigurationError, match="keys would lose their order"):
        scene.harvester.drain()
    scene = Scene(ConfigurationError("it has started"))
    scene.harvester.recorded = OutboxTarget(partitioner="murmur2_random")
    with pytest.raises(ConfigurationError, match="it has started"):
        scene.harvester.run()


def test_another_cluster_than_that_of_the_other_harvesters_is_refused() -> None:
    """Each would lead in its own cluster, and the rows would be divided between them."""
    scene = Scene()
    scene.harvester.recorded = OutboxTarget("the-one")
    scene.harvester._cluster_id = "another"
    with pytest.raises(ConfigurationError, match="cluster with the id 'the-one', but nowhere:1 has the id 'another'"):
        scene.harvester.run()
    for own, recorded in (("the-one", "the-one"), (None, "the-one"), ("the-one", None)):
        scene = Scene(ConfigurationError("it has started"))
        scene.harvester._cluster_id, scene.harvester.recorded = own, OutboxTarget(recorded)
        with pytest.raises(ConfigurationError, match="it has started"):
            scene.harvester.run()


def test_what_a_person_must_mend_ends_the_harvester() -> None:
    """An error that an operator must fix is raised, without another attempt."""
    scene = Scene(ConfigurationError("of a later version"))
    with pytest.raises(ConfigurationError, match="of a later version"):
        scene.harvester.run()
    assert scene.closed == 2


def test_a_failure_is_forgotten_once_a_turn_succeeds() -> None:
    """`failure` is the present failure, so a successful turn clears it."""
    scene = Scene(AWAY, None, LASTING)
    scene.harvester.run()
    assert [str(failure) for failure in scene.failures] == ["away"]
    assert str(scene.harvester.failure) == "no right"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.ReadOnlySqlTransaction, UnavailableError),
        (errors.IdleInTransactionSessionTimeout, UnavailableError),
        (errors.AdminShutdown, UnavailableError),
        (errors.CannotConnectNow, UnavailableError),
        (errors.UniqueViolation, MarshalError),
        (errors.NumericValueOutOfRange, MarshalError),
        (errors.InsufficientPrivilege, ConfigurationError),
        (errors.UndefinedColumn, ConfigurationError),
    ],
)
def test_only_what_a_person_must_mend_is_of_the_configuration(error: type[psycopg.Error], kind: type) -> None:
    """A failover, or a server that is read-only for a while, must not end the harvester."""
    tables = OutboxTables(Database("host=nowhere"))
    with pytest.raises(MarshalError) as raised, tables.translated_errors():
        raise error("refused")
    assert type(raised.value) is kind


def test_a_statement_that_takes_too_long_is_no_lost_connection() -> None:
    """Dead rows make statements slow, and an operator must look for what keeps them."""
    tables = OutboxTables(Database("host=nowhere"))
    with pytest.raises(UnavailableError, match="VACUUM"), tables.translated_errors():
        raise errors.QueryCanceled("canceling statement due to statement timeout")


class Backlog:
    """The waiting rows of a scene. `is_empty` returns whether those that existed at first are gone."""

    is_empty: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, _: object) -> None:
        """Accept any tables."""

    def last_id(self) -> int:
        """Return an id."""
        return 7

    def first_id(self, _: int) -> int | None:
        """Return the first row that remains."""
        return None if self.is_empty() else 3

    def close(self) -> None:
        """Do nothing."""


class BusyHarvest:
    """A session in which each turn takes rows, because others are written all the time."""

    def __init__(self, harvester: Harvester) -> None:
        self.turns = 0
        self.leads: Callable[[], bool] = lambda: True
        self.has_finished = False
        self._harvester = harvester

    def begin(self) -> None:
        """Start the session."""

    def turn(self) -> int:
        """Return one row; after 100 turns stop the harvester."""
        self.turns += 1
        if self.turns >= 100:
            self._harvester.stop()
        return 1

    def finish(self) -> None:
        """Record the call."""
        self.has_finished = True


def busy_scene(monkeypatch: pytest.MonkeyPatch) -> tuple[Scene, BusyHarvest]:
    """Return a harvester whose turns always take rows and whose drains look at the backlog after each turn."""
    monkeypatch.setattr(harvester, "OutboxInspector", Backlog)
    monkeypatch.setattr(harvester, "_LOOK_S", 0.0)
    scene = Scene()
    busy = BusyHarvest(scene.harvester)
    monkeypatch.setattr(scene.harvester, "_harvest", lambda *_: busy)
    return scene, busy


def test_a_turn_of_many_attempts_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it counted as hanging, the harvester would lose the leadership before it sets the refused rows aside."""
    scene = Scene()
    now_s, idle_s = 0.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    class LongHarvest(BusyHarvest):
        def turn(self) -> int:
            nonlocal now_s
            for _ in range(10):
                now_s += 50.0  # an attempt to publish
                assert self.leads()
                idle_s.append(scene.harvester.idle_s)
            return super().turn()

    def harvest(_: object, __: object, leads: Callable[[], bool]) -> BusyHarvest:
        found = LongHarvest(scene.harvester)
        found.turns, found.leads = 99, leads
        return found

    monkeypatch.setattr(scene.harvester, "_harvest", harvest)
    scene.harvester.run()
    assert max(idle_s) < IDLE_AFTER_S


def test_a_drain_of_a_busy_outbox_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain ends once the rows that existed at its start are gone, although each turn takes newer ones."""
    scene, busy = busy_scene(monkeypatch)
    monkeypatch.setattr(Backlog, "is_empty", staticmethod(lambda: busy.turns >= 3))
    scene.harvester.drain()
    assert (busy.turns, busy.has_finished) == (3, True)


def test_a_drain_in_which_a_row_stays_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that can neither be published nor be set aside is no failure of the harvester, yet the drain must end."""
    scene, busy = busy_scene(monkeypatch)
    monkeypatch.setattr(scene, "step_down", lambda *_: None)
    with pytest.raises(MarshalError, match=r"'outbox': row 3 was neither published nor set aside within -1 s"):
        scene.harvester.drain(patience_s=-31.0)
    assert busy.turns == 1


def test_a_drain_that_fails_for_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain that keeps failing raises the error, so its caller can decide what to do."""
    monkeypatch.setattr(harvester, "OutboxInspector", Backlog)
    monkeypatch.setattr(harvester, "_HAND_OVER_AFTER_S", -1.0)
    scene = Scene(AWAY, AWAY)
    monkeypatch.setattr(scene, "step_down", lambda *_: None)
    with pytest.raises(UnavailableError, match="away"):
        scene.harvester.drain(patience_s=-1.0)
