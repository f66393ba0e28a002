"""The settings of the coordination topic and of the one for its snapshots: under some the protocol does not hold."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
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


def check_topic_settings(topics: Topics, topic: str, servers: str) -> Iterator[Finding]:
    """Check the coordination topic's settings: under some the protocol does not hold."""
    try:
        problems = check_coordination_topic(topics, topics.describe(topic))
    except TopicNotFoundError:
        return  # told already
    except MarshalError as error:
        yield Finding("topic settings", CheckState.NOT_CHECKED, str(error))
        return
    for problem in problems:
        state = CheckState.WARNING if problem.severity is Severity.WARNING else CheckState.PROBLEM
        found = f"{problem.setting} of {topic} is {problem.found}, should be {problem.wanted}"
        mend = with_servers(problem, servers).mend
        yield Finding("topic settings", state, found, problem.why, mend)
    if not problems:
        yield Finding("topic settings", CheckState.OK, f"{topic} has the settings that the protocol needs")


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
        "whatever deletes by age or size takes the newest snapshot too, when no run has ended well for so long",
        matters_more_when_cut=True,
    ),
    _Check(
        "max.message.bytes",
        lambda found: int(found) >= BATCH_BYTES,
        "a snapshot of a large state is refused, and each process reads the whole log",
        matters_more_when_cut=True,
    ),
    _Check(
        "unclean.leader.election.enable",
        lambda found: found == "false",
        "such an election can lose the newest snapshots, or parts of them: older ones are read then, or the whole log",
    ),
)


def check_snapshot_topic(topics: Topics, topic: str, servers: str, *, log_is_cut: bool) -> Iterator[Finding]:
    """Check the settings of the topic that holds the snapshots of coordination topic `topic`.

    `log_is_cut`: the coordination log has a limited retention, so nothing can be claimed once its snapshots are gone.
    """
    name = snapshot_topic_of(topic)
    try:
        partitions = len(topics.describe(topic).partitions)
        found = len(topics.describe(name).partitions)
        settings = topics.settings(name)
    except TopicNotFoundError:
        return  # told with the snapshots
    except MarshalError as error:
        yield Finding(_SNAPSHOT_SETTINGS, CheckState.NOT_CHECKED, str(error))
        return
    wrong = [
        *judge_snapshot_settings(name, settings, servers, log_is_cut=log_is_cut),
        *judge_snapshot_partitions(name, found, partitions, servers),
    ]
    yield from wrong or [
        Finding(_SNAPSHOT_SETTINGS, CheckState.OK, f"{name} is compacted, with a partition for each of the log's")
    ]


_SNAPSHOT_SETTINGS: Final = "snapshot topic settings"


def judge_snapshot_settings(
    name: str, settings: Mapping[str, str], servers: str, *, log_is_cut: bool
) -> Iterator[Finding]:
    """Tell which settings of the topic for snapshots are not as they should be; one that is not told is right."""
    for check in _CHECKS:
        wanted = SNAPSHOT_SETTINGS[check.setting]
        if check.is_right(settings.get(check.setting, wanted)):
            continue
        yield Finding(
            _SNAPSHOT_SETTINGS,
            CheckState.PROBLEM if log_is_cut and check.matters_more_when_cut else CheckState.WARNING,
            f"{check.setting} of {name} is {settings[check.setting]}, should be {wanted}",
            check.why,
            f"kafka-configs --bootstrap-server {servers} --alter --entity-type topics --entity-name {name} "
            f"--add-config {check.setting}={wanted}",
        )


def judge_snapshot_partitions(name: str, found: int, wanted: int, servers: str) -> Iterator[Finding]:
    """Tell of partitions that are missing: the snapshots of a coordination partition lie in the one with its number."""
    if found < wanted:
        yield Finding(
            _SNAPSHOT_SETTINGS,
            CheckState.WARNING,
            f"{name} has {found} partitions, the coordination topic {wanted}",
            f"there is no place for snapshots of coordination partitions {found} and on",
            f"kafka-topics --bootstrap-server {servers} --alter --topic {name} --partitions {wanted}",
        )
