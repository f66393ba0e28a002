"""Build Kafka connections from options and environment variables, and open the coordination log.

The commands use it to reach the coordination topic's cluster and the data topics' cluster. Errors name the option or
the variable that is wrong.
"""

import difflib
import getpass
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.coordination.checked_log import open_rationalizer
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, TopicNotFoundError
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.messages import GO_HEARTBEAT_INTERVAL_MS, is_name

_SERVERS: Final = "MARSHAL_BOOTSTRAP_SERVERS"
_PREFIX: Final = "MARSHAL_"
_DATA_PREFIX: Final = "MARSHAL_DATA_"
_SETTINGS: Final = tuple(field.name for field in fields(KafkaConnection))
_SIMILAR: Final = 0.85
"""How similar a misspelled name is to the right one; 1 is the same."""
READING: Final = (Right.READ,)
WRITING: Final = (Right.READ, Right.WRITE)


def is_kafka_named(options: ConnectionOptions, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the options or the environment specify a Kafka cluster."""
    environment = os.environ if environment is None else environment
    is_given = options.connection_file is not None or options.bootstrap_servers is not None
    return is_given or bool(environment.get(_SERVERS, "").strip())


def connection_of(options: ConnectionOptions, environment: Mapping[str, str] | None = None) -> KafkaConnection:
    """Return the connection that the options, the connection file and the environment specify.

    Raises:
        ConfigurationError: No cluster is specified, two are specified, or a field is wrong.
    """
    environment = os.environ if environment is None else environment
    _check_options(options)
    if options.connection_file is not None:
        connection = KafkaConnection.from_file(options.connection_file)
    elif not is_kafka_named(options, environment):
        raise ConfigurationError(
            "no Kafka cluster is specified: use --bootstrap-servers HOST:PORT or --connection FILE, or set "
            f"{_SERVERS} (`marshal-dagster kafka up` starts a cluster on this machine)"
        )
    else:
        named = {} if options.bootstrap_servers is None else {_SERVERS: options.bootstrap_servers}
        connection = KafkaConnection.from_environment({**environment, **named})
    return connection if options.timeout_s is None else replace(connection, timeout_s=options.timeout_s)


def data_connection_of(
    file: Path | None, coordination: KafkaConnection, environment: Mapping[str, str] | None = None
) -> KafkaConnection:
    """Return the connection to the data topics' cluster. By default it is the coordination topic's cluster.

    Raises:
        ConfigurationError: The connection file or a variable is wrong.
    """
    environment = os.environ if environment is None else environment
    if file is not None:
        return KafkaConnection.from_file(file)
    if environment.get(f"{_DATA_PREFIX}BOOTSTRAP_SERVERS", "").strip():
        return KafkaConnection.from_environment(environment, prefix=_DATA_PREFIX)
    return coordination


def misspelled_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that look like a misspelled setting of a connection, each with the right name."""
    found = {}
    for name in sorted(environment):
        prefix = next((prefix for prefix in (_DATA_PREFIX, _PREFIX) if name.startswith(prefix)), None)
        if prefix is None or (setting := name.removeprefix(prefix).lower()) in _SETTINGS:
            continue
        for near in difflib.get_close_matches(setting, _SETTINGS, n=1, cutoff=_SIMILAR):
            found[name] = f"{prefix}{near.upper()}"
    return found


def open_log(connection: KafkaConnection, topic: str) -> KafkaLog:
    """Return the coordination log of a cluster, without connecting to it. Raises `ConfigurationError`."""
    require_topic_name("--coordination-topic", topic)
    return KafkaLog(connection, topic)


def open_reader(
    connection: KafkaConnection,
    topic: str,
    followed: list[str] | None = None,
    interval_ms: int = GO_HEARTBEAT_INTERVAL_MS,
    rights: tuple[Right, ...] = READING,
) -> Rationalizer:
    """Open a reader of the coordination log. Nothing is read yet.

    Args:
        connection: The coordination topic's cluster.
        topic: The coordination topic.
        followed: Data topics whose coordination partitions are read; by default all are read.
        interval_ms: The heartbeat interval of the members, in milliseconds. It matters only to a command that writes.
        rights: The rights that this user must have on the coordination topic.

    Raises:
        AuthorizationError: The user lacks one of the `rights`.
        ConfigurationError: The topic name is invalid.
        TopicNotFoundError: The coordination topic does not exist.
        UnavailableError: Kafka does not answer.
    """
    require_topic_name("--coordination-topic", topic)
    with hint_how_to_create(topic):
        require_rights(connection, topic, rights)
        return open_rationalizer(connection, topic, followed=followed, interval_ms=interval_ms)


def require_rights(connection: KafkaConnection, topic: str, rights: tuple[Right, ...]) -> None:
    """Raise `AuthorizationError` if this user lacks one of the `rights` on the coordination topic.

    Without this check a command would fail later, with an error that does not name the missing right. Also raises
    `TopicNotFoundError` and `UnavailableError`.
    """
    with Topics(connection) as topics:
        topics.require(on_topic(topic, *rights))


def operator_name() -> str:
    """Return the operator's name as it is written to the log: the user and the machine."""
    try:
        name = f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user id without a name, as in a container
        name = f"{os.getuid()}@{socket.gethostname()}"
    return name if is_name(name) else "operator"


@contextmanager
def hint_how_to_create(topic: str) -> Iterator[None]:
    """Add the command that creates the coordination topic to the error that reports it missing."""
    try:
        yield
    except TopicNotFoundError as error:
        raise TopicNotFoundError(f"{error}; `marshal-dagster topic create --name {topic}` creates it") from None


def _check_options(options: ConnectionOptions) -> None:
    """Check the options without the environment, so that an error names the option."""
    if options.connection_file is not None and options.bootstrap_servers is not None:
        raise ConfigurationError(
            "--connection and --bootstrap-servers both specify a Kafka cluster: use only one of them"
        )
    given: dict[str, Any] = {"bootstrap_servers": options.bootstrap_servers, "timeout_s": options.timeout_s}
    fields = {"bootstrap_servers": "localhost:1"} | {name: value for name, value in given.items() if value is not None}
    KafkaConnection.from_settings(fields, source="command line", name_of=_option)


def _option(field: str) -> str:
    return {"timeout_s": "--timeout"}.get(field, f"--{field.replace('_', '-')}")
