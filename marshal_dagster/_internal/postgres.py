"""A PostgreSQL database by its connection string: how it is connected to, and its errors without the password."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote

from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Identifier

    Connection = psycopg.Connection[tuple[Any, ...]]

DEFAULT_SCHEMA: Final = "public"
LONGEST_NAME_BYTES: Final = 63
_ANSWER_TIMEOUT_S: Final = 60.0

SETTINGS: Final[Mapping[str, str]] = {
    # PostgreSQL then raises an error where a policy of row-level security would hide rows from a statement.
    "row_security": "off",
    # Each value is rendered as one text, whatever time zone and styles the role, the database or the machine has.
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
}
"""Settings of each connection of the library; they override those of its role and database."""


class Secret(Protocol):
    """A string that does not show itself, such as pydantic's `SecretStr`."""

    def get_secret_value(self) -> str:
        """Return the string."""
        ...


class Database:
    """A database, by a connection string or URI; what that says of time-outs comes before the defaults."""

    def __init__(self, dsn: str | Secret, *, connect_timeout_s: int = 10) -> None:
        self._dsn = dsn if isinstance(dsn, str) else dsn.get_secret_value()
        self._connect_timeout_s = connect_timeout_s

    @property
    def has_password(self) -> bool:
        """Whether the connection string has a password in it. Raises `ConfigurationError` for what is none."""
        return bool(self._given().get("password"))

    def connect(
        self,
        *,
        answer_timeout_s: float = _ANSWER_TIMEOUT_S,
        is_one_transaction: bool = False,
        **settings: Any,  # noqa: ANN401 - psycopg's
    ) -> "Connection":
        """Connect, with `SETTINGS` in effect.

        Args:
            answer_timeout_s: How long to wait for a network that delivers nothing.
            is_one_transaction: Use the connection for one transaction, which begins here at isolation level read
                committed. The settings end with it, so that none remains in a pooler's connection. Begin each further
                transaction with `set_for_transaction`.
            settings: Parameters of psycopg. They override those of the connection string; `options` of both apply.

        Raises:
            ConfigurationError: The connection string cannot be read.
            psycopg.Error: The database cannot be reached, or refuses the connection.
        """
        import psycopg

        given = self._given()
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
            if is_one_transaction:
                connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            _set(connection, is_local=is_one_transaction)
            if not is_one_transaction:
                connection.commit()
        except BaseException:
            connection.close()
            raise
        return connection

    def _given(self) -> dict[str, Any]:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            return dict(conninfo_to_dict(self._dsn))
        except psycopg.ProgrammingError:
            raise ConfigurationError(
                "dsn: not a PostgreSQL connection string; give postgresql://user:password@host:port/database"
            ) from None

    def error_text(self, error: "psycopg.Error") -> str:
        """Return what an error says, in one line, without the password."""
        return self._scrubbed((error.diag.message_primary or str(error)).strip().partition("\n")[0])

    def _scrubbed(self, text: str) -> str:
        password = str(self._given().get("password") or "")
        for secret in {password, quote(password), quote(password, safe="")} - {""}:
            text = text.replace(secret, "***")
        return text


def set_for_transaction(connection: "Connection") -> None:
    """Begin a transaction with `SETTINGS`, which end with it."""
    _set(connection, is_local=True)


def _set(connection: "Connection", *, is_local: bool) -> None:
    connection.execute(
        "SELECT set_config(name, value, %s) FROM unnest(%s::text[], %s::text[]) AS s (name, value)",
        (is_local, list(SETTINGS), list(SETTINGS.values())),
    )


def be_only_creator(connection: "Connection") -> None:
    """Wait until no other transaction creates tables: of two that do at once, both find nothing, and one fails."""
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
"""Selects those of the named tables, their partitions and the tables that inherit from them that could lose rows.

A temporary table that inherits from a named one belongs to another session and gets no row of ours: it is left out.
"""
_UNSAFE_KINDS: Final[Mapping[str, str]] = {
    "f": "is a foreign table, whose rows another server commits: name a table of this database",
    "v": "is a view: name the table itself",
    "m": "is a materialized view: name a table",
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
            reason = "is unlogged, so a crash of the server empties it: ALTER TABLE ... SET LOGGED first"
        elif persistence == "t":
            reason = "is temporary, so its rows end with the session: name a permanent table"
        elif rule is None:
            reason = "is not a table: name a table"
        else:
            reason = f"has the INSTEAD rule {rule!r}, which replaces statements by others: drop the rule"
        raise ConfigurationError(
            f"table: {table} {reason}" if is_named else f"table: {table}: its part {full_name} {reason}"
        )


def check_name(field: str, name: str, longest: int = LONGEST_NAME_BYTES) -> None:
    """Raise `ConfigurationError` unless PostgreSQL takes `name`, of at most `longest` bytes, for a table or schema."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= longest or "\0" in name:
        raise ConfigurationError(f"{field}: {name!r}; give a name of 1 to {longest} bytes, unquoted")


def identifier(*names: str) -> "Identifier":
    """Quote a name for a statement that is given parameters, as all here are: its percent signs are doubled."""
    from psycopg import sql

    return sql.Identifier(*(name.replace("%", "%%") for name in names))
