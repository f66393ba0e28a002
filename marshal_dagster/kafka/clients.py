"""Create Kafka clients with the settings that the protocol needs, wait until they are connected, and close them.

A client is created at once and connects in the background. `reach` waits for the connection, or raises an error with
the reason. The log lines and errors of the client library go to the client's `ClientLog` while the client is polled.
`ClientLog` forwards them to Python's logging at DEBUG, so nothing is written to stderr.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, ThrottleEvent
from confluent_kafka.admin import AdminClient

from marshal_dagster.errors import AuthorizationError, ConfigurationError, UnavailableError
from marshal_dagster.kafka import authentication, password_rotation
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
from marshal_dagster.kafka.token_callbacks import TokenCallback

READER_GROUP: Final = "marshal-dagster-reads-by-position"
"""The group id of consumers that read by position. Nothing is committed under it, and no right on it is needed."""

HARMLESS_TO_A_READER: Final = frozenset(
    {
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
    }
)
"""Codes of errors that a consumer reports because of its group id. A consumer that reads by position ignores them."""

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
    """The log of one client. It forwards lines to Python's logging at DEBUG, and keeps the most specific failure.

    Lines and errors arrive while the client is polled. `fatal` is the error that made the client unusable, or None; the
    client also raises it once, from the call that polls. `throttled_s` is the longest time in seconds that a broker
    delayed the client because of a quota.
    """

    def __init__(self, client_id: str, servers: str, connection: KafkaConnection | None = None) -> None:
        """Create an empty log.

        Args:
            client_id: The client id, for messages.
            servers: The bootstrap servers, for messages.
            connection: The connection. With it, errors can name the user, and `look_into` can check the server.
        """
        self.client_id = client_id
        self.servers = servers
        self._connection = connection
        self.fatal: str | None = None
        self.throttled_s = 0.0
        self._reason: FailureReason | None = None
        self._reason_at_s = 0.0

    @property
    def reason(self) -> FailureReason | None:
        """Why there is no connection: the most specific reason of the last minute since `clear()`, or None."""
        return self._reason if time.monotonic() - self._reason_at_s < _REASON_HOLDS_S else None

    @property
    def user(self) -> str | None:
        """The user name of the connection, or None."""
        return None if self._connection is None else self._connection.username

    def look_into(self) -> None:
        """Check the server or the certificate for a better explanation of why there is no connection."""
        if self.reason is not None and self._connection is not None:
            self.consider(with_handshake_details(self.reason, self._connection))

    def callbacks(self) -> dict[str, Any]:
        """Return the settings that connect a client to this log."""
        return {"logger": self, "error_cb": self.on_error, "throttle_cb": self.on_throttle}

    def clear(self) -> None:
        """Delete the reason, because there is a connection."""
        self._reason = None

    def log(self, _level: int, _template: str, *values: object) -> None:
        """Process a log line. The client calls this like `logging.Logger.log`."""
        _LOG.debug("%s: %s", self.client_id, " ".join(map(str, values)))
        kind, line = (values[0], str(values[-1])) if values else ("", "")
        if kind == "FATAL":
            self.fatal = without_openssl_numbers(line.partition("Fatal error: ")[2] or line)
        elif kind in _TELLING_LINES:
            self.consider(reason_in(line))

    def on_error(self, error: KafkaError) -> None:
        """Process an error that belongs to no request."""
        _LOG.debug("%s: %s", self.client_id, error)
        if error.fatal():
            self.fatal = error.str()
        elif error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - a public code of the client library
            self.consider(reason_in(error.str()))

    def on_throttle(self, event: ThrottleEvent) -> None:
        """Process a broker's report that it delays this client because of a quota; 0 s when the delay ends."""
        _LOG.debug("%s: broker %s delays it by %g s (quota)", self.client_id, event.broker_name, event.throttle_time)
        self.throttled_s = max(self.throttled_s, event.throttle_time)

    def consider(self, reason: FailureReason) -> None:
        """Keep a reason why there is no connection, unless the present one is more specific."""
        held = self.reason
        if held is None or reason.cause >= held.cause:
            self._reason = reason
            self._reason_at_s = time.monotonic()

    def unavailable(self, within_s: float) -> UnavailableError:
        """Return the error that names the servers, the reason and what to do, after `within_s` seconds of trying."""
        reason = self.reason or FailureReason(FailureCause.UNKNOWN, "", "no answer")
        server = f"{reason.server}: " if reason.server not in {"", self.servers} else ""
        server = "" if reason.server in reason.text else server
        tried = "" if reason.cause.is_lasting else f" (tried for {within_s:.3g} s)"
        return UnavailableError(
            f"Kafka at {self.servers} cannot be reached: {server}{reason.text}{tried}; {self._advice(reason)}"
        )

    def _advice(self, reason: FailureReason) -> str:
        connection = self._connection
        if reason.cause is not FailureCause.AUTHENTICATION or connection is None or not connection.uses_sasl:
            return reason.advice
        return reason.better_advice or authentication.advice(vars(connection))


@contextlib.contextmanager
def checked_settings() -> Iterator[None]:
    """Raise `ConfigurationError` if the client library rejects its settings."""
    try:
        yield
    except (KafkaException, TypeError, ValueError, AttributeError) as error:
        message = error_in(error).str() if isinstance(error, KafkaException) else str(error)
        text = without_openssl_numbers(message)
        raise ConfigurationError(f"the Kafka client rejects its settings: {text}; {_what_to_do(text)}") from None


def _what_to_do(text: str) -> str:
    return next(advice for part, advice in _ADVICE_ON_SETTINGS.items() if part in text)


_ADVICE_ON_SETTINGS: Final = {
    "SASL mechanism GSSAPI": "PyPI's wheel of confluent-kafka has no Kerberos: install libsasl2 and librdkafka of this "
    "machine's distribution, then `pip install --no-binary confluent-kafka confluent-kafka`",
    'property: "https.ca.location"': "oauth_ca_location needs confluent-kafka 2.11 or newer: upgrade it",
    'property: "sasl.oauthbearer.metadata.': "oauth_azure_resource needs confluent-kafka 2.12 or newer: upgrade it",
    "ssl.keystore": "check ssl_keystore_location and ssl_keystore_password",
    "ssl.key": "check ssl_key_location and ssl_key_password",
    "": "check client_settings and the ssl_ fields",
}
"""What to do about a text of the client library that contains the key, in order of precedence."""


def error_in(raised: KafkaException) -> KafkaError:
    """Return the client library's error in an exception."""
    error = raised.args[0] if raised.args else None
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError.UNKNOWN, str(raised))


def producer(
    connection: KafkaConnection, *, delivery_timeout_ms: int, client_id: str, compression: str | None = None
) -> tuple[Producer, ClientLog]:
    """Create an idempotent producer with acks=all that sends without delay (protocol.md, section 6, "Instance id").

    Its queue holds 1,000,000 records. Call `reach` before the first record, because a record that is sent earlier may
    wait 500 ms for a producer id.

    Args:
        connection: How to reach the cluster.
        delivery_timeout_ms: How long, in milliseconds, a record may wait for its acknowledgement before it fails.
        client_id: The client id.
        compression: The compression type; it overrides that of the connection.

    Returns:
        The producer and its log.

    Raises:
        ConfigurationError: The client library rejects the settings.
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


def headers_of(message: Message) -> list[tuple[str, bytes | None]]:
    """Return the headers of a record, none if the name of one is not UTF-8, which only some clients can write.

    For such a name confluent-kafka fails, whatever the other headers are.
    """
    try:
        headers: Any = message.headers()
    except (SystemError, UnicodeDecodeError):
        return []
    return list(headers or ())


def consumer(
    connection: KafkaConnection,
    *,
    client_id: str,
    committed_only: bool = False,
    fetch_wait_ms: int = 100,
) -> tuple[Consumer, ClientLog]:
    """Create a consumer that reads by position: `assign` partitions with offsets to it.

    It never commits. A position outside the log is an error (`_AUTO_OFFSET_RESET`) and does not move. The end of a
    partition is reported by a message with the error `_PARTITION_EOF`. Ignore messages whose error code is in
    `HARMLESS_TO_A_READER`.

    Args:
        connection: How to reach the cluster.
        client_id: The client id.
        committed_only: Read only committed records. Readers of the coordination log do not set it, because an open
            transaction of another application would stop them.
        fetch_wait_ms: How long, in milliseconds, the broker waits if there are no new records. The end is reported
            after that time at most, and an idle consumer sends requests at that interval.

    Returns:
        The consumer and its log.

    Raises:
        ConfigurationError: The client library rejects the settings.
    """
    defaults = {
        "fetch.queue.backoff.ms": 1,  # the default of 1000 delays a reader that is faster than the queue
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
    """Create a client for requests about topics and groups; return it and its log.

    Raises:
        ConfigurationError: The client library rejects the settings.
    """
    return make_client(AdminClient, connection, client_id, {})


def make_client(
    kind: Callable[[dict[str, Any]], AnyClient],
    connection: KafkaConnection,
    client_id: str,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[AnyClient, ClientLog]:
    """Create a client and its log.

    Args:
        kind: The class of the client.
        connection: How to reach the cluster.
        client_id: The client id.
        settings: Settings that override those of the connection.
        defaults: Settings that those of the connection override.

    Raises:
        ConfigurationError: The client library rejects the settings.
        UnavailableError: The source of tokens gives none.
    """
    log = ClientLog(client_id, connection.bootstrap_servers, connection)
    ours = {**settings, "client.id": client_id, "allow.auto.create.topics": False, **log.callbacks()}
    theirs = connection.librdkafka()
    if isinstance(callback := theirs.get("oauth_cb"), TokenCallback):
        callback.fetch_first()
    rotates = password_rotation.can_rotate(connection)
    with checked_settings():
        client = (_referable(kind) if rotates else kind)({**defaults, **theirs, **ours})
    if rotates:
        password_rotation.watch(client, connection)
    return client, log


def _referable(kind: Callable[[dict[str, Any]], AnyClient]) -> Callable[[dict[str, Any]], AnyClient]:
    """Return a subclass of the client's class to whose objects there can be weak references."""
    return type(kind.__name__, (kind,), {}) if isinstance(kind, type) else kind


def reach(client: Client, log: ClientLog, *, timeout_s: float, topic: str | None = None) -> None:
    """Wait until `client` has a connection to the cluster.

    Wrong credentials, certificates and protocols are reported after about one second. Failures that may be temporary
    (nothing listens, or a host name is not known) are retried for all of `timeout_s`.

    Args:
        client: The client. A consumer must not have an assignment yet.
        log: The log of the client.
        timeout_s: How long to wait, in seconds.
        topic: The name of a topic that exists, if one is known. The answer to a producer or consumer is then small.

    Raises:
        UnavailableError: There was no connection within `timeout_s` seconds; the message has the servers, the reason
            and what to do.
        AuthorizationError: This user may write to no topic, so the brokers refuse a producer.
    """
    start = time.monotonic()
    answers, is_looked_into = 0, False
    # The first answer comes from an address in the list, the second one from a broker with an id. After that answer a
    # producer gets its producer id at once.
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
    """Request the list of brokers; a broker that is starting or fenced may list none."""
    try:
        list_brokers(client, max(_SHORTEST_REQUEST_S, timeout_s), topic)
    except KafkaException as raised:
        if error_in(raised).code() == KafkaError._PARTIAL:  # noqa: SLF001 - the library's own name
            log.consider(NO_BROKERS)
        raise


def list_brokers(client: Client, timeout_s: float, topic: str | None = None) -> list[int]:
    """Return the ids of the brokers from the cluster's metadata; raise `_PARTIAL` if the answer lists none.

    The admin client's `describe_cluster` is not used, because it ends the process in that case (librdkafka 2.16).
    """
    listed = client.list_topics(timeout=timeout_s) if topic is None else client.list_topics(topic, timeout=timeout_s)
    if not listed.brokers:
        raise KafkaException(KafkaError(KafkaError._PARTIAL))  # noqa: SLF001 - the library's own name
    return sorted(listed.brokers)


def _poll(client: Client, log: ClientLog, timeout_s: float, topic: str | None) -> None:
    """Poll, so that the client delivers log lines and errors; raise if the producer has become unusable."""
    try:
        client.poll(timeout_s)
    except KafkaException as raised:
        error = error_in(raised)
        log.fatal = error.str()
        if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            needed = None if topic is None else on_topic(topic, Right.WRITE)
            grant = f"this user {needed}: {needed.command(log.servers, log.user)}" if needed else "WRITE on its topic"
            raise AuthorizationError(
                f"Kafka at {log.servers} refuses a producer, because this user may write to no topic; grant {grant}"
            ) from None
        raise UnavailableError(
            f"Kafka at {log.servers} refuses the client {log.client_id!r}: {error.str()}; check the brokers' logs"
        ) from None


def close_client(client: Client, log: ClientLog) -> None:
    """Close a client without a long wait; records that still wait in a producer are dropped.

    A client without a connection is closed in the background. It may be looking up a host name, and closing it would
    wait some seconds for that.
    """
    password_rotation.forget(client)
    if isinstance(client, Producer):
        client.purge()
    if log.reason is None:
        _close(client)
    else:
        close_client_later(client, log)


def close_client_later(client: Client, log: ClientLog) -> None:
    """Close a client in the background, because a client that waits for an answer closes only after the answer."""
    password_rotation.forget(client)
    threading.Thread(target=_close, args=(client,), name=f"close {log.client_id}", daemon=True).start()


def _close(client: Client) -> None:
    """Close a client by the method that this version of the client library has.

    If it has none, the client is closed when its last reference is deleted.
    """
    close = getattr(client, "__exit__", None) or getattr(client, "close", None)
    arguments = (None, None, None) if hasattr(client, "__exit__") else ()
    # The next call raises a fatal error that was not raised yet. If that call closes the client, it raises SystemError.
    with contextlib.suppress(KafkaException, SystemError):
        client.poll(0)
    with contextlib.suppress(KafkaException, SystemError):
        if close is not None:
            close(*arguments)


def check_reachable(connection: KafkaConnection, *, client_id: str = "marshal-dagster") -> None:
    """Connect once, within the connection's timeout, and close the connection.

    Raises:
        ConfigurationError: The client library rejects the settings.
        UnavailableError: As `reach`.
    """
    client, log = admin(connection, client_id=client_id)
    try:
        reach(client, log, timeout_s=connection.timeout_s)
    finally:
        close_client(client, log)
