"""The SQL of docs/how-to/outbox.md for the database's owner: each role's rights suffice, and ids are advanced."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from marshal_dagster._internal.postgres import Database
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.events import OutgoingEvents
from marshal_dagster.outbox.harvester import Harvester, OutboxTopics
from marshal_dagster.outbox.options import HarvesterOptions
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.outbox.writer import Outbox, OutboxRecord
from tests.real.conftest import MakeTopic
from tests.sink_outputs import own_schema

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "outbox.md").read_text()
BLOCKS = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ROLES = ("outbox_writer", "outbox_harvester", "outbox_operator")


def block(start: str) -> str:
    """Return the SQL block that starts with `start`."""
    (found,) = [each for each in BLOCKS if each.startswith(start)]
    return str(found)


@pytest.fixture
def schema(postgres: str, connection: KafkaConnection) -> Iterator[str]:
    """A schema with an outbox, and roles with the rights that the page grants."""
    schema = own_schema()
    with psycopg.connect(postgres, autocommit=True) as owner:
        owner.execute(f"CREATE SCHEMA {schema}".encode())
        registration = OutboxTables(Database(postgres), schema=schema).create()
        OutboxTopics.of(registration.uid).create(connection)
        for role in ROLES:
            owner.execute(f"CREATE ROLE {role} LOGIN".encode())
        owner.execute(f"SET search_path = {schema}".encode())
        owner.execute(block("GRANT").replace("public", schema).encode())
        yield schema
        owner.execute(f"DROP OWNED BY {', '.join(ROLES)}".encode())
        owner.execute(f"DROP ROLE {', '.join(ROLES)}".encode())


def test_each_role_can_do_its_work(postgres: str, connection: KafkaConnection, schema: str, topic: MakeTopic) -> None:
    """Rows are written, published, set aside, put back and deleted. A writer cannot read the rows of others."""
    wanted = topic()
    writer, harvester, operator = (make_conninfo(postgres, user=role) for role in ROLES)
    with psycopg.connect(writer) as writing:
        Outbox(schema=schema).stash(writing, [OutboxRecord(wanted, "a", key="k"), OutboxRecord(f"{wanted}-no", "b")])
        OutgoingEvents(wanted, schema=schema).check(writing, ())
    with psycopg.connect(writer) as reading, pytest.raises(psycopg.errors.InsufficientPrivilege):
        reading.execute(f"SELECT FROM {schema}.outbox".encode())

    tables = OutboxTables(Database(harvester), schema=schema)
    options = HarvesterOptions(limits=HarvestLimits(max_attempts=1, topic_patience_s=0))
    assert Harvester(tables, connection, options).drain() == 1
    with closing(OutboxInspector(tables)) as measuring:
        assert (measuring.status().rows, measuring.status().parked) == (0, 1)

    with closing(OutboxInspector(OutboxTables(Database(operator), schema=schema))) as backlog:
        (row,) = backlog.parked()
        assert backlog.status().rows == 0
        assert backlog.retry([row.id]) == [row.id]
        assert backlog.status().rows == 1
        assert backlog.drop([row.id]) == []


def test_ids_are_moved_on(postgres: str, schema: str) -> None:
    """After the statement for a restored database, the next id is higher than any id that may have been used."""
    move = block("SELECT setval").replace("public", schema)
    with psycopg.connect(postgres) as owner:
        Outbox(schema=schema).stash(owner, [OutboxRecord("t", "a"), OutboxRecord("t", "b")])
        owner.execute(move.encode())
        Outbox(schema=schema).stash(owner, [OutboxRecord("t", "c")])
        owner.commit()
        owner.execute(f"SET search_path = {schema}".encode())
        found = owner.execute("SELECT id FROM outbox ORDER BY id").fetchall()
    assert [number for (number,) in found] == [1, 2, 1_000_000_003]


def test_the_page_shows_the_settings_that_the_table_has(postgres: str, schema: str) -> None:
    """The page shows the table's autovacuum settings."""
    shown = dict(re.findall(r"(autovacuum_\w+) = (\d+)", block("ALTER TABLE")))
    with psycopg.connect(postgres) as owner:
        found = owner.execute("SELECT reloptions FROM pg_class WHERE oid = %s::regclass", (f"{schema}.outbox",))
        (options,) = found.fetchone() or ([],)
    assert shown
    assert shown.items() <= dict(option.split("=") for option in options).items()
