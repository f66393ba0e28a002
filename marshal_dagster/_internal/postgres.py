"""Connections to PostgreSQL for the outbox and the PostgreSQL sink, with error texts that do not show the password.

The module also has the checks that both need: of names, and of tables that could lose committed rows.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Identifier

    Connection = psycopg.Connection[tuple[Any, ...]]

DEFAULT_SCHEMA: Final = "public"
LONGEST_NAME_BYTES: Final = 63
_ANSWER_TIMEOUT_S: Final = 60.0

RENDERING: Final[Mapping[str, str]] = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
}
"""Settings with which PostgreSQL renders each value as the same text, whatever the role, database or machine has."""
SETTINGS: Final[Mapping[str, str]] = {
    # PostgreSQL then raises an error if a row-level security policy would hide rows from a statement.
    "row_security": "off",
    **RENDERING,
    # Arrays and bytes that this library sends are read as they are meant.
    "array_nulls": "on",
    "standard_conforming_strings": "on",
}
"""Settings of each connection of this library. They override those of the role and the database."""


class Secret(Protocol):
    """A string that is not shown when printed, such as pydantic's `SecretStr`."""

    def get_secret_value(self) -> str:
        """Return the string."""
        ...


class Database:
    """A PostgreSQL database that is reached by a connection string or URI.

    Example:
        ```python
        database = Database("postgresql://user:password@host:5432/orders")
        with database.connect() as connection:
            connection.execute("SELECT 1")
        ```
    """

    def __init__(self, dsn: str | Secret, *, connect_timeout_s: int = 10) -> None:
        """Store the connection string; nothing is connected yet.

        Args:
            dsn: A connection string or URI, or a secret that holds one. Its parameters override the defaults of this
                library, timeouts included.
            connect_timeout_s: How many seconds to wait for a connection to one host.
        """
        self._dsn = dsn if isinstance(dsn, str) else dsn.get_secret_value()
        self._connect_timeout_s = connect_timeout_s

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, with the variables of libpq (`PGPASSWORD`, ...) of this one."""
        given = self._given()
        from psycopg import pq
        from psycopg.conninfo import make_conninfo

        own = {
            option.keyword.decode(): option.val.decode()
            for option in pq.Conninfo.get_defaults()
            if option.val is not None and option.envvar is not None and option.envvar.decode() in os.environ
        }
        return vars(self) | {"_dsn": make_conninfo(**(own | given))}

    @property
    def has_password(self) -> bool:
        """Whether the connection string has a password. Raises `ConfigurationError` if the string is invalid."""
        return bool(self._given().get("password"))

    def connect(
        self,
        *,
        answer_timeout_s: float = _ANSWER_TIMEOUT_S,
        is_one_transaction: bool = False,
        **settings: Any,  # noqa: ANN401 - psycopg's
    ) -> "Connection":
        """Open a connection with `SETTINGS` in effect, whose transactions have the isolation level read committed.

        Args:
            answer_timeout_s: After how many seconds without an answer from the network the connection fails.
            is_one_transaction: Use the connection for one transaction, which begins here. The settings end with it, so
                that none remains in a pooler's connection. Begin each further transaction with `set_for_transaction`.
            settings: Parameters of psycopg. They override those of the connection string; `options` of both apply.

        Returns:
            An open connection of psycopg, which the caller closes.

        Raises:
            ConfigurationError: The connection string cannot be read, or the extra `postgres` is not installed.
            psycopg.Error: The database cannot be reached, or refuses the connection.
        """
        given = self._given()
        import psycopg

        if "options" in settings and given.get("options"):
            settings["options"] = f"{settings['options']} {given['options']}"
        defaults: dict[str, Any] = {
            "connect_timeout": self._connect_timeout_s,
            "application_name": "marshal-dagster",
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            "tcp_user_timeout": round(answer_timeout_s * 1_000),
        }
        connection = psycopg.connect(
            self._dsn,
            client_encoding="UTF8",
            **{name: value for name, value in defaults.items() if name not in given},
            **settings,
        )
        try:
            # Whatever level the role has by default: turns of a harvester must not fail beside open writers.
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            _set(connection, is_local=is_one_transaction)
            if not is_one_transaction:
                connection.commit()
        except BaseException:
            connection.close()
            raise
        return connection

    def _given(self) -> dict[str, Any]:
        require_extra(Extra.POSTGRES, "PostgreSQL")
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            return dict(conninfo_to_dict(self._dsn))
        except psycopg.ProgrammingError:
            raise ConfigurationError(
                "dsn: not a PostgreSQL connection string; use postgresql://user:password@host:port/database"
            ) from None

    def error_text(self, error: "psycopg.Error") -> str:
        """Return the first line of an error's message, with the password replaced by ***.

        Args:
            error: An error of psycopg.
        """
        return self._scrubbed((error.diag.message_primary or str(error)).strip().partition("\n")[0])

    def _scrubbed(self, text: str) -> str:
        password = str(self._given().get("password") or "")
        for secret in {password, quote(password), quote(password, safe="")} - {""}:
            text = text.replace(secret, "***")
        return text


def set_for_transaction(connection: "Connection") -> None:
    """Begin a transaction with `SETTINGS`, which are in effect until it ends."""
    _set(connection, is_local=True)


def _set(connection: "Connection", *, is_local: bool) -> None:
    connection.execute(
        "SELECT set_config(name, value, %s) FROM unnest(%s::text[], %s::text[]) AS s (name, value)",
        (is_local, list(SETTINGS), list(SETTINGS.values())),
    )


def be_only_creator(connection: "Connection") -> None:
    """Wait until no other transaction creates tables: one of two concurrent CREATE TABLE statements can fail."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('marshal-dagster tables', 0))")


_UNSAFE_TABLES: Final = """
    WITH RECURSIVE parts AS (
        SELECT c.oid, c.relname AS named, true AS is_named FROM pg_catalog.pg_class AS c
        JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = ANY(%s)
        UNION ALL
        SELECT i.inhrelid, p.named, false FROM parts AS p JOIN pg_catalog.pg_inherits AS i ON i.inhparent = p.oid
    )
    SELECT p.named, p.is_named, c.oid::pg_catalog.regclass::text, c.relkind::text, c.relpersistence::text,
        (SELECT min(r.rulename) FROM pg_catalog.pg_rewrite AS r WHERE r.ev_class = c.oid AND r.is_instead)
    FROM parts AS p JOIN pg_catalog.pg_class AS c ON c.oid = p.oid
    WHERE c.relkind NOT IN ('r', 'p') OR c.relpersistence = 'u' OR (c.relpersistence = 't' AND p.is_named)
        OR (p.is_named AND EXISTS (SELECT FROM pg_catalog.pg_rewrite AS r WHERE r.ev_class = c.oid AND r.is_instead))
    ORDER BY p.named, p.is_named DESC, 3
    """
"""Selects the tables that could lose rows: among those named, their partitions and the tables that inherit from them.

A temporary table that inherits from a named one is left out. It belongs to another session and gets no rows from here.
"""
_UNSAFE_KINDS: Final[Mapping[str, str]] = {
    "f": "is a foreign table, whose rows another server commits: use a table of this database",
    "v": "is a view: use the table itself",
    "m": "is a materialized view: use a table",
}


def check_tables_keep_rows(connection: "Connection", schema: str, tables: Sequence[str]) -> None:
    """Raise `ConfigurationError` if one of `tables` could lose committed rows, or stores them elsewhere.

    Partitions and inheriting tables are checked too, at any depth. A table that does not exist passes.
    """
    for named, is_named, full_name, kind, persistence, rule in connection.execute(
        _UNSAFE_TABLES, (schema, list(tables))
    ):
        table = f"{schema}.{named}"
        if kind in _UNSAFE_KINDS:
            reason = _UNSAFE_KINDS[kind]
        elif persistence == "u":
            reason = "is unlogged, so a crash of the server empties it: run ALTER TABLE ... SET LOGGED first"
        elif persistence == "t":
            reason = "is temporary, so its rows are deleted when the session ends: use a permanent table"
        elif rule is None:
            reason = "is not a table: use a table"
        else:
            reason = f"has the INSTEAD rule {rule!r}, which replaces statements by others: drop the rule"
        raise ConfigurationError(
            f"table: {table} {reason}"
            if is_named
            else f"table: {table}: its partition or child table {full_name} {reason}"
        )


def check_name(field: str, name: str, longest: int = LONGEST_NAME_BYTES) -> None:
    """Raise `ConfigurationError` unless `name` is a valid name for a table or schema, of at most `longest` bytes."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= longest or "\0" in name:
        raise ConfigurationError(f"{field}: {name!r}; give a name of 1 to {longest} bytes, without quotes")


def identifier(*names: str) -> "Identifier":
    """Quote a name for a statement with parameters, in which percent signs in names must be doubled."""
    from psycopg import sql

    return sql.Identifier(*(name.replace("%", "%%") for name in names))
