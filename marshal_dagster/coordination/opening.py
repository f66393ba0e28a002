"""How a member that claims opens the coordination log over Kafka: not before its topic's settings were looked at."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from marshal_dagster.coordination.admin import DEFAULT_TOPIC, Problem, Severity, check_coordination_topic
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.errors import RightMissing, UnsafeTopic
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics

logger = logging.getLogger(__name__)

MOST_REMEMBERED: Final = 64

_lock = threading.Lock()
_safe: OrderedDict[tuple[KafkaConnection, str], None] = OrderedDict()


def open_kafka(
    connection: KafkaConnection,
    topic: str = DEFAULT_TOPIC,
    *,
    heartbeat_interval_ms: int = 60_000,
    accept_unsafe: bool = False,
) -> KafkaLog:
    """Open the coordination log for members of that heartbeat interval.

    The topic's settings are looked at until they are found safe, once in a process for each incarnation of it (by its
    id). Dangerous ones raise `UnsafeTopic`, or are told in the log with `accept_unsafe`; where the user may not look at
    them it is told that they were not checked. Raises `TopicMissing`, `UnavailableError`.
    """
    dangers = [str(problem) for problem in _problems(connection, topic) if problem.severity is Severity.DANGER]
    if dangers and not accept_unsafe:
        raise UnsafeTopic(topic, dangers)
    for danger in dangers:
        logger.warning("accepted, though dangerous, in coordination topic %r: %s", topic, danger)
    return KafkaLog(connection, topic, heartbeat_interval_ms)


def _problems(connection: KafkaConnection, topic: str) -> Sequence[Problem]:
    """Look at the settings, unless this incarnation of the topic is known to be safe."""
    with Topics(connection) as topics:
        key = (connection, topics.describe(topic).topic_id)
        with _lock:
            if key in _safe:
                return ()
        try:
            problems = check_coordination_topic(topics, topic)
        except RightMissing as missing:
            logger.warning("the settings of coordination topic %r are not checked: %s", topic, missing)
            return ()
    if all(problem.severity is not Severity.DANGER for problem in problems):
        with _lock:
            _safe[key] = None
            while len(_safe) > MOST_REMEMBERED:
                _safe.popitem(last=False)
    return problems
