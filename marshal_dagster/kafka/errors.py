"""Turn the failure of a request to the brokers into an error of this library, and list the failures to retry."""

from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaError

from marshal_dagster.errors import (
    AuthorizationError,
    ConfigurationError,
    MarshalError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.kafka.acls import Needed
from marshal_dagster.kafka.clients import ClientLog

# The codes that old versions of the client library have no names for.
_UNKNOWN_TOPIC_ID: Final = 100
_BROKER_REMOVED: Final = -137  # the cluster no longer lists it

LEADER_MOVED: Final = frozenset(
    {
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._NOENT,  # noqa: SLF001 - the client library's name; no partition has a leader
    }
)
"""Codes after which the partitions' leaders must be looked up again."""

MISSING: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        _UNKNOWN_TOPIC_ID,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
"""Codes of answers that there is no such topic or partition."""

PASSING: Final = LEADER_MOVED | {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_CONTROLLER,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
    _BROKER_REMOVED,
    KafkaError._PARTIAL,  # noqa: SLF001 - an answer that lists no broker
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._WAIT_COORD,  # noqa: SLF001
}
"""Codes of temporary failures, after which the same request is retried."""

_FORBIDDEN: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)
_REFUSED: Final = frozenset(
    {
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_REQUEST,
        KafkaError.OFFSET_METADATA_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_DELETION_DISABLED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError._INVALID_ARG,  # noqa: SLF001
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    """The description of a request, for error messages."""

    doing: str
    """What the request does, as it follows "cannot" in a message."""
    needs: Needed
    """The rights that the request needs."""
    topic: str | None = None
    """The topic that must exist."""


def failure(request: Request, error: KafkaError, log: ClientLog, tried_s: float) -> MarshalError:
    """Return the error that explains why `request` failed, after `tried_s` seconds of trying, and what to do."""
    code = error.code()
    cannot = f"cannot {request.doing} on {log.servers}"
    if code in MISSING and request.topic is not None:
        return TopicNotFoundError(
            f"{cannot}: there is no such topic, or this user may not see it; check the name, create the topic, or "
            f"grant {request.needs}"
        )
    if code in _FORBIDDEN:
        return right_missing(cannot, request.needs, log)
    if code in _REFUSED:
        return ConfigurationError(f"{cannot}: {error.str()}; correct the request, or the settings of the brokers")
    if log.reason is not None:
        return log.unavailable(tried_s)
    return UnavailableError(f"{cannot}: {error.str()} (tried for {tried_s:.3g} s); check the brokers, then try again")


def right_missing(cannot: str, needs: Needed, log: ClientLog) -> AuthorizationError:
    """Return the error that names the missing rights and the command that grants them."""
    return AuthorizationError(f"{cannot}: not allowed; grant this user {needs}: {needs.command(log.servers, log.user)}")
