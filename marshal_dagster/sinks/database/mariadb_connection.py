"""Connections to MariaDB with the settings that the sink needs, and error texts that do not show the password."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from marshal_dagster._internal.postgres import Secret
from marshal_dagster.errors import ConfigurationError

Connection = Any
"""A connection of PyMySQL, which has no types."""

_PORT: Final = 3306
_TLS: Final = ("ssl_ca", "ssl_cert", "ssl_key")
_THIS_MACHINE: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts to which connections are not encrypted unless the URL names certificates."""
_NETWORK_S: Final = 30.0
"""How many seconds an answer may take beyond the longest statement."""

SQL_MODE: Final = (
    "ANSI_QUOTES",
    "STRICT_ALL_TABLES",
    "NO_ZERO_DATE",
    "NO_ZERO_IN_DATE",
    "NO_AUTO_VALUE_ON_ZERO",
    "NO_ENGINE_SUBSTITUTION",
    "ERROR_FOR_DIVISION_BY_ZERO",
    "SIMULTANEOUS_ASSIGNMENT",
)
"""The session's SQL mode: values are never adjusted to a column, and names are quoted as in standard SQL."""

_SETTINGS: Final[Mapping[str, str]] = {
    "sql_mode": f"'{','.join(SQL_MODE)}'",
    # A TIMESTAMP is written and read in UTC, whatever zone the server has.
    "time_zone": "'+00:00'",
    # Notes report values that a column has changed.
    "sql_notes": "1",
    "max_error_count": "64",
    "sql_auto_is_null": "0",
    "sql_safe_updates": "0",
    "sql_select_limit": "DEFAULT",
    "foreign_key_checks": "1",
    "unique_checks": "1",
    "check_constraint_checks": "1",
    # Lists of numbers stay ranges of the primary key, so that only these rows are read.
    "in_predicate_conversion_threshold": "0",
}
"""Settings of each connection, as SQL. They override those of the server and of `init_connect`."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of a sink's transaction, in seconds."""

    connect_s: float
    lock_s: float
    statement_s: float


class Server:
    """A MariaDB database that is reached by a URL."""

    def __init__(self, dsn: str | Secret, timeouts: Timeouts) -> None:
        """Read the URL; nothing is connected yet.

        Args:
            dsn: `mariadb://user:password@host:port/database`, or a secret that holds it. The parameters `ssl_ca`,
                `ssl_cert` and `ssl_key` are paths of PEM files.
            timeouts: The limits of a transaction.

        Raises:
            ConfigurationError: The URL cannot be read.
        """
        text = dsn if isinstance(dsn, str) else dsn.get_secret_value()
        self.timeouts = timeouts
        self._given = _given(text)
        self.database = str(self._given["database"])

    def connect(self) -> Connection:
        """Open a connection with the session's settings and isolation level read committed.

        Raises:
            ConfigurationError: A file of the URL cannot be used, or the server's certificate is refused.
            pymysql.Error: The database cannot be reached, or refuses the connection.
        """
        try:
            return self._connect()
        except OSError as error:
            raise ConfigurationError(
                f"dsn: the files of ssl_ca, ssl_cert and ssl_key cannot be used ({error.strerror or error}). They must "
                "be PEM files that this process can read"
            ) from None

    def _connect(self) -> Connection:
        import pymysql
        from pymysql.constants import CLIENT

        answer_s = self.timeouts.statement_s + _NETWORK_S
        connection = pymysql.connect(
            **self._given,
            charset="utf8mb4",
            autocommit=False,
            # UPDATE then reports the rows that it found, also those whose values stay the same.
            client_flag=CLIENT.FOUND_ROWS,
            connect_timeout=math.ceil(self.timeouts.connect_s),
            read_timeout=answer_s,
            write_timeout=answer_s,
            program_name="marshal-dagster",
        )
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"SET {', '.join(f'{name} = {value}' for name, value in self._settings().items())}")
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE")
        except BaseException:
            connection.close()
            raise
        return connection

    def _settings(self) -> dict[str, str]:
        lock_s = str(max(1, math.ceil(self.timeouts.lock_s)))
        return {
            **_SETTINGS,
            "innodb_lock_wait_timeout": lock_s,
            "lock_wait_timeout": lock_s,
            "max_statement_time": str(self.timeouts.statement_s),
            # The server ends the transaction of a process that stops in the middle of it.
            "idle_transaction_timeout": str(max(1, math.ceil(self.timeouts.statement_s))),
        }

    def error_text(self, error: Exception) -> str:
        """Return the first line of an error's message, with the password replaced by ***."""
        text = str(error.args[-1] if error.args else error).strip().partition("\n")[0]
        password = str(self._given.get("password") or "")
        for secret in {password, quote(password), quote(password, safe="")} - {""}:
            text = text.replace(secret, "***")
        return text


def _given(dsn: str) -> dict[str, Any]:
    """Return the arguments of the driver. Raises `ConfigurationError` without showing the URL."""
    wrong = ConfigurationError("dsn: not a MariaDB URL; use mariadb://user:password@host:port/database")
    try:
        parts = urlsplit(dsn)
        port = parts.port or _PORT
    except ValueError:
        raise wrong from None
    database = unquote(parts.path.removeprefix("/"))
    if parts.scheme not in {"mariadb", "mysql"} or not parts.hostname or not database or "/" in database:
        raise wrong
    parameters = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := sorted(parameters.keys() - set(_TLS)):
        raise ConfigurationError(f"dsn: unknown parameter {unknown[0]!r}; a MariaDB URL may have {', '.join(_TLS)}")
    given: dict[str, Any] = {"host": parts.hostname, "port": port, "database": database}
    if parts.username is not None:
        given["user"] = unquote(parts.username)
    if parts.password is not None:
        given["password"] = unquote(parts.password)
    if not parameters and parts.hostname in _THIS_MACHINE:
        given["ssl_disabled"] = True
    if parameters:
        verifies = "ssl_ca" in parameters
        given |= parameters | {"ssl_verify_cert": verifies, "ssl_verify_identity": verifies}
    return given
