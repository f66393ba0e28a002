"""Spark Connect: what works differently in a session on a server.

Such a session has no `sparkContext`: its jobs are marked and cancelled as operations, by tag, and settings are asked
of the server. A process has sessions of one kind, on servers or its own.
"""

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession


CONNECT_RETRIES: Final = 3
"""How often a call is repeated that the server does not answer: given up after a second. Spark's own is 10 minutes."""
ENDED: Final = "the Spark Connect server has ended, or knows this session no more"
"""What is said of a session whose server has died."""
_REDACTION: Final = "spark.sql.redaction.string.regex"
# What a server shows of a statement is its plan as text: each option's key and value, with a string's quotes escaped.
_PRIVATE_NAMES: Final = r"kafka\.(?:sasl\.jaas\.config|ssl\.keystore\.key|ssl\.[a-z.]*password)"
_PRIVATE_OPTIONS: Final = rf'(?s){_PRIVATE_NAMES}"\s+value:\s*"(?:[^"\\]|\\.)*'
_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_at_work: dict[str, dict[int, tuple[tuple[Any, ...], int]]] = {}
"""By tag and waiting thread: the stages that its server last told of, and how many tasks it ran then."""


def is_connect(spark: "SparkSession") -> bool:
    """Say whether the session is one on a Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def fail_fast_when_dead(spark: "SparkSession") -> None:
    """Have calls to a server that has died fail within a second or two, unless the user has set how they are repeated.

    Else a batch would hold its claim for ten minutes more, and a server that comes back knows nothing of the session.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    client = _of(spark).client
    policies = client.get_retry_policies()
    if [(type(policy), policy.max_retries) for policy in policies] == [(DefaultPolicy, DefaultPolicy().max_retries)]:
        client.set_retry_policies([DefaultPolicy(max_retries=CONNECT_RETRIES)])


def hide_secrets(spark: "SparkSession", options: Mapping[str, str]) -> None:
    """Have the server redact what is secret of a Kafka reader's options where it shows what a session runs."""
    if not any(re.fullmatch(_PRIVATE_NAMES, name) for name in options):
        return
    pattern = spark.conf.get(_REDACTION, "")
    if not pattern:
        spark.conf.set(_REDACTION, _PRIVATE_OPTIONS)
    elif pattern != _PRIVATE_OPTIONS:
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


def may_resend_statements(spark: "SparkSession") -> bool:
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


def frame_of_writer(writer: object) -> "DataFrame | None":
    """Return the frame that a writer of this session kind writes; None for anything else."""
    if not type(writer).__module__.startswith("pyspark.sql.connect."):
        return None
    from pyspark.sql.connect.dataframe import DataFrame
    from pyspark.sql.connect.plan import LogicalPlan

    plan, session = getattr(writer, "_df", None), getattr(writer, "_spark", None)
    return DataFrame(plan, session) if isinstance(plan, LogicalPlan) and session is not None else None


@contextmanager
def reading(read: "DataFrame", part: "DataFrame") -> Iterator[None]:
    """Have what is made of `read` read what `part` reads, while the block lasts; both are a reader's frames."""
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
    """Give tasks done, tasks in all, and whether it is at work, of each stage of the tag's operations."""
    with _lock:
        at_work = list(_at_work.get(tag, {}).values())
    return [
        (stage.num_completed_tasks, stage.num_tasks, not stage.done and inflight > 0)
        for stages, inflight in at_work
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
