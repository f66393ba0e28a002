"""Makes and checks the coordination topic: the settings that the protocol's promises rest on."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from marshal_dagster.coordination.log import DEFAULT_COORDINATION_PARTITIONS, DEFAULT_COORDINATION_TOPIC
from marshal_dagster.coordination.snapshots import snapshot_topic_of
from marshal_dagster.errors import AuthorizationError, ConfigurationError, TopicNotFoundError, UnsafeTopicError
from marshal_dagster.kafka.admin_client import TopicDescription, Topics

MOST_REPLICAS: Final = 3
LEAST_INSYNC: Final = 2
"""On how many replicas a record must be before it counts, where there are several."""
UNLIMITED: Final = "-1"
NOT_REPORTED: Final = "not told by the broker"
NO_TOPIC_ID: Final = "A" * 22
"""The id that a broker reports which gives topics none."""
LEAST_MESSAGE_BYTES: Final = 4_096
"""More than the largest valid record (protocol.md, section 1) with Kafka's own overhead."""
LEAST_RETENTION: Final[Mapping[str, int]] = {"retention.ms": 86_400_000, "retention.bytes": 1_073_741_824}
"""Where there are snapshots a log may be cut that keeps a day of records at least, and a GiB."""
BATCH_BYTES: Final = 1_048_588
"""Kafka's own default: the records of a claim of many partitions travel as one batch, to which this limit applies."""

ALWAYS: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    "compression.type": "uncompressed",
    "max.message.bytes": str(BATCH_BYTES),
    "message.timestamp.type": "LogAppendTime",
    "retention.bytes": UNLIMITED,
    "retention.ms": UNLIMITED,
    "unclean.leader.election.enable": "false",
}

SNAPSHOT_SETTINGS: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    "max.message.bytes": str(BATCH_BYTES),
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": "3600000",
    "unclean.leader.election.enable": "false",
}
"""What lies in the newest segment is not compacted: it is closed each hour, lest useless snapshots pile up."""


class Severity(StrEnum):
    """How much a problem matters."""

    UNUSABLE = "unusable"
    """No member and no command works with such a topic, and no option allows it (protocol.md, section 2)."""
    DANGER = "danger"
    """The protocol's promises do not hold."""
    WARNING = "warning"
    """They hold, but less works than could: one machine's failure stops everything, a large claim is refused."""


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """A setting of the coordination topic that is not as it should be, why that matters, and what mends it."""

    setting: str
    found: str
    wanted: str
    why: str
    mend: str
    severity: Severity = Severity.DANGER

    def __str__(self) -> str:
        return f"{self.setting} is {self.found}, it must be {self.wanted}: {self.why} (mend it with: {self.mend})"


@dataclass(frozen=True, slots=True)
class _Check:
    setting: str
    wanted: str
    why: str
    is_right: Callable[[str], bool]
    severity: Severity = Severity.DANGER
    if_not_reported: Severity = Severity.DANGER


_CHECKS: Final = (
    _Check(
        "message.timestamp.type",
        "LogAppendTime",
        "members judge staleness by the broker's clock; with a sender's clock one wrong clock takes over live claims",
        lambda found: found == "LogAppendTime",
        severity=Severity.UNUSABLE,
    ),
    _Check(
        "cleanup.policy",
        "delete",
        "records have no key; compaction refuses or removes them",
        lambda found: "compact" not in found,
        severity=Severity.UNUSABLE,
    ),
    _Check(
        "compression.type",
        "producer, uncompressed, gzip or snappy",
        "Go consumers stop for good at a record that is compressed with lz4 or zstd",
        lambda found: found not in {"lz4", "zstd"},
        if_not_reported=Severity.WARNING,
    ),
    _Check(
        "unclean.leader.election.enable",
        "false",
        "an unclean election can lose acknowledged records, and two runs own one partition",
        lambda found: found == "false",
        if_not_reported=Severity.WARNING,  # some brokers that speak Kafka's protocol have no such elections
    ),
    _Check(
        "cleanup.policy",
        "delete",
        "only a topic with this policy is cut as retention.ms and retention.bytes say",
        lambda found: found == "delete" or "compact" in found,
        if_not_reported=Severity.WARNING,
    ),
    *(
        _Check(
            setting,
            UNLIMITED,
            "a log that no longer starts at offset 0 can only be observed: offsets, plans and pauses are forgotten",
            lambda found: found == UNLIMITED,
        )
        for setting in ("retention.ms", "retention.bytes")
    ),
    _Check(
        "max.message.bytes",
        f"{LEAST_MESSAGE_BYTES} or more",
        "a record that is too large for the topic cannot be written",
        lambda found: int(found) >= LEAST_MESSAGE_BYTES,
        if_not_reported=Severity.WARNING,
    ),
    _Check(
        "max.message.bytes",
        f"{BATCH_BYTES} or more",
        "a claim of many partitions is sent as one batch, which the topic would refuse",
        lambda found: not LEAST_MESSAGE_BYTES <= int(found) < BATCH_BYTES,
        severity=Severity.WARNING,
        if_not_reported=Severity.WARNING,
    ),
)


def settings_for(replication: int) -> dict[str, str]:
    """Give the topic settings that the protocol needs, for so many replicas."""
    return {**ALWAYS, "min.insync.replicas": str(min(LEAST_INSYNC, replication))}


def create_coordination_topic(
    topics: Topics,
    name: str = DEFAULT_COORDINATION_TOPIC,
    partitions: int = DEFAULT_COORDINATION_PARTITIONS,
    replication: int | None = None,
) -> bool:
    """Create the coordination topic; an existing one with as many partitions and safe settings is left as it is.

    `replication` is 3 by default, or as many as there are brokers. Gives True if it was created now. Raises
    `ConfigurationError` if it exists with another partition count (placement depends on it) or another replication than
    asked for, `UnsafeTopicError`, `AuthorizationError`, `UnavailableError`.
    """
    replicas = min(MOST_REPLICAS, topics.broker_count()) if replication is None else replication
    if topics.create(name, partitions, replicas, settings_for(replicas)):
        return True
    found = topics.describe(name)
    if len(found.partitions) != partitions:
        raise ConfigurationError(
            f"coordination topic {name!r} exists with {len(found.partitions)} partitions, not {partitions}; that can "
            f"never change: give --partitions {len(found.partitions)}, or another name"
        )
    if replication not in (None, found.replication):
        raise ConfigurationError(
            f"coordination topic {name!r} exists with {found.replication} replicas, not {replication}: reassign its "
            f"partitions with Kafka's own tools, or give --replication {found.replication}"
        )
    require_safe(topics, found)
    return False


def create_snapshot_topic(topics: Topics, name: str = DEFAULT_COORDINATION_TOPIC) -> bool:
    """Create the compacted topic for the snapshots of the coordination topic `name`; True if it was created now.

    It has as many partitions and replicas as that. One that exists stays as it is. Raises `TopicNotFoundError`,
    `ConfigurationError` (a name too long for Kafka), `AuthorizationError`, `UnavailableError`.
    """
    beside = topics.describe(name)
    settings = {**SNAPSHOT_SETTINGS, "min.insync.replicas": str(min(LEAST_INSYNC, beside.replication))}
    return topics.create(snapshot_topic_of(name), len(beside.partitions), beside.replication, settings)


def check_coordination_topic(topics: Topics, described: TopicDescription) -> list[SettingProblem]:
    """List what is wrong with the settings of a coordination topic.

    Raises `TopicNotFoundError`, `AuthorizationError` (DESCRIBE_CONFIGS), `UnavailableError`.
    """
    name = described.name
    settings = topics.settings(name)
    wrong = [problem for check in _CHECKS if (problem := _problem(name, check, settings.get(check.setting)))]
    if any(map(_is_ample_retention, wrong)) and _has_snapshot_topic(topics, name):
        wrong = [_outlived(problem) if _is_ample_retention(problem) else problem for problem in wrong]
    return [*_id_problems(described), *wrong, *_replica_problems(topics, described, settings)]


def require_usable(topics: Topics, described: TopicDescription) -> None:
    """Refuse a coordination topic without an id, with compaction or with senders' timestamps.

    Settings that this user may not look at are not checked here: an own record with its sender's timestamp is found
    when it is read back. Raises `UnsafeTopicError`, `UnavailableError`.
    """
    problems = _id_problems(described)
    with suppress(AuthorizationError):
        settings = topics.settings(described.name)
        unusable = [check for check in _CHECKS if check.severity is Severity.UNUSABLE and check.setting in settings]
        found = [_problem(described.name, check, settings[check.setting]) for check in unusable]
        problems += [problem for problem in found if problem is not None]
    if problems:
        raise UnsafeTopicError(described.name, [str(problem) for problem in problems], can_be_accepted=False)


def require_safe(topics: Topics, described: TopicDescription, *, allow_unsafe: bool = False) -> list[SettingProblem]:
    """Return the problems that are left; raise `UnsafeTopicError` for dangers, unless these are accepted.

    What makes the topic unusable cannot be accepted.
    """
    problems = check_coordination_topic(topics, described)
    is_unusable = any(problem.severity is Severity.UNUSABLE for problem in problems)
    dangers = [str(problem) for problem in problems if problem.severity is not Severity.WARNING]
    if is_unusable or (dangers and not allow_unsafe):
        raise UnsafeTopicError(described.name, dangers, can_be_accepted=not is_unusable)
    return problems


def _problem(name: str, check: _Check, found: str | None) -> SettingProblem | None:
    if found is not None and check.is_right(found):
        return None
    return SettingProblem(
        check.setting,
        NOT_REPORTED if found is None else found,
        check.wanted,
        check.why,
        _alter(name, check.setting, ALWAYS[check.setting]),
        check.if_not_reported if found is None else check.severity,
    )


def _id_problems(described: TopicDescription) -> list[SettingProblem]:
    if described.topic_id != NO_TOPIC_ID:
        return []
    return [
        SettingProblem(
            "topic id",
            "missing",
            "there",
            "a topic that was deleted and re-created under the same name could not be recognised",
            "brokers of Kafka 2.8 or newer with an inter.broker.protocol.version as new",
            Severity.UNUSABLE,
        )
    ]


def _is_ample_retention(problem: SettingProblem) -> bool:
    least = LEAST_RETENTION.get(problem.setting)
    return least is not None and problem.found != NOT_REPORTED and int(problem.found) >= least


def _has_snapshot_topic(topics: Topics, name: str) -> bool:
    try:
        topics.describe(snapshot_topic_of(name))
    except (TopicNotFoundError, AuthorizationError):
        return False
    return True


def _outlived(problem: SettingProblem) -> SettingProblem:
    why = (
        "readers start from the snapshots that runs write when they end; where none ends well for longer than records "
        "are kept, nothing can be claimed until a person has used `marshal-dagster recover`"
    )
    return replace(problem, why=why, severity=Severity.WARNING)


def _replica_problems(topics: Topics, described: TopicDescription, settings: Mapping[str, str]) -> list[SettingProblem]:
    replicas, insync = described.replication, int(settings.get("min.insync.replicas", "1"))
    problems: list[SettingProblem] = []
    if replicas < MOST_REPLICAS:
        alone = replicas == 1
        problems.append(
            SettingProblem(
                "replication factor",
                str(replicas),
                str(MOST_REPLICAS),
                "one broker that fails stops all members" + (", and its disk holds the only copies" if alone else ""),
                f"kafka-reassign-partitions for {described.name}, with {MOST_REPLICAS} replicas for each partition",
                Severity.DANGER if alone and topics.broker_count() > 1 else Severity.WARNING,
            )
        )
    wanted = min(LEAST_INSYNC, replicas)
    if not wanted <= insync <= replicas:
        why = "there are never that many, so nothing can be written"
        if insync < wanted:
            why = "a record acknowledged by one replica alone is lost with it"
        mend = _alter(described.name, "min.insync.replicas", str(wanted))
        problems.append(SettingProblem("min.insync.replicas", str(insync), str(wanted), why, mend))
    return problems


def _alter(name: str, setting: str, value: str) -> str:
    return f"kafka-configs --alter --entity-type topics --entity-name {name} --add-config {setting}={value}"
