"""Opens a reader of a coordination log over Kafka; commands, resources and sensors all use it."""

from collections.abc import Collection

from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GO_HEARTBEAT_INTERVAL_MS


def open_rationalizer(
    connection: KafkaConnection,
    coordination_topic: str,
    *,
    followed: Collection[str] | None = None,
    interval_ms: int = GO_HEARTBEAT_INTERVAL_MS,
    usable_id: str | None = None,
) -> Rationalizer:
    """Return a reader of the coordination log, which the caller has to close; no record is read yet.

    Args:
        connection: the cluster that has the coordination topic.
        coordination_topic: its name.
        followed: the data topics whose state is read; by default all.
        interval_ms: the heartbeat interval of the group, in ms, if records are to be appended. It does not matter to a
            caller that only reads.
        usable_id: the id of the topic whose settings another process has found usable, so that they are not checked.

    Raises:
        ConfigurationError: the client library refuses the settings.
        TopicNotFoundError: the coordination topic does not exist.
        AuthorizationError: this user may not see it.
        UnavailableError: no answer in time.
    """
    log = KafkaLog(connection, coordination_topic, interval_ms)
    if usable_id is not None:
        log.usable_id = usable_id
    try:
        snapshots = kafka_snapshots(connection, coordination_topic)
        return Rationalizer(log, topics=followed, timeout_s=connection.timeout_s, snapshots=snapshots)
    except MarshalError:
        log.close()
        raise
