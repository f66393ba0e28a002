"""Sessions on a Spark Connect server: made with a time limit, checked, and left again."""

import os
import socket
import threading
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.spark.connect import fail_fast_when_dead
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.time_limit import within

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_CONNECT_WITHIN_S: Final = 5.0
_ANSWERS_WITHIN_S: Final = 60.0
_IF_IT_HANGS: Final = (
    "a server that hangs must be ended: by SparkConnectResource().stop_server() where it is this machine's own, else "
    "where it was started"
)
_CONNECT_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"
_MISSING_EXTRA: Final = "Spark Connect's client is not installed: pip install 'marshal-dagster[connect]'"


def connect(url: str, *, token: str | None = None) -> "SparkSession":
    """Give a new session on the server at `url` (`sc://host:port`); `token` is what the server asks for, if it does.

    Raises `ConfigurationError`: the URL is none, the client's packages are missing, or the session cannot be used
    (`check_session`); `UnavailableError`: no one listens there, or gives no session within a minute.
    """
    from marshal_dagster.spark.session import check_session

    host, port = _target(url)
    server = f"the Spark Connect server at {host}:{port}"
    try:
        socket.create_connection((host, port), _CONNECT_WITHIN_S).close()
    except OSError as error:
        raise UnavailableError(
            f"no Spark Connect server answers at {host}:{port} ({error.strerror or error}): start it, or correct the "
            "URL"
        ) from error
    from pyspark.sql import SparkSession

    whole = url if token is None else f"{url.rstrip('/')}{'' if ';' in url else '/'};token={quote(token, safe='')}"
    session: SparkSession = SparkSession.builder.remote(whole).create()
    fail_fast_when_dead(session)
    try:
        within(_ANSWERS_WITHIN_S, lambda: check_session(session))
    except MarshalError:
        disconnect(session)
        raise
    except TimeoutError as error:
        threading.Thread(target=disconnect, args=(session,), name="leave a server", daemon=True).start()
        raise UnavailableError(
            f"{server} took the connection and gave no session within {_ANSWERS_WITHIN_S:g} s: {_IF_IT_HANGS}"
        ) from error
    except Exception as error:
        disconnect(session)
        raise UnavailableError(
            f"{server} gives no session ({first_line(error)}): with a token it speaks TLS, but on localhost; see that "
            f"URL and token are what it asks for; {_IF_IT_HANGS}"
        ) from error
    return session


def disconnect(spark: "SparkSession") -> None:
    """Leave the server, and let this process have a session of its own again."""
    spark.stop()
    os.environ.pop(_CONNECT_MODE, None)


def _target(url: str) -> tuple[str, int]:
    try:
        from pyspark.sql.connect.client import DefaultChannelBuilder
    except ImportError as error:
        raise ConfigurationError(f"{_MISSING_EXTRA} ({error})") from error
    try:
        builder = DefaultChannelBuilder(url)
        host, _, port = builder.endpoint.rpartition(":")
        return host.strip("[]"), int(port)
    except Exception as error:
        raise ConfigurationError(f"url: {url.partition(';')[0]!r} is no server's; give sc://host:port") from error
