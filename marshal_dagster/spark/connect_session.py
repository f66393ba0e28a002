"""Sessions on a Spark Connect server: created with a time limit, checked, and closed."""

import os
import socket
import threading
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.spark.connect import MISSING_CLIENT, check_client, fail_fast_when_dead
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.time_limit import within

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_CONNECT_WITHIN_S: Final = 5.0
_ANSWERS_WITHIN_S: Final = 60.0
_IF_IT_HANGS: Final = (
    "if the server hangs, stop it: with SparkConnectResource().stop_server() if it is this machine's own, else where "
    "it was started"
)
_CONNECT_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"


def connect(url: str, *, token: str | None = None) -> "SparkSession":
    """Return a new session on the server at `url` (`sc://host:port`), with `token` if the server needs one.

    Raises:
        ConfigurationError: The URL is invalid, the client's packages are missing, or the session is unsuitable
            (`check_session`).
        UnavailableError: No server listens there, or it creates no session within a minute.
    """
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
        within(_ANSWERS_WITHIN_S, lambda: _check_new_session(session))
    except MarshalError:
        disconnect(session)
        raise
    except TimeoutError as error:
        threading.Thread(target=disconnect, args=(session,), name="leave a server", daemon=True).start()
        raise UnavailableError(
            f"{server} accepted the connection but created no session within {_ANSWERS_WITHIN_S:g} s: {_IF_IT_HANGS}"
        ) from error
    except Exception as error:
        disconnect(session)
        raise UnavailableError(
            f"{server} created no session ({first_line(error)}): check URL and token (with a token Spark uses TLS, "
            f"except on localhost); {_IF_IT_HANGS}"
        ) from error
    return session


def _check_new_session(session: "SparkSession") -> None:
    from marshal_dagster.spark.session import check_session

    session.version  # noqa: B018 - the first request, whose refusal is reported as such
    check_session(session)


def disconnect(spark: "SparkSession") -> None:
    """Close the session, so that this process can have a local session again."""
    spark.stop()
    # PySpark closes the client again when the session is collected. That would shut down the threads that all sessions
    # share, at any moment of an operation of another session, which then fails.
    spark.client.close = lambda: None  # type: ignore[operator]
    os.environ.pop(_CONNECT_MODE, None)


def _target(url: str) -> tuple[str, int]:
    try:
        check_client()
        from pyspark.sql.connect.client import DefaultChannelBuilder
    except ImportError as error:
        raise ConfigurationError(f"{MISSING_CLIENT} ({error})") from error
    try:
        builder = DefaultChannelBuilder(url)
        host, _, port = builder.endpoint.rpartition(":")
        return host.strip("[]"), int(port)
    except Exception as error:
        raise ConfigurationError(
            f"url is {url.partition(';')[0]!r}; it must be the URL of a Spark Connect server: sc://host:port"
        ) from error
