"""`outbox init|status|parked|retry|drop`: an outbox's tables, looked at and looked after."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

import typer

from marshal_dagster._internal.postgres import Database
from marshal_dagster.cli import output
from marshal_dagster.cli.connections import connection_of, is_kafka_named
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector, OutboxStatus, ParkedRow

DSN_VARIABLE: Final = "MARSHAL_OUTBOX_DSN"
_COLUMNS: Final = ("#id", "topic", "key", "#bytes", "set aside", "reason")


@dataclass(frozen=True, slots=True)
class OutboxLocation:
    """Where an outbox is, as the command line says it."""

    dsn: str | None
    name: str
    schema: str

    def __repr__(self) -> str:
        """Name it without the connection string, which may hold a password."""
        return f"Place({self.schema}.{self.name})"

    def tables(self, environment: Mapping[str, str] | None = None) -> OutboxTables:
        """Name its tables; nothing is connected to. Raises `ConfigurationError`."""
        environment = os.environ if environment is None else environment
        dsn = self.dsn or environment.get(DSN_VARIABLE, "").strip()
        if not dsn:
            raise ConfigurationError(
                f"no database is named: set {DSN_VARIABLE}=postgresql://user:password@host:port/database, or give --dsn"
            )
        if importlib.util.find_spec("psycopg") is None:
            raise ConfigurationError("psycopg is not installed: `pip install 'marshal-dagster[postgres]'`")
        return OutboxTables(Database(dsn), self.name, self.schema)


@dataclass(frozen=True, slots=True)
class InitRequest:
    """What is to be there; `replication` None: 3, or as many as there are brokers."""

    place: OutboxLocation
    connection: ConnectionOptions
    notifies: bool = True
    replication: int | None = None
    as_json: bool = False


def init(request: InitRequest) -> None:
    """Make the tables, and the topics where a Kafka is named. Raises `MarshalError`."""
    tables = request.place.tables()
    connection = connection_of(request.connection) if is_kafka_named(request.connection) else None
    registration = tables.create(notifies=request.notifies)
    topics = OutboxTopics.of(registration.uid)
    if connection is not None:
        topics.create(connection, request.replication)
    if request.as_json:
        made = None if connection is None else asdict(topics)
        shown = {
            "outbox": registration.name,
            "schema": tables.schema,
            "uid": registration.uid,
            "version": registration.version,
        }
        output.write_json({**shown, "notifies": request.notifies, "topics": made})
        return
    woken = "its rows wake the harvester" if request.notifies else "the harvester looks for its rows"
    output.show(
        f"Outbox {tables.schema}.{registration.name} (version {registration.version}, uid {registration.uid}): {woken}"
    )
    if connection is None:
        output.write_note("no Kafka is named, so its topics were not made: call it again with --bootstrap-servers")
        return
    output.show(f"Topics {topics.leader} and {topics.notes} on {connection.bootstrap_servers}")


def status(place: OutboxLocation, *, as_json: bool) -> None:
    """Show how it stands. Raises `ConfigurationError`, `UnavailableError`."""
    with _backlog(place) as backlog:
        found = backlog.status()
    if as_json:
        output.write_json(_to_json(place, found))
        return
    registration = found.registration
    oldest = "" if found.oldest_age_s is None else f", the oldest for {output.duration(found.oldest_age_s * 1_000)}"
    output.show(
        f"Outbox {place.schema}.{registration.name} (version {registration.version}, uid {registration.uid})",
        f"  waiting    {_rows(found.rows)}{oldest}",
        _parked_text(found.parked),
        f"  harvested  {_harvested(found)}",
    )


def parked(place: OutboxLocation, limit: int, *, as_json: bool) -> None:
    """List what is set aside. Raises as `status`."""
    with _backlog(place) as backlog:
        rows = backlog.parked(limit)
        total = backlog.status().parked if len(rows) == limit else len(rows)
    if as_json:
        output.write_json({"parked": total, "rows": [_row_to_json(row) for row in rows]})
        return
    if not rows:
        output.show("Nothing is set aside")
        return
    output.show(_table(rows))
    if total > len(rows):
        output.write_note(f"{total - len(rows)} more; --limit shows them")


def retry(place: OutboxLocation, ids: Sequence[int] | None, *, as_json: bool) -> ExitCode:
    """Put rows back, by id, or all. Raises as `status`."""
    with _backlog(place) as backlog:
        done = backlog.retry(ids)
    return _report("retried", "put back, to be published", ids or (), done, as_json=as_json)


def drop(place: OutboxLocation, ids: Sequence[int], *, yes: bool, as_json: bool) -> ExitCode:
    """Show rows, ask, and delete them. Raises as `status`."""
    if as_json and not yes:
        raise output.cannot_ask("with `outbox parked`")
    with _backlog(place) as backlog:
        if not yes:
            rows = backlog.parked(len(ids), ids)
            if not rows:
                return _report("dropped", "", ids, [], as_json=False)
            output.show(_table(rows))
            if not typer.confirm(f"Delete {_rows(len(rows))}, never to be published?", err=True):
                output.write_note("nothing was deleted")
                return ExitCode.PROBLEMS
        done = backlog.drop(ids)
    return _report("dropped", "deleted", ids, done, as_json=as_json)


@contextmanager
def _backlog(place: OutboxLocation) -> Iterator[OutboxInspector]:
    with closing(OutboxInspector(place.tables())) as backlog:
        yield backlog


def _report(did: str, said: str, wanted: Sequence[int], done: Sequence[int], *, as_json: bool) -> ExitCode:
    missing = sorted(set(wanted) - set(done))
    if as_json:
        output.write_json({did: list(done), "missing": missing})
    elif done or not wanted:
        output.show(f"{_rows(len(done))} {said}")
    if missing:
        output.write_note(
            f"not set aside: {', '.join(map(str, missing))}; `marshal-dagster outbox parked` lists what is"
        )
    return ExitCode.PROBLEMS if missing else ExitCode.OK


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def _parked_text(count: int) -> output.Line:
    advice = "; `marshal-dagster outbox parked` says why" if count else ""
    return output.styled(f"  set aside  {_rows(count)}{advice}", "yellow" if count else "")


def _harvested(found: OutboxStatus) -> str:
    if found.led_since is None:
        return "never"
    return f"session {found.registration.session}, begun by {found.registration.leader} at {_utc(found.led_since)}"


def _table(rows: Sequence[ParkedRow]) -> output.Table:
    cells = [
        (str(row.id), row.topic, _text(row.key) or output.NOTHING, str(row.size), _utc(row.parked_at), row.reason)
        for row in rows
    ]
    return output.Table(_COLUMNS, cells, may_fold=("key", "reason"))


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode(errors="backslashreplace")


def _utc(at: datetime) -> str:
    return output.utc(round(at.timestamp() * 1_000))


def _to_json(place: OutboxLocation, found: OutboxStatus) -> dict[str, Any]:
    registration = found.registration
    return {
        "outbox": registration.name,
        "schema": place.schema,
        "uid": registration.uid,
        "version": registration.version,
        "rows": found.rows,
        "oldest_age_s": found.oldest_age_s,
        "parked": found.parked,
        "session": registration.session,
        "leader": registration.leader,
        "led_since": None if found.led_since is None else found.led_since.isoformat(),
    }


def _row_to_json(row: ParkedRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "topic": row.topic,
        "key": _text(row.key),
        "value_bytes": row.size,
        "reason": row.reason,
        "parked_at": row.parked_at.isoformat(),
    }
