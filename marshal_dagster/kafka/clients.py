"""Kafka clients as the protocol needs them: quiet, bounded in time, with the settings that hold its promises.

A client is made at once and connects in the background; `reach` waits until it has, or tells in one line why
not. What the client library logs and reports goes to the client's `ClientLog`, which forwards it to Python's
logging at DEBUG: nothing is written to stderr. Both arrive while the client is polled.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, ThrottleEvent
from confluent_kafka.admin import AdminClient

from marshal_dagster.errors import AuthorizationError, ConfigurationError, UnavailableError
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.connection_errors import (
    NO_BROKERS,
    FailureCause,
    FailureReason,
    reason_in,
    without_openssl_numbers,
)
from marshal_dagster.kafka.tls_diagnostics import with_handshake_details

READER_GROUP: Final = "marshal-dagster-reads-by-position"
"""The group id that a consumer must have; nothing is ever committed under it and no right on it is needed."""

HARMLESS_TO_A_READER: Final = frozenset(
    {
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
    }
)
"""Codes of errors that a consumer hands out because of its group id; a reader by position passes over them."""

_LOG = logging.getLogger(__name__)
_TELLING_LINES: Final = frozenset({"FAIL", "ERROR"})
_REASON_HOLDS_S: Final = 60.0
_SLICE_S: Final = 0.5
_PATIENCE_S: Final = 1.0
_PAUSE_S: Final = 0.05
_SHORTEST_REQUEST_S: Final = 0.05

Client = Producer | Consumer | AdminClient
AnyClient = TypeVar("AnyClient", bound=Client)


class ClientLog:
    """Where one client's log lines and errors go: to Python's logging at DEBUG; the telling reason is kept.

    They arrive while the client is polled. `fatal` is the error after which the client is of no more use, if there
    was one; the client also raises it, once, out of whatever polls. `throttled_s` is the longest time (seconds) for
    which a broker had the client wait because of a quota.
    """

    def __init__(self, client_id: str, servers: str, connection: KafkaConnection | None = None) -> None:
        """Keep nothing yet; `client_id` and `servers` stand in messages. By `connection` more can be told."""
        self.client_id = client_id
        self.servers = servers
        self._connection = connection
        self.fatal: str | None = None
        self.throttled_s = 0.0
        self._reason: FailureReason | None = None
        self._reason_at_s = 0.0

    @property
    def reason(self) -> FailureReason | None:
        """Why there is no connection: the most telling line of the last minute since `clear()`, None without any."""
        return self._reason if time.monotonic() - self._reason_at_s < _REASON_HOLDS_S else None

    @property
    def user(self) -> str | None:
        """Who asks, where that is known by name."""
        return None if self._connection is None else self._connection.username

    def look_into(self) -> None:
        """Look at the server, where that tells more of why there is no connection than Kafka's client does."""
        if self.reason is not None and self._connection is not None:
            self.consider(with_handshake_details(self.reason, self._connection))

    def callbacks(self) -> dict[str, Any]:
        """Give the settings that bind a client to this log."""
        return {"logger": self, "error_cb": self.on_error, "throttle_cb": self.on_throttle}

    def clear(self) -> None:
        """Forget the reason: there is a connection."""
        self._reason = None

    def log(self, _level: int, _template: str, *values: object) -> None:
        """Take a log line; the client calls it as it would `logging.Logger.log`."""
        _LOG.debug("%s: %s", self.client_id, " ".join(map(str, values)))
        kind, line = (values[0], str(values[-1])) if values else ("", "")
        if kind == "FATAL":
            self.fatal = without_openssl_numbers(line.partition("Fatal error: ")[2] or line)
        elif kind in _TELLING_LINES:
            self.consider(reason_in(line))

    def on_error(self, error: KafkaError) -> None:
        """Take an error that belongs to no request."""
        _LOG.debug("%s: %s", self.client_id, error)
        if error.fatal():
            self.fatal = error.str()
        elif error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - the library's own name
            self.consider(reason_in(error.str()))

    def on_throttle(self, event: ThrottleEvent) -> None:
        """Take what a broker says of a quota that this client went beyond; 0 s once it no longer does."""
        _LOG.debug("%s: broker %s has it wait for %g s", self.client_id, event.broker_name, event.throttle_time)
        self.throttled_s = max(self.throttled_s, event.throttle_time)

    def consider(self, reason: FailureReason) -> None:
        """Keep a reason why there is no connection, unless a more specific one is known."""
        held = self.reason
        if held is None or reason.cause >= held.cause:
            self._reason = reason
            self._reason_at_s = time.monotonic()

    def unavailable(self, within_s: float) -> UnavailableError:
        """Build the error that says which servers, why, and what to do; it was tried for `within_s` seconds."""
        reason = self.reason or FailureReason(FailureCause.UNKNOWN, "", "no answer")
        server = f"{reason.server}: " if reason.server not in {"", self.servers} else ""
        server = "" if reason.server in reason.text else server
        tried = "" if reason.cause.is_lasting else f" (tried for {within_s:.3g} s)"
        return UnavailableError(
            f"Kafka at {self.servers} cannot be reached: {server}{reason.text}{tried}; {reason.advice}"
        )


@contextlib.contextmanager
def checked_settings() -> Iterator[None]:
    """Turn the client library's complaint about its settings into one of ours."""
    try:
        yield
    except (KafkaException, TypeError, ValueError, AttributeError) as error:
        message = error_in(error).str() if isinstance(error, KafkaException) else str(error)
        text = without_openssl_numbers(message)
        fields = "ssl_key_location and ssl_key_password" if "ssl.key" in text else "client_settings and the ssl_ fields"
        raise ConfigurationError(f"the Kafka client refuses its settings: {text}; check {fields}") from None


def error_in(raised: KafkaException) -> KafkaError:
    """Give the client library's error that an exception carries."""
    error = raised.args[0] if raised.args else None
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError.UNKNOWN, str(raised))


def producer(
    connection: KafkaConnection, *, delivery_timeout_ms: int, client_id: str, compression: str | None = None
) -> tuple[Producer, ClientLog]:
    """Make an idempotent producer with acks=all that sends at once (protocol.md, section 6, "Instance id").

    `delivery_timeout_ms` (milliseconds) is how long a record may wait for its acknowledgement before it is
    given up. The queue takes 1,000,000 records. `reach` it before the first record: one sent earlier may wait
    500 ms for a producer id. `compression` overrides what the connection says.

    Raises:
        ConfigurationError: the client library refuses the settings.
    """
    settings: dict[str, Any] = {
        **({} if compression is None else {"compression.type": compression}),
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 0,
        "message.timeout.ms": delivery_timeout_ms,
        "queue.buffering.max.messages": 1_000_000,
    }
    return make_client(Producer, connection, client_id, settings)


def consumer(
    connection: KafkaConnection,
    *,
    client_id: str,
    committed_only: bool = False,
    fetch_wait_ms: int = 100,
) -> tuple[Consumer, ClientLog]:
    """Make a consumer that reads by position: `assign` it partitions with offsets.

    It never commits; a position outside the log is an error (`_AUTO_OFFSET_RESET`), not a jump; the present
    end shows as a message with error `_PARTITION_EOF`. `fetch_wait_ms` (milliseconds) is how long the broker
    holds a fetch that finds nothing: the end shows after at most that, and an idle consumer asks again that
    often. Pass over messages whose error's code is in `HARMLESS_TO_A_READER`.

    The coordination log is not read with `committed_only`: a foreign transaction left open would stop every reader.

    Raises:
        ConfigurationError: the client library refuses the settings.
    """
    defaults = {
        "fetch.queue.backoff.ms": 1,  # the default of 1000 stalls a reader that outruns the queue
        "fetch.error.backoff.ms": 50,
    }
    settings = {
        "group.id": READER_GROUP,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "check.crcs": True,
        "isolation.level": "read_committed" if committed_only else "read_uncommitted",
        "fetch.wait.max.ms": fetch_wait_ms,
    }
    return make_client(Consumer, connection, client_id, settings, defaults)


def admin(connection: KafkaConnection, *, client_id: str) -> tuple[AdminClient, ClientLog]:
    """Make a client for requests about topics and groups.

    Raises:
        ConfigurationError: the client library refuses the settings.
    """
    return make_client(AdminClient, connection, client_id, {})


def make_client(
    kind: Callable[[dict[str, Any]], AnyClient],
    connection: KafkaConnection,
    client_id: str,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[AnyClient, ClientLog]:
    """Make a client with `settings`, and its log; the connection's own settings come before `defaults` alone.

    Raises:
        ConfigurationError: the client library refuses the settings.
    """
    log = ClientLog(client_id, connection.bootstrap_servers, connection)
    ours = {**settings, "client.id": client_id, "allow.auto.create.topics": False, **log.callbacks()}
    with checked_settings():
        return kind({**defaults, **connection.librdkafka(), **ours}), log


def reach(client: Client, log: ClientLog, *, timeout_s: float, topic: str | None = None) -> None:
    """Wait until `client` has a connection to the cluster.

    Give a producer or consumer the name of a topic that is known to exist where there is one: the answer is then small.
    A consumer must not have been assigned anything yet. Wrong credentials, certificates and protocols are told after
    about a second; what may mend itself (nothing listens, a name is not known) is tried for all of `timeout_s`.

    Raises:
        UnavailableError: there was none within `timeout_s` seconds; one line with the servers, the reason and what to
            do.
        AuthorizationError: this user may write nowhere, so a producer is refused.
    """
    start = time.monotonic()
    answers, is_looked_into = 0, False
    # The first answer comes from an address of the list, the second from a broker by its number: a producer that has
    # spoken to one of those gets its producer id at once.
    while answers < (2 if isinstance(client, Producer) else 1):
        left_s = start + timeout_s - time.monotonic()
        if left_s <= 0:
            raise log.unavailable(timeout_s)
        try:
            _ask(client, log, topic, min(_SLICE_S, left_s))
            answers += 1
        except KafkaException:
            _poll(client, log, min(_PAUSE_S, left_s), topic)
            spent_s = time.monotonic() - start
            if log.reason and spent_s >= min(_PATIENCE_S, timeout_s):
                if not is_looked_into:
                    log.look_into()
                    is_looked_into = True
                if log.reason.cause.is_lasting:
                    raise log.unavailable(spent_s) from None
    _poll(client, log, 0, topic)
    log.clear()


def _ask(client: Client, log: ClientLog, topic: str | None, timeout_s: float) -> None:
    """Ask for the brokers; a broker that starts, or is fenced, may list none."""
    try:
        list_brokers(client, max(_SHORTEST_REQUEST_S, timeout_s), topic)
    except KafkaException as raised:
        if error_in(raised).code() == KafkaError._PARTIAL:  # noqa: SLF001 - the library's own name
            log.consider(NO_BROKERS)
        raise


def list_brokers(client: Client, timeout_s: float, topic: str | None = None) -> list[int]:
    """Return the numbers of the brokers, by metadata; an answer without brokers raises `_PARTIAL`.

    The admin client's `describe_cluster` ends the process if an answer lists no broker (librdkafka 2.16).
    """
    listed = client.list_topics(timeout=timeout_s) if topic is None else client.list_topics(topic, timeout=timeout_s)
    if not listed.brokers:
        raise KafkaException(KafkaError(KafkaError._PARTIAL))  # noqa: SLF001 - the library's own name
    return sorted(listed.brokers)


def _poll(client: Client, log: ClientLog, timeout_s: float, topic: str | None) -> None:
    """Let the client hand out what it has logged; a producer that is of no more use raises here."""
    try:
        client.poll(timeout_s)
    except KafkaException as raised:
        error = error_in(raised)
        log.fatal = error.str()
        if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            needed = None if topic is None else on_topic(topic, Right.WRITE)
            grant = f"this user {needed}: {needed.command(log.servers, log.user)}" if needed else "WRITE on its topic"
            raise AuthorizationError(
                f"Kafka at {log.servers} refuses a producer: this user may write to no topic; grant {grant}"
            ) from None
        raise UnavailableError(f"Kafka at {log.servers} refuses the client {log.client_id!r}: {error.str()}") from None


def close_client(client: Client, log: ClientLog) -> None:
    """Close a client without waiting where that could take long; a record that still waits in a producer is dropped.

    One without a connection may be in the midst of looking up a name, for which closing waits some seconds; it is
    closed in the background.
    """
    if isinstance(client, Producer):
        client.purge()
    if log.reason is None:
        _close(client)
    else:
        close_client_later(client, log)


def close_client_later(client: Client, log: ClientLog) -> None:
    """Close a client in the background: one that still waits for an answer closes only when it has it or gives up."""
    threading.Thread(target=_close, args=(client,), name=f"close {log.client_id}", daemon=True).start()


def _close(client: Client) -> None:
    """Close by whatever way this version of the client library has; else the last reference does it."""
    close = getattr(client, "__exit__", None) or getattr(client, "close", None)
    arguments = (None, None, None) if hasattr(client, "__exit__") else ()
    # A fatal error that was raised to nobody yet comes out of the next call, out of closing as a SystemError.
    with contextlib.suppress(KafkaException, SystemError):
        client.poll(0)
    with contextlib.suppress(KafkaException, SystemError):
        if close is not None:
            close(*arguments)


def check_reachable(connection: KafkaConnection, *, client_id: str = "marshal-dagster") -> None:
    """Connect once, within the connection's own time-out, and let go.

    Raises:
        ConfigurationError: the client library refuses the settings.
        UnavailableError: as `reach`.
    """
    client, log = admin(connection, client_id=client_id)
    try:
        reach(client, log, timeout_s=connection.timeout_s)
    finally:
        close_client(client, log)
