"""Spark Connect: a session on a server that is warm already, and what works differently there.

Such a session has no `sparkContext`: its jobs are marked and cancelled as operations, by tag, and settings are asked
of the server. A process has sessions of one kind, on servers or its own.
"""

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.spark.telling import first_line
from marshal_dagster.spark.waiting import within

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

CONNECT_RETRIES: Final = 3
"""How often a call is repeated that the server does not answer: given up after a second. Spark's own is 10 minutes."""

ENDED: Final = "the Spark Connect server has ended, or knows this session no more"
"""What is said of a session whose server has died."""

_CONNECT_WITHIN_S: Final = 5.0
_ANSWERS_WITHIN_S: Final = 60.0
_IF_IT_HANGS: Final = (
    "a server that hangs must be ended: by SparkConnectResource().stop_server() where it is this machine's own, else "
    "where it was started"
)
_CONNECT_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"
_REDACTION: Final = "spark.sql.redaction.string.regex"
# What a server shows of a statement is its plan as text: each option's key and value, with a string's quotes escaped.
_PRIVATE_NAMES: Final = r"kafka\.(?:sasl\.jaas\.config|ssl\.keystore\.key|ssl\.[a-z.]*password)"
_PRIVATE_OPTIONS: Final = rf'(?s){_PRIVATE_NAMES}"\s+value:\s*"(?:[^"\\]|\\.)*'
_MISSING_EXTRA: Final = "Spark Connect's client is not installed: pip install 'marshal-dagster[connect]'"

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_at_work: dict[str, dict[int, tuple[tuple[Any, ...], int]]] = {}
"""By tag and waiting thread: the stages that its server last told of, and how many tasks it ran then."""


def is_connect(spark: "SparkSession") -> bool:
    """Say whether the session is one on a Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def connect(url: str, *, token: str | None = None) -> "SparkSession":
    """Give a new session on the server at `url` (`sc://host:port`); `token` is what the server asks for, if it does.

    Raises `ConfigurationError`: the URL is none, the client's packages are missing, or the session cannot be used
    (`check_session`); `UnavailableError`: no one listens there, or gives no session within a minute.
    """
    from marshal_dagster.spark.session import check_session

    target = _target(url)
    try:
        with socket.create_connection(target, _CONNECT_WITHIN_S):
            pass
    except OSError as error:
        raise UnavailableError(
            f"no Spark Connect server answers at {target[0]}:{target[1]} ({error.strerror or error}): start it, or "
            "correct the URL"
        ) from error
    from pyspark.sql import SparkSession

    whole = url if token is None else f"{url.rstrip('/')}{'' if ';' in url else '/'};token={quote(token, safe='')}"
    session: SparkSession = SparkSession.builder.remote(whole).create()
    give_up_early(session)
    try:
        within(_ANSWERS_WITHIN_S, lambda: check_session(session))
    except MarshalError:
        disconnect(session)
        raise
    except TimeoutError as error:
        threading.Thread(target=disconnect, args=(session,), name="leave a server", daemon=True).start()
        raise UnavailableError(
            f"the Spark Connect server at {target[0]}:{target[1]} took the connection and gave no session within "
            f"{_ANSWERS_WITHIN_S:g} s: {_IF_IT_HANGS}"
        ) from error
    except Exception as error:
        disconnect(session)
        raise UnavailableError(
            f"the Spark Connect server at {target[0]}:{target[1]} gives no session ({first_line(error)}): "
            "with a token it speaks TLS, but on localhost; see that URL and token are what it asks for; "
            f"{_IF_IT_HANGS}"
        ) from error
    return session


def disconnect(spark: "SparkSession") -> None:
    """Leave the server, and let this process have a session of its own again."""
    spark.stop()
    os.environ.pop(_CONNECT_MODE, None)


def _target(url: str) -> tuple[str, int]:
    """Give host and port of a server's URL."""
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


def give_up_early(spark: "SparkSession") -> None:
    """Have calls to a server that has died fail within a second or two, unless the user has set how they are repeated.

    Else a batch would hold its claim for ten minutes more, and a server that comes back knows nothing of the session.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    client = _of(spark).client
    policies = client.get_retry_policies()
    if [(type(each), each.max_retries) for each in policies] == [(DefaultPolicy, DefaultPolicy().max_retries)]:
        client.set_retry_policies([DefaultPolicy(max_retries=CONNECT_RETRIES)])


def hide_secrets(spark: "SparkSession", options: Mapping[str, str]) -> None:
    """Have the server redact what is secret of a Kafka reader's options where it shows what a session runs."""
    if not any(re.fullmatch(_PRIVATE_NAMES, name) for name in options):
        return
    found = spark.conf.get(_REDACTION, "")
    if not found:
        spark.conf.set(_REDACTION, _PRIVATE_OPTIONS)
    elif found != _PRIVATE_OPTIONS:
        _logger.warning(
            "%s is set on this Spark Connect server: make sure that it covers the Kafka connection's secrets, which "
            "stand as text in what the server shows of a statement",
            _REDACTION,
        )


def known_settings(spark: "SparkSession", names: Mapping[str, str]) -> dict[str, str]:
    """Ask the server for settings, with what holds where they are not set.

    None of those that are asked for here can be changed by a session.
    """
    return {name: str(spark.conf.get(name, default)) for name, default in names.items()}


def may_send_twice(spark: "SparkSession") -> bool:
    """Say whether the client could have the server run a statement twice, when an answer is lost on its way."""
    client = _of(spark).client
    return bool(client.get_retry_policies()) and not client._use_reattachable_execute  # noqa: SLF001 - no public name


@contextmanager
def tagged(spark: "SparkSession", tag: str) -> Iterator[None]:
    """Mark the operations of this thread, and keep what the server tells of them."""
    session = _of(spark)

    def note(stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:  # noqa: ANN401, ARG001, FBT001 - PySpark's
        if tag not in session.getTags():  # it is called in the thread that waits
            return
        with _lock:
            at_work = _at_work.setdefault(tag, {})
            at_work[threading.get_ident()] = (tuple(stages or ()), inflight_tasks)
            if done:
                del at_work[threading.get_ident()]

    session.addTag(tag)
    session.client.register_progress_handler(cast("Any", note))
    try:
        yield
    finally:
        session.client.remove_progress_handler(cast("Any", note))
        session.getTags().discard(tag)
        with _lock:
            _at_work.pop(tag, None)


def stages_of(tag: str) -> list[tuple[int, int, bool]]:
    """Give tasks done, tasks in all, and whether it is at work, of each stage of the tag's operations."""
    with _lock:
        found = list(_at_work.get(tag, {}).values())
    return [
        (stage.num_completed_tasks, stage.num_tasks, not stage.done and inflight > 0)
        for stages, inflight in found
        for stage in stages
    ]


def interrupt(spark: "SparkSession", tag: str) -> bool:
    """End the tag's operations; False when the session or its server is gone."""
    session = _of(spark)
    try:
        session.interruptTag(tag)
    except Exception:  # noqa: BLE001 - of PySpark and gRPC, many kinds
        return is_alive(spark)
    return True


def is_alive(spark: "SparkSession") -> bool:
    """Say whether the server still answers and knows the session."""
    session = _of(spark)
    if session.is_stopped:
        return False
    try:
        session.conf.get("spark.app.name", "")  # the version it has asked for before
    except Exception:  # noqa: BLE001 - of PySpark and gRPC, many kinds
        return False
    return True


def _of(spark: "SparkSession") -> "ConnectSession":
    return cast("ConnectSession", spark)
