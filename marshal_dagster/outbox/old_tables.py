"""The tables of goharvest and of Debezium's outbox event router, and how their rows become rows of an outbox."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Final, LiteralString, Protocol

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.partitioner import Partitioner

if TYPE_CHECKING:
    from psycopg.sql import SQL, Composable, Composed, Identifier

    from marshal_dagster._internal.postgres import Connection

Types = Mapping[str, str]
"""The type of each column, as PostgreSQL writes it."""

INSERT_TRIGGER: Final = "marshal_insert"
DELETE_TRIGGER: Final = "marshal_delete"
ROUTED_BY_VALUE: Final = "${routedByValue}"
"""The placeholder of Debezium's `route.topic.replacement`."""
_TEMPLATE_TEXT: Final = re.compile(r"[A-Za-z0-9._-]*")
_MOST_REMEMBERED: Final = 1_000
_SLOTS: Final[LiteralString] = """
    SELECT slot_name, active, confirmed_flush_lsn::text FROM pg_catalog.pg_replication_slots
    WHERE database = pg_catalog.current_database() AND slot_type = 'logical' ORDER BY slot_name
    """


class Level(StrEnum):
    """The result of a check before a migration."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    """Nothing is changed while there is one."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check before a migration."""

    name: str
    """What was checked."""
    level: Level
    """The result."""
    text: str
    """What was found, and what to do about it."""


@dataclass(frozen=True, slots=True)
class RowValues:
    """SQL expressions for the columns of a row of the outbox."""

    create_time: "Composable"
    topic: "Composable"
    key: "Composable"
    value: "Composable"
    header_keys: "Composable"
    header_values: "Composable"

    def named(self) -> dict[str, "Composable"]:
        """Return the expressions by column."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def listed(self) -> "Composed":
        """Return the expressions, separated by commas."""
        from psycopg import sql

        return sql.SQL(", ").join(self.named().values())


class OldTable(Protocol):
    """The table of another outbox: its columns, and how its rows become rows of an outbox."""

    @property
    def owner(self) -> str:
        """The name of the software whose table it is."""
        ...

    @property
    def statement(self) -> "re.Pattern[str] | None":
        """A pattern of the statements by which its sessions are recognized; None if it has none."""
        ...

    @property
    def order_by(self) -> str | None:
        """The column by whose order rows move; None if rows do not move."""
        ...

    @property
    def generated_id(self) -> str | None:
        """The column that gets the id of the row in the outbox; None if there is none."""
        ...

    @property
    def partitioner(self) -> Partitioner:
        """How it chose the partition of a key."""
        ...

    @property
    def may_delete(self) -> bool:
        """Whether writers may delete the rows that they have inserted in the same transaction."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """The columns that the table needs."""
        ...

    def checks(self, connection: "Connection", table: "Identifier", leader: str | None) -> Iterator[Check]:
        """Yield the results of the checks of this kind of table; `leader` is the outbox's last harvester."""
        ...

    def values(self, row: str, types: Types) -> RowValues:
        """Return the outbox's columns for a row of the table, of which `row` is the alias."""
        ...


@dataclass(frozen=True, slots=True)
class GoharvestTable:
    """The table of goharvest (https://github.com/obsidiandynamics/goharvest).

    Example:
        ```python
        migration = OutboxMigration(OutboxTables(Database(dsn), "events"), GoharvestTable(), "outbox")
        ```
    """

    owner: str = "goharvest"
    statement: "re.Pattern[str] | None" = re.compile(r"^\s*-- (mark|purge|reset) query\b")
    order_by: str | None = "id"
    generated_id: str | None = "id"
    partitioner: Partitioner = Partitioner.CONSISTENT_RANDOM
    may_delete: bool = False
    columns: Sequence[str] = (
        "id",
        "create_time",
        "kafka_topic",
        "kafka_key",
        "kafka_value",
        "kafka_header_keys",
        "kafka_header_values",
        "leader_id",
    )

    def checks(self, connection: "Connection", table: "Identifier", leader: str | None) -> Iterator[Check]:
        """Yield how many rows goharvest may have published without deleting them, and who may use a partitioner."""
        from psycopg import sql

        found = connection.execute(
            sql.SQL("SELECT count(*) FROM {} WHERE leader_id IS NOT NULL").format(table)
        ).fetchone()
        marked = 0 if found is None else int(found[0])
        if marked:
            text = (
                f"{marked} rows have the mark of a harvester. Some of them may be in Kafka already, and are published "
                "again, as after each restart of goharvest"
            )
            yield Check("marks", Level.WARNING, text)
        else:
            yield Check("marks", Level.OK, "no row has the mark of a harvester")
        if leader is not None:
            text = f"process {leader} has harvested: restart each harvester with --partitioner {self.partitioner} first"
            yield Check("partitioner", Level.WARNING, text)

    def values(self, row: str, types: Types) -> RowValues:  # noqa: ARG002 - its types are fixed
        """Return the outbox's columns for a row."""
        from psycopg import sql

        column = {name: sql.Identifier(row, name) for name in self.columns}
        return RowValues(
            create_time=sql.SQL("coalesce({}, now())").format(column["create_time"]),
            topic=column["kafka_topic"],
            key=_utf8(column["kafka_key"]),
            value=_utf8(column["kafka_value"]),
            header_keys=sql.SQL("nullif({}, '{{}}')").format(column["kafka_header_keys"]),
            header_values=sql.SQL(
                "(SELECT array_agg(convert_to(h.value, 'UTF8') ORDER BY h.place) "
                "FROM unnest({}) WITH ORDINALITY AS h (value, place))"
            ).format(column["kafka_header_values"]),
        )


class KeyConverter(StrEnum):
    """The `key.converter` of Debezium's connector."""

    STRING = "string"
    """`StringConverter`: the key is the text of its column."""
    JSON = "json"
    """`JsonConverter` with `schemas.enable=false`: the key is JSON, such as text in quotes."""

    @classmethod
    def of(cls, name: str) -> "KeyConverter":
        """Return the converter with this name. Raises `ConfigurationError`."""
        return enum_member(cls, "key converter", name)


@dataclass(frozen=True, slots=True)
class DebeziumTable:
    """The table that Debezium's outbox event router reads, with the settings of the router.

    Raises:
        ConfigurationError: The topic template can give no topic.

    Example:
        ```python
        old = DebeziumTable(topic_template="shop.${routedByValue}", headers=[("type", "eventType")])
        ```
    """

    event_id: str = "id"
    """The column with the event's id (`table.field.event.id`)."""
    routed_by: str = "aggregatetype"
    """The column that chooses the topic (`route.by.field`)."""
    event_key: str = "aggregateid"
    """The column with the record's key (`table.field.event.key`)."""
    payload: str = "payload"
    """The column with the record's value (`table.field.event.payload`)."""
    topic_template: str = f"outbox.event.{ROUTED_BY_VALUE}"
    """The name of the topic (`route.topic.replacement`)."""
    headers: Sequence[tuple[str, str]] = ()
    """Columns that become headers, each with the name of its header (`table.fields.additional.placement`)."""
    key_converter: KeyConverter = KeyConverter.STRING
    """How the key's column becomes bytes (`key.converter`)."""
    order_by: str | None = None
    """The column by whose order rows move into the outbox. None leaves them in the renamed table."""
    owner: str = "Debezium"
    statement: "re.Pattern[str] | None" = None
    generated_id: str | None = None
    partitioner: Partitioner = Partitioner.MURMUR2_RANDOM
    may_delete: bool = True

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` if the template is invalid."""
        for text in self.topic_template.split(ROUTED_BY_VALUE):
            if not _TEMPLATE_TEXT.fullmatch(text) or not self.topic_template:
                raise ConfigurationError(
                    f"topic template {self.topic_template!r} can give no topic: use letters, digits, '.', '_', '-' and "
                    f"{ROUTED_BY_VALUE}"
                )

    @property
    def columns(self) -> Sequence[str]:
        """The columns that the table needs."""
        own = (self.event_id, self.routed_by, self.event_key, self.payload)
        return (*own, *(column for column, _ in self.headers), *(() if self.order_by is None else (self.order_by,)))

    def checks(self, connection: "Connection", table: "Identifier", leader: str | None) -> Iterator[Check]:  # noqa: ARG002
        """Yield the slots of connectors, and whether a harvester could publish too early."""
        slots = connection.execute(_SLOTS).fetchall()
        listed = ", ".join(f"{name} ({'read' if active else 'not read'} now, at {at})" for name, active, at in slots)
        yield Check(
            "connector",
            Level.OK if slots else Level.WARNING,
            f"replication slots: {listed or 'none, so no connector reads what was written before the migration'}",
        )
        if leader is not None:
            text = f"process {leader} has harvested: no harvester may run until Debezium has published the older rows"
            yield Check("harvester", Level.WARNING, text)

    def values(self, row: str, types: Types) -> RowValues:
        """Return the outbox's columns for a row."""
        from psycopg import sql

        parts = self.topic_template.split(ROUTED_BY_VALUE)
        routed = sql.SQL("{}::text").format(sql.Identifier(row, self.routed_by))
        pieces = [piece for part in parts for piece in (routed, sql.Literal(part))][1:]
        key = sql.Identifier(row, self.event_key)
        is_json = self.key_converter is KeyConverter.JSON
        headers = [(self.event_id, "id"), *self.headers]
        return RowValues(
            create_time=sql.SQL("now()"),
            topic=sql.SQL(" || ").join(pieces),
            key=_utf8(sql.SQL("to_json({})").format(key)) if is_json else self._bytes(row, self.event_key, types),
            value=self._bytes(row, self.payload, types),
            header_keys=sql.SQL("ARRAY[{}]::text[]").format(
                sql.SQL(", ").join(sql.Literal(name) for _, name in headers)
            ),
            header_values=sql.SQL("ARRAY[{}]::bytea[]").format(
                sql.SQL(", ").join(self._bytes(row, column, types) for column, _ in headers)
            ),
        )

    def _bytes(self, row: str, column: str, types: Types) -> "Composable":
        from psycopg import sql

        name = sql.Identifier(row, column)
        return name if types[column] == "bytea" else _utf8(name)


def view_of(old: OldTable, types: Types, written: str) -> "Composed":
    """Return the query of the view that takes the name of an old table.

    It has the table's columns, and no rows. If writers may delete their rows, it has the ids of those that the
    transaction has inserted, so that a DELETE finds them: object mappers check how many rows it has deleted.

    Args:
        old: The software whose table it is.
        types: The types of the table's columns.
        written: The name of the setting with the ids that the transaction has inserted.
    """
    from psycopg import sql

    event_id = old.columns[0]
    is_id = {name: old.may_delete and name == event_id for name in types}
    columns = sql.SQL(", ").join(
        sql.SQL("{}::{} AS {}").format(
            sql.SQL("w.id") if is_id[name] else sql.SQL("NULL"), verbatim(kind), sql.Identifier(name)
        )
        for name, kind in types.items()
    )
    if not old.may_delete:
        return sql.SQL("SELECT {} WHERE false").format(columns)
    return sql.SQL("SELECT {} FROM unnest({}) AS w (id)").format(columns, _ids(written))


def trigger_body(old: OldTable, insert: "Composed", written: str) -> "Composed":
    """Return the body of the function of the view's triggers.

    Args:
        old: The software whose table it is.
        insert: The statement that writes a row into the outbox.
        written: The name of the setting with the ids that the transaction has inserted.
    """
    from psycopg import sql

    if old.generated_id is not None:
        return sql.SQL("BEGIN\n  {} RETURNING id INTO {};\n  RETURN NEW;\nEND").format(
            insert, sql.Identifier("new", old.generated_id)
        )
    return sql.SQL(
        "BEGIN\n  IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;\n  {insert};\n"
        "  PERFORM set_config({written}, ((ARRAY[{id}::text] || {ids})[:{most}])::text, true);\n  RETURN NEW;\nEND"
    ).format(
        insert=insert,
        written=sql.Literal(written),
        id=sql.Identifier("new", old.columns[0]),
        ids=_ids(written),
        most=sql.Literal(_MOST_REMEMBERED),
    )


def _ids(written: str) -> "Composed":
    """Return SQL for the ids that the transaction has inserted. The setting is empty after a transaction."""
    from psycopg import sql

    return sql.SQL("coalesce(nullif(current_setting({}, true), ''), '{{}}')::text[]").format(sql.Literal(written))


def verbatim(text: str) -> "SQL":
    """Return SQL that PostgreSQL wrote, such as a type or a default, unchanged."""
    from psycopg import sql

    return sql.SQL(text)  # type: ignore[arg-type,unused-ignore] # it is not of a user


def _utf8(value: "Composable") -> "Composed":
    from psycopg import sql

    return sql.SQL("convert_to({}::text, 'UTF8')").format(value)
