"""Check the settings of the coordination topic and of its snapshot topic."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from marshal_dagster.cli.doctor_checks.finding import Finding, alter_topic, failed, ok, problem, warning
from marshal_dagster.cli.topic import with_servers
from marshal_dagster.coordination.snapshots import snapshot_topic_of
from marshal_dagster.coordination.topic_settings import (
    BATCH_BYTES,
    SNAPSHOT_SETTINGS,
    Severity,
    check_coordination_topic,
)
from marshal_dagster.errors import MarshalError, TopicNotFoundError
from marshal_dagster.kafka.admin_client import Topics

_TOPIC: Final = "topic settings"
_SNAPSHOT_TOPIC: Final = "snapshot topic settings"


def check_topic_settings(topics: Topics, topic: str, servers: str) -> Iterator[Finding]:
    """Check the coordination topic's settings, because the protocol does not hold under some of them."""
    try:
        wrong = check_coordination_topic(topics, topics.describe(topic))
    except TopicNotFoundError:
        return  # reported already
    except MarshalError as error:
        yield failed(_TOPIC, error)
        return
    for setting in wrong:
        report = warning if setting.severity is Severity.WARNING else problem
        found = f"{setting.setting} of {topic} is {setting.found}, should be {setting.wanted}"
        yield report(_TOPIC, found, setting.why, with_servers(setting, servers).fix)
    if not wrong:
        yield ok(_TOPIC, f"{topic} has the settings that the protocol needs")


@dataclass(frozen=True, slots=True)
class _Check:
    setting: str
    is_right: Callable[[str], bool]
    why: str
    matters_more_when_cut: bool = False


_CHECKS: Final = (
    _Check(
        "cleanup.policy",
        lambda found: found == "compact",
        "deletion by age or size also deletes the newest snapshot, if no run has succeeded for that long",
        matters_more_when_cut=True,
    ),
    _Check(
        "max.message.bytes",
        lambda found: int(found) >= BATCH_BYTES,
        "brokers reject the snapshot of a large state, and each process reads the whole log",
        matters_more_when_cut=True,
    ),
    _Check(
        "unclean.leader.election.enable",
        lambda found: found == "false",
        "such an election can lose the newest snapshots or parts of them: then older ones are read, or the whole log",
    ),
)


def check_snapshot_topic(topics: Topics, topic: str, servers: str, *, log_is_cut: bool) -> Iterator[Finding]:
    """Check the settings of the topic that holds the snapshots of coordination topic `topic`.

    `log_is_cut`: the coordination log has a limited retention, so nothing can be claimed after its snapshots are lost.
    A setting that the brokers do not report counts as correct.
    """
    name = snapshot_topic_of(topic)
    try:
        partitions = len(topics.describe(topic).partitions)
        found = len(topics.describe(name).partitions)
        settings = topics.settings(name)
    except TopicNotFoundError:
        return  # reported with the snapshots
    except MarshalError as error:
        yield failed(_SNAPSHOT_TOPIC, error)
        return
    wrong = [check for check in _CHECKS if check.setting in settings and not check.is_right(settings[check.setting])]
    for check in wrong:
        report = problem if log_is_cut and check.matters_more_when_cut else warning
        wanted = SNAPSHOT_SETTINGS[check.setting]
        yield report(
            _SNAPSHOT_TOPIC,
            f"{check.setting} of {name} is {settings[check.setting]}, should be {wanted}",
            check.why,
            alter_topic(name, f"{check.setting}={wanted}", servers),
        )
    if found < partitions:
        # The snapshots of a coordination partition are in the partition with its number.
        yield warning(
            _SNAPSHOT_TOPIC,
            f"{name} has {found} partitions, the coordination topic {partitions}",
            f"snapshots of coordination partitions {found} and higher cannot be written",
            f"kafka-topics --bootstrap-server {servers} --alter --topic {name} --partitions {partitions}",
        )
    elif not wrong:
        yield ok(_SNAPSHOT_TOPIC, f"{name} is compacted, and has a partition for each coordination partition")
