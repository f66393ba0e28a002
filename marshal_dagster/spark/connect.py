"""Spark Connect: the operations that work differently in a session on a server.

A session on a server has no `sparkContext`. Its jobs are marked and cancelled as operations, by tag, and its settings
are read from the server. All sessions of a process are of the same kind: on servers, or local.
"""

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from marshal_dagster._internal.extras import Extra
from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession


CONNECT_RETRIES: Final = 3
"""How often an unanswered call is repeated, about a second in total. Spark's default is 10 minutes."""
FIRST_RELEASE: Final = "4.0"
"""The first Spark whose Connect client takes a retry policy and reports progress."""
ENDED: Final = "the Spark Connect server has ended, or has closed this session"
"""The error text for a session whose server has died."""
MISSING_CLIENT: Final = f"Spark Connect's client is not installed: {Extra.CONNECT.command}"
_REDACTION: Final = "spark.sql.redaction.string.regex"
# A server shows a statement's plan as text: each option's key and value, with the quotes of a string escaped.
_PRIVATE_NAMES: Final = (
    r"(?:kafka\.(?:sasl\.jaas\.config|ssl\.keystore\.key|[a-z.]*(?:password|secret|token|credential)[a-z.]*)"
    r"|databricks\.serviceCredential)(?<!token\.endpoint\.url)"
)
_PRIVATE_OPTIONS: Final = rf'(?s){_PRIVATE_NAMES}"\s+value:\s*"(?:[^"\\]|\\.)*'
_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_at_work: dict[str, dict[int, tuple[tuple[Any, ...], int]]] = {}
"""The stages that the server reported last and the number of running tasks, by tag and waiting thread."""


def is_connect(spark: "SparkSession") -> bool:
    """Return whether the session is on a Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def check_client() -> None:
    """Raise `ConfigurationError` if PySpark's client of Spark Connect is missing or too old."""
    try:
        import pyspark
    except ImportError as error:
        raise ConfigurationError(f"{MISSING_CLIENT} ({error})") from error

    # Importing the client would need the packages of the extra `connect`.
    if not Path(pyspark.__path__[0], "sql", "connect", "client", "retries.py").exists():
        raise ConfigurationError(
            f"Spark Connect needs PySpark {FIRST_RELEASE} or newer, but {pyspark.__version__} is installed: upgrade "
            "pyspark, or use a session in the run (docs/how-to/spark-sessions.md)"
        )


def has_newest_function(spark: "SparkSession") -> bool:
    """Return whether the server has the SQL functions that `FIRST_RELEASE` added."""
    return bool(spark.catalog.functionExists("try_validate_utf8"))


def fail_fast_when_dead(spark: "SparkSession") -> None:
    """Let calls to a dead server fail within one or two seconds, unless the user has set a retry policy.

    Otherwise a batch would hold its claim for ten more minutes. A restarted server does not have the session anyway.
    """
    check_client()
    from pyspark.sql.connect.client.retries import DefaultPolicy

    client = _of(spark).client
    policies = client.get_retry_policies()
    if [(type(policy), policy.max_retries) for policy in policies] == [(DefaultPolicy, DefaultPolicy().max_retries)]:
        client.set_retry_policies([DefaultPolicy(max_retries=CONNECT_RETRIES)])


def hide_secrets(spark: "SparkSession", options: Mapping[str, str]) -> None:
    """Let the server redact the secret options of a Kafka reader where it shows the statements of a session."""
    if not any(re.fullmatch(_PRIVATE_NAMES, name) for name in options):
        return
    pattern = spark.conf.get(_REDACTION, "")
    if not pattern:
        spark.conf.set(_REDACTION, _PRIVATE_OPTIONS)
    elif pattern != _PRIVATE_OPTIONS:
        _logger.warning(
            "%s is set on this Spark Connect server: make sure that it covers the secrets of the Kafka connection, "
            "which are part of the statements that the server shows",
            _REDACTION,
        )


def known_settings(spark: "SparkSession", names: Mapping[str, str]) -> dict[str, str]:
    """Return settings of the server, with `names` as defaults.

    A session cannot change any of the settings that this library reads here.
    """
    return {name: str(spark.conf.get(name, default)) for name, default in names.items()}


def may_resend_statements(spark: "SparkSession") -> bool:
    """Return whether the client may run a statement twice if an answer of the server is lost."""
    client = _of(spark).client
    return bool(client.get_retry_policies()) and not client._use_reattachable_execute  # noqa: SLF001 - no public name


@contextmanager
def tagged(spark: "SparkSession", tag: str) -> Iterator[None]:
    """Tag the operations of this thread, and record the progress that the server reports."""
    session = _of(spark)

    def note(stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:  # noqa: ANN401, ARG001, FBT001 - PySpark's
        if tag not in session.getTags():  # called in the thread that waits
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


def frame_of_writer(writer: object) -> "DataFrame | None":
    """Return the frame that a Connect session's writer writes; None for any other object."""
    if not type(writer).__module__.startswith("pyspark.sql.connect."):
        return None
    from pyspark.sql.connect.dataframe import DataFrame
    from pyspark.sql.connect.plan import LogicalPlan

    plan, session = getattr(writer, "_df", None), getattr(writer, "_spark", None)
    return DataFrame(plan, session) if isinstance(plan, LogicalPlan) and session is not None else None


@contextmanager
def reading(read: "DataFrame", part: "DataFrame") -> Iterator[None]:
    """Inside the block, let frames derived from `read` read what `part` reads; both are frames of a reader."""
    source, other = _source(read), _source(part)
    before, source._options = source._options, other._options  # noqa: SLF001 - a plan has no public name
    try:
        yield
    finally:
        source._options = before  # noqa: SLF001


def _source(frame: "DataFrame") -> Any:  # noqa: ANN401 - PySpark's
    plan: Any = frame._plan  # noqa: SLF001
    while plan._child is not None:  # noqa: SLF001
        plan = plan._child  # noqa: SLF001
    return plan


def stages_of(tag: str) -> list[tuple[int, int, bool]]:
    """Return tasks done, tasks in total, and whether it is running, for each stage of the tag's operations."""
    with _lock:
        at_work = list(_at_work.get(tag, {}).values())
    return [
        (stage.num_completed_tasks, stage.num_tasks, not stage.done and inflight > 0)
        for stages, inflight in at_work
        for stage in stages
    ]


def interrupt(spark: "SparkSession", tag: str) -> bool:
    """Cancel the tag's operations; return False if the session or its server is gone."""
    session = _of(spark)
    try:
        session.interruptTag(tag)
    except Exception:  # noqa: BLE001 - PySpark and gRPC raise many types
        return is_alive(spark)
    return True


def is_alive(spark: "SparkSession") -> bool:
    """Return whether the server still answers and has the session."""
    session = _of(spark)
    if session.is_stopped:
        return False
    try:
        session.conf.get("spark.app.name", "")  # not `spark.version`, which the client caches
    except Exception:  # noqa: BLE001 - PySpark and gRPC raise many types
        return False
    return True


def _of(spark: "SparkSession") -> "ConnectSession":
    return cast("ConnectSession", spark)
