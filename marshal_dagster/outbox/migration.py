"""Move the table of another outbox into an outbox of this library, while its writers continue unchanged.

The old table is renamed. A view takes its name, with a trigger that writes each inserted row into the outbox. All of
that is one transaction, which locks the old table first, so no row is written to the renamed table afterwards.

Rows that wait in a table of goharvest move into the outbox in the order of their ids, and get smaller ids than all rows
that are written later. Debezium reads a table's rows from the database's log. Its rows are therefore not moved unless
a column gives their order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, LiteralString

from marshal_dagster._internal.postgres import RENDERING, be_only_creator, check_name
from marshal_dagster._internal.texts import first_few
from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.outbox.old_tables import (
    DELETE_TRIGGER,
    INSERT_TRIGGER,
    Check,
    Level,
    OldTable,
    Types,
    trigger_body,
    verbatim,
    view_of,
)
from marshal_dagster.outbox.options import DEFAULT_OPTIONS
from marshal_dagster.outbox.schema import REGISTRY, OutboxTables

if TYPE_CHECKING:
    from psycopg.sql import Composable, Identifier

    from marshal_dagster._internal.postgres import Connection

DEFAULT_LOCK_TIMEOUT_S: Final = 2.0
_LONGEST_NAME_BYTES: Final = 48
_MANY_ROWS: Final = 100_000
_MOST_SHOWN: Final = 10

_KIND: Final[LiteralString] = """
    SELECT c.oid::bigint, c.relkind::text, pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class AS c
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s
    """
_COLUMNS: Final[LiteralString] = """
    SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attidentity <> '',
        CASE WHEN a.attgenerated = '' THEN pg_catalog.pg_get_expr(d.adbin, d.adrelid) END, a.attacl IS NOT NULL
    FROM pg_catalog.pg_attribute AS a
    LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = %s::oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
    """
_GRANTS: Final[LiteralString] = """
    SELECT CASE WHEN acl.grantee <> 0 THEN pg_catalog.pg_get_userbyid(acl.grantee) END, acl.privilege_type
    FROM pg_catalog.pg_class AS c, pg_catalog.aclexplode(c.relacl) AS acl
    WHERE c.oid = %s::oid AND acl.grantee <> c.relowner
    AND (acl.privilege_type IN ('INSERT', 'SELECT') OR (acl.privilege_type = 'DELETE' AND %s)) ORDER BY 1, 2
    """
_HOLDERS: Final[LiteralString] = """
    SELECT a.pid, a.state, coalesce(extract(epoch FROM clock_timestamp() - a.xact_start), 0)::float8
    FROM pg_catalog.pg_stat_activity AS a WHERE a.pid <> pg_catalog.pg_backend_pid() AND EXISTS (
        SELECT FROM pg_catalog.pg_locks AS l WHERE l.pid = a.pid AND l.relation = %s::oid AND l.granted
        AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    ) ORDER BY a.xact_start
    """
_SESSIONS: Final[LiteralString] = """
    SELECT pid, query FROM pg_catalog.pg_stat_activity
    WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid()
    AND backend_type = 'client backend' ORDER BY pid
    """
_HIDDEN: Final = "<insufficient privilege>"
"""What PostgreSQL shows as the statement of another role, if this one may not see it."""

_INSERT: Final[LiteralString] = "INSERT INTO {rows} (create_time, topic, key, value, header_keys, header_values) "
_MOVE: Final[LiteralString] = _INSERT + "SELECT {values} FROM {old} AS r ORDER BY {order_by}"  # noqa: S608 - constants
_REFUSED: Final[LiteralString] = """
    SELECT {order_by} FROM {old} AS r CROSS JOIN LATERAL (
        SELECT {topic} AS topic, {header_keys} AS header_keys, {header_values} AS header_values,
            {create_time} AS create_time
    ) AS moved
    WHERE coalesce(moved.topic !~ '^[A-Za-z0-9._-]{{1,249}}$' OR moved.topic IN ('.', '..'), true)
    OR cardinality(moved.header_keys) IS DISTINCT FROM cardinality(moved.header_values)
    OR array_position(moved.header_keys, NULL) IS NOT NULL OR NOT isfinite(moved.create_time)
    ORDER BY {order_by} LIMIT {limit}
    """
_REASONS: Final = "a topic is no name of a topic, a time is infinite, or the numbers of header keys and values differ"


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """What a migration does, or did."""

    statements: tuple[str, ...] = ()
    """The SQL of its one transaction."""
    checks: tuple[Check, ...] = ()
    """The results of the checks."""
    rows: int = 0
    """How many rows move into the outbox."""
    is_done: bool = False
    """Whether the table was moved, or the move undone, before; there is nothing to do."""
    position: str | None = None
    """The position in the database's log at which the change was committed; None until then."""

    @property
    def problems(self) -> list[Check]:
        """The checks that prevent the migration."""
        return [check for check in self.checks if check.level is Level.PROBLEM]


@dataclass(frozen=True, slots=True)
class _Relation:
    """A table or view."""

    oid: int
    kind: str
    owner: str

    @property
    def is_table(self) -> bool:
        """Whether it is a table, which may have partitions."""
        return self.kind in {"r", "p"}


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    type: str
    is_identity: bool
    default: str | None
    has_grants: bool


@dataclass(slots=True)
class _Statements:
    """Statements to run, as text."""

    connection: "Connection"
    texts: list[str] = field(default_factory=list)

    def add(self, statement: LiteralString, **names: "Composable") -> None:
        """Append a statement with its names filled in."""
        from psycopg import sql

        self.texts.append(sql.SQL(statement).format(**names).as_string(self.connection))


class OutboxMigration:
    """The move of another outbox's table into an outbox of this library.

    Example:
        ```python
        migration = OutboxMigration(OutboxTables(Database(dsn), "events"), GoharvestTable(), "outbox")
        for check in migration.plan().checks:
            print(check.level, check.text)
        migration.apply()
        ```
    """

    def __init__(
        self,
        tables: OutboxTables,
        old: OldTable,
        table: str,
        schema: str | None = None,
        *,
        lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    ) -> None:
        """Name the tables; no connection is opened.

        Args:
            tables: The outbox that gets the rows. It must exist.
            old: The software whose table it is.
            table: The name of its table.
            schema: The schema of its table, by default that of the outbox.
            lock_timeout_s: How many seconds to wait for the lock of the table. Its writers wait for as long.

        Raises:
            ConfigurationError: A name is invalid, or the outbox has the name of the table.
        """
        self._tables, self._old = tables, old
        self._schema, self._table = schema or tables.schema, table
        check_name("table", table, _LONGEST_NAME_BYTES)
        check_name("schema", self._schema)
        if (self._schema, table) in {(tables.schema, tables.name), (tables.schema, REGISTRY)}:
            raise ConfigurationError(
                f"table {self.shown} cannot be moved into an outbox of its own name, which the view for its writers "
                "needs: create an outbox with another --name"
            )
        self._lock_timeout_s = lock_timeout_s

    @property
    def shown(self) -> str:
        """The table's name with its schema."""
        return f"{self._schema}.{self._table}"

    @property
    def renamed(self) -> str:
        """The name of the old table after the migration."""
        return f"{self._table}_migrated"

    @property
    def _function(self) -> str:
        return f"{self._table}_to_outbox"

    def plan(self, *, is_undo: bool = False) -> MigrationPlan:
        """Run the checks and return what the migration would do; nothing is changed.

        Args:
            is_undo: Plan the way back.

        Returns:
            The plan.

        Raises:
            ConfigurationError: A table or column does not exist, or the role lacks a right.
            UnavailableError: The database does not answer.
        """
        with self._transaction() as connection:
            connection.execute("SET TRANSACTION READ ONLY")
            return self._plan_undo(connection) if is_undo else self._plan(connection)

    def apply(self) -> MigrationPlan:
        """Move the table in one transaction.

        Returns:
            The plan that was carried out.

        Raises:
            MarshalError: A check found a problem. Nothing was changed.
            ConfigurationError: A table or column does not exist, or the role lacks a right.
            UnavailableError: The database does not answer, or another transaction uses the table for too long.
        """
        return self._carry_out(is_undo=False)

    def undo(self) -> MigrationPlan:
        """Restore the table's name in one transaction. Rows that wait in the outbox stay there.

        Returns:
            The plan that was carried out.

        Raises:
            ConfigurationError: The table was not moved by this library, or the role lacks a right.
            UnavailableError: The database does not answer, or another transaction uses the view for too long.
        """
        return self._carry_out(is_undo=True)

    def _carry_out(self, *, is_undo: bool) -> MigrationPlan:
        with self._transaction() as connection:
            connection.execute(
                "SELECT set_config('lock_timeout', %s, true)", (f"{self._lock_timeout_s * 1_000:.0f}ms",)
            )
            be_only_creator(connection)
            relation = self._relation(connection, self._table)
            is_view = relation is not None and relation.kind == "v"
            if relation is not None and is_view == is_undo:
                self._lock(connection, relation)
            plan = self._plan_undo(connection) if is_undo else self._plan(connection)
            if plan.problems:
                raise MarshalError(f"nothing was changed: {'; '.join(check.text for check in plan.problems)}")
            for statement in plan.statements:
                moved = connection.execute(statement.encode())
                if not is_undo and statement.startswith("INSERT") and moved.rowcount != plan.rows:
                    raise self._tables.hindered(
                        f"{plan.rows - moved.rowcount} of {plan.rows} rows would be lost", "skips the insert"
                    )
            connection.commit()
            found = connection.execute("SELECT pg_catalog.pg_current_wal_insert_lsn()::text").fetchone()
        return replace(plan, position=None if found is None else str(found[0]))

    def _lock(self, connection: "Connection", relation: _Relation) -> None:
        """Lock the table or view. Raises `UnavailableError` that names the transactions that use it."""
        from psycopg import errors, sql

        lock = sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(self._named(self._table))
        try:
            connection.execute(lock)
        except errors.LockNotAvailable:
            connection.rollback()
            holders = self._holders(connection, relation) or "another transaction uses it"
            raise UnavailableError(
                f"table {self.shown} was not locked within {self._lock_timeout_s:g} s, and nothing was changed: "
                f"{holders}. Wait for that transaction or end it, then try again"
            ) from None

    @contextmanager
    def _transaction(self) -> "Iterator[Connection]":
        with self._tables.translated_errors(), self._tables.database.connect(is_one_transaction=True) as connection:
            yield connection

    def _plan(self, connection: "Connection") -> MigrationPlan:
        registration = self._tables.registration(connection)
        self._tables.check_tables(connection)
        relation = self._relation(connection, self._table)
        before = self._relation(connection, self.renamed)
        if relation is not None and relation.kind == "v" and before is not None:
            return MigrationPlan(is_done=True)
        if relation is None or not relation.is_table:
            what = "does not exist" if relation is None else "is not a table"
            raise ConfigurationError(f"table {self.shown} {what}: name the table with --table")
        if before is not None:
            raise ConfigurationError(
                f"table {self.shown} cannot be renamed to {self.renamed!r}, because that exists: rename or drop it"
            )
        columns = self._columns(connection, relation)
        types = {column.name: column.type for column in columns}
        self._check_columns(types)
        rows = self._count(connection)
        checks = (
            *self._check_rows(connection, types, rows),
            *self._check_sessions(connection),
            *self._old.checks(connection, self._named(self._table), registration.leader),
            *self._check_locks(connection, relation),
            *self._check_grants(columns),
        )
        moved = 0 if self._old.order_by is None else rows
        return MigrationPlan(tuple(self._statements(connection, relation, columns, moved)), checks, moved)

    def _plan_undo(self, connection: "Connection") -> MigrationPlan:
        relation = self._relation(connection, self._table)
        before = self._relation(connection, self.renamed)
        if relation is not None and relation.is_table and before is None:
            return MigrationPlan(is_done=True)
        if relation is None or relation.kind != "v" or before is None or not before.is_table:
            raise ConfigurationError(
                f"{self.shown} was not moved by `outbox migrate`: there is no view of that name beside a table "
                f"{self.renamed!r}"
            )
        from psycopg import sql

        statements = _Statements(connection)
        view, function = self._named(self._table), self._named(self._function)
        statements.add("LOCK TABLE {view} IN ACCESS EXCLUSIVE MODE", view=view)
        statements.add("DROP VIEW {view}", view=view)
        statements.add("DROP FUNCTION {function}()", function=function)
        statements.add(
            "ALTER TABLE {before} RENAME TO {name}",
            before=self._named(self.renamed),
            name=sql.Identifier(self._table),
        )
        found = connection.execute(self._tables.named("SELECT count(*) FROM {rows}"), ()).fetchone()
        waiting = 0 if found is None else int(found[0])
        text = (
            f"rows that wait in the outbox: {waiting}; `marshal-dagster outbox drain` publishes them before "
            f"{self._old.owner}"
        )
        checks = Check("order", Level.WARNING if waiting else Level.OK, f"{text} starts again")
        return MigrationPlan(tuple(statements.texts), (checks,))

    # What is in the database

    def _relation(self, connection: "Connection", name: str) -> _Relation | None:
        found = connection.execute(_KIND, (self._schema, name)).fetchone()
        return None if found is None else _Relation(*found)

    def _columns(self, connection: "Connection", relation: _Relation) -> list[_Column]:
        return [_Column(*found) for found in connection.execute(_COLUMNS, (relation.oid,))]

    def _count(self, connection: "Connection") -> int:
        from psycopg import sql

        found = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(self._named(self._table))).fetchone()
        return 0 if found is None else int(found[0])

    def _holders(self, connection: "Connection", relation: _Relation) -> str:
        """Return the processes with a transaction that uses the table, as text; empty if there are none."""
        found = connection.execute(_HOLDERS, (relation.oid,)).fetchall()
        return ", ".join(f"process {pid} ({state or 'state unknown'}, {age_s:.0f} s)" for pid, state, age_s in found)

    # The checks

    def _check_columns(self, types: Types) -> None:
        missing = [name for name in self._old.columns if name not in types]
        if missing:
            raise ConfigurationError(
                f"table {self.shown} is no table of {self._old.owner}: it has no column {', '.join(missing)}. Its "
                f"columns are {', '.join(types)}"
            )

    def _check_grants(self, columns: Sequence["_Column"]) -> Iterator[Check]:
        granted = [column.name for column in columns if column.has_grants]
        if granted:
            text = f"rights on single columns ({', '.join(granted)}) are not copied: grant INSERT on the view"
            yield Check("rights", Level.WARNING, text)
        lost = [column.name for column in columns if column.is_identity and column.name != self._old.generated_id]
        if lost:
            text = f"identity columns ({', '.join(lost)}) get no value: give each a default of a sequence first"
            yield Check("identity", Level.PROBLEM, text)

    def _check_rows(self, connection: "Connection", types: Types, rows: int) -> Iterator[Check]:
        order_by = self._old.order_by
        if order_by is None:
            text = (
                f"{rows} rows stay in the renamed table, because {self._old.owner} reads them from the database's log"
            )
            yield Check("rows", Level.OK, text)
            return
        refused = self._refused(connection, types)
        if refused:
            text = f"rows that the outbox refuses, by {order_by}: {first_few(refused, _MOST_SHOWN)}; {_REASONS}"
            yield Check("rows", Level.PROBLEM, text)
        elif rows > _MANY_ROWS:
            text = f"{rows} rows move, and writers wait meanwhile: let {self._old.owner} publish most of them first"
            yield Check("rows", Level.WARNING, text)
        else:
            yield Check("rows", Level.OK, f"{rows} rows move into the outbox, in the order of {order_by}")

    def _refused(self, connection: "Connection", types: Types) -> list[str]:
        """Return which rows the outbox would refuse, each by the column that gives the order."""
        from psycopg import sql

        values = self._old.values("r", types).named()
        statement = sql.SQL(_REFUSED).format(
            order_by=sql.Identifier("r", self._old.order_by or ""),
            old=self._named(self._table),
            limit=sql.Literal(_MOST_SHOWN),
            **values,
        )
        return [str(found) for (found,) in connection.execute(statement)]

    def _check_sessions(self, connection: "Connection") -> Iterator[Check]:
        """Yield whether processes of the old software are connected."""
        if self._old.statement is None:
            return
        found = connection.execute(_SESSIONS).fetchall()
        running = [pid for pid, query in found if self._old.statement.search(query or "") and self._table in query]
        if running:
            listed = first_few(running, _MOST_SHOWN)
            text = f"{self._old.owner} is connected to the database (processes {listed}): stop it, also its standbys"
            yield Check("sessions", Level.PROBLEM, text)
            return
        hidden = sum(query == _HIDDEN for _, query in found)
        if hidden:
            text = (
                f"{hidden} sessions of other roles hide their statements: make sure that {self._old.owner} is stopped"
            )
            yield Check("sessions", Level.WARNING, text)
            return
        yield Check("sessions", Level.OK, f"no process of {self._old.owner} is connected to the database")

    def _check_locks(self, connection: "Connection", relation: _Relation) -> Iterator[Check]:
        holders = self._holders(connection, relation)
        if holders:
            text = f"open transactions use the table, and the migration waits for them: {holders}"
            yield Check("locks", Level.WARNING, text)
            return
        yield Check("locks", Level.OK, "no open transaction uses the table")

    # The SQL

    def _named(self, name: str) -> "Identifier":
        from psycopg import sql

        return sql.Identifier(self._schema, name)

    def _statements(
        self, connection: "Connection", relation: _Relation, columns: Sequence[_Column], rows: int
    ) -> list[str]:
        """Return the statements of the migration; `rows` is the number of rows to move."""
        from psycopg import sql

        statements = _Statements(connection)
        view, renamed = self._named(self._table), self._named(self.renamed)
        outbox = sql.Identifier(self._tables.schema, self._tables.name)
        types = {column.name: column.type for column in columns}
        statements.add("LOCK TABLE {view} IN ACCESS EXCLUSIVE MODE", view=view)
        statements.add("ALTER TABLE {view} RENAME TO {name}", view=view, name=sql.Identifier(self.renamed))
        if rows and self._old.order_by is not None:
            statements.add(
                _MOVE,
                rows=outbox,
                values=self._old.values("r", types).listed(),
                old=renamed,
                order_by=sql.Identifier("r", self._old.order_by),
            )
            statements.add("DELETE FROM {old}", old=renamed)
        written = f"marshal_dagster.written_{relation.oid}"
        statements.add("CREATE VIEW {view} AS {select}", view=view, select=view_of(self._old, types, written))
        self._add_triggers(statements, types, outbox, written)
        self._add_defaults(statements, columns)
        self._add_rights(statements, relation)
        statements.add("COMMENT ON VIEW {view} IS {text}", view=view, text=sql.Literal(self._comment))
        if self._old.partitioner != DEFAULT_OPTIONS.partitioner:
            registry = sql.Identifier(self._tables.schema, REGISTRY)
            # Last, because it locks the table for the harvesters of all outboxes.
            statements.add("ALTER TABLE {registry} ADD COLUMN IF NOT EXISTS partitioner text", registry=registry)
            statements.add(
                "UPDATE {registry} SET partitioner = {partitioner} WHERE name = {name}",
                registry=registry,
                partitioner=sql.Literal(str(self._old.partitioner)),
                name=sql.Literal(self._tables.name),
            )
        return statements.texts

    @property
    def _comment(self) -> str:
        return (
            f"marshal-dagster writes rows inserted here to the outbox {self._tables.schema}.{self._tables.name}; "
            "`marshal-dagster outbox migrate --undo` removes this view"
        )

    def _add_triggers(self, statements: _Statements, types: Types, outbox: "Identifier", written: str) -> None:
        from psycopg import sql

        view, function = self._named(self._table), self._named(self._function)
        insert = sql.SQL(_INSERT + "VALUES ({values})").format(
            rows=outbox, values=self._old.values("new", types).listed()
        )
        body = trigger_body(self._old, insert, written).as_string(statements.connection)
        quote = "$$" if "$$" not in body else "$marshal_dagster$"
        settings = sql.SQL(" ").join(
            sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in RENDERING.items()
        )
        statements.add(
            "CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
            "SET search_path = pg_catalog, pg_temp {settings} AS {body}",
            function=function,
            settings=settings,
            body=verbatim(f"{quote}\n{body}\n{quote}"),
        )
        statements.add("REVOKE ALL ON FUNCTION {function}() FROM PUBLIC", function=function)
        statements.add(
            "CREATE TRIGGER {trigger} INSTEAD OF INSERT ON {view} FOR EACH ROW EXECUTE FUNCTION {function}()",
            trigger=sql.Identifier(INSERT_TRIGGER),
            view=view,
            function=function,
        )
        if self._old.may_delete:
            statements.add(
                "CREATE TRIGGER {trigger} INSTEAD OF DELETE ON {view} FOR EACH ROW EXECUTE FUNCTION {function}()",
                trigger=sql.Identifier(DELETE_TRIGGER),
                view=view,
                function=function,
            )

    def _add_defaults(self, statements: _Statements, columns: Sequence[_Column]) -> None:
        from psycopg import sql

        for column in columns:
            if column.default is not None and column.name != self._old.generated_id:
                statements.add(
                    "ALTER VIEW {view} ALTER COLUMN {column} SET DEFAULT {default}",
                    view=self._named(self._table),
                    column=sql.Identifier(column.name),
                    default=verbatim(column.default),
                )

    def _add_rights(self, statements: _Statements, relation: _Relation) -> None:
        """Copy the rights of the old table, and set the owners of the view and its function as those of the tables."""
        from psycopg import sql

        connection, view = statements.connection, self._named(self._table)
        for grantee, right in connection.execute(_GRANTS, (relation.oid, self._old.may_delete)):
            statements.add(
                "GRANT {right} ON {view} TO {grantee}",
                right=verbatim(right),
                view=view,
                grantee=verbatim("PUBLIC") if grantee is None else sql.Identifier(grantee),
            )
        found = connection.execute(
            "SELECT current_user, pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class AS c "
            "JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
            (self._tables.schema, self._tables.name),
        ).fetchone()
        if found is None:
            return
        user, outbox_owner = found
        if outbox_owner != user:
            statements.add(
                "ALTER FUNCTION {function}() OWNER TO {owner}",
                function=self._named(self._function),
                owner=sql.Identifier(outbox_owner),
            )
        if relation.owner != user:
            statements.add("ALTER VIEW {view} OWNER TO {owner}", view=view, owner=sql.Identifier(relation.owner))
