"""A PostgreSQL database by its connection string: how it is connected to, and its errors without the password."""

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

    def connect(self, *, answer_timeout_s: float = _ANSWER_TIMEOUT_S, **settings: Any) -> "Connection":  # noqa: ANN401 - psycopg's
        """Connect; `settings` are psycopg's and come before the connection string's, but for `options`: both count.

        `answer_timeout_s` is how long to wait for a network that delivers nothing.
        Raises `ConfigurationError` for what is no connection string, and psycopg's errors.
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
        return psycopg.connect(
            self._dsn,
            client_encoding="UTF8",
            **{name: value for name, value in defaults.items() if name not in given},
            **settings,
        )

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


def be_only_creator(connection: "Connection") -> None:
    """Wait until no other transaction creates tables: of two that do at once, both find nothing, and one fails."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('marshal-dagster tables', 0))")


def check_name(field: str, name: str, longest: int = LONGEST_NAME_BYTES) -> None:
    """Raise `ConfigurationError` unless PostgreSQL takes `name`, of at most `longest` bytes, for a table or schema."""
    if not 0 < len(name.encode()) <= longest or "\0" in name:
        raise ConfigurationError(f"{field}: {name!r}; give a name of 1 to {longest} bytes, unquoted")


def identifier(*names: str) -> "Identifier":
    """Quote a name for a statement that is given parameters, as all here are: its percent signs are doubled."""
    from psycopg import sql

    return sql.Identifier(*(name.replace("%", "%%") for name in names))
