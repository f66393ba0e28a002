"""Creates the coordination topic and its snapshot topic, and checks their settings (protocol.md, section 1.6).

The guarantees of the protocol depend on these settings. Members check some of them before they write, and the commands
`init` and `doctor` check all.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from marshal_dagster.coordination.log import DEFAULT_COORDINATION_PARTITIONS, DEFAULT_COORDINATION_TOPIC, NO_TOPIC_ID
from marshal_dagster.coordination.snapshots import snapshot_topic_of
from marshal_dagster.errors import AuthorizationError, ConfigurationError, TopicNotFoundError, UnsafeTopicError
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import TopicDescription, Topics
from marshal_dagster.kafka.topic_creation import TopicCreation, create_and_warn, create_with_allowed_settings

logger = logging.getLogger(__name__)

MOST_REPLICAS: Final = 3
LEAST_INSYNC: Final = 2
"""How many replicas must have a record before it is acknowledged, if the topic has several."""
UNLIMITED: Final = "-1"
NOT_REPORTED: Final = "not reported by the broker"
LEAST_MESSAGE_BYTES: Final = 4_096
"""More than the largest valid record (protocol.md, section 1) with Kafka's own overhead."""
LEAST_RETENTION: Final[Mapping[str, int]] = {"retention.ms": 86_400_000, "retention.bytes": 1_073_741_824}
"""The shortest retention (a day, a GiB) that is only a warning if there are snapshots."""
BATCH_BYTES: Final = 1_048_588
"""Kafka's default for max.message.bytes. It limits a batch, and a claim of many partitions is one batch."""

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
"""Kafka does not compact the newest segment. So a segment is closed each hour, and old snapshots are deleted."""


class Severity(StrEnum):
    """How much a problem matters."""

    UNUSABLE = "unusable"
    """No member and no command uses the topic, and no option allows it (protocol.md, section 2)."""
    DANGER = "danger"
    """The guarantees of the protocol do not hold."""
    WARNING = "warning"
    """The guarantees hold, but availability is lower, or a large claim is refused."""


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """A wrong setting of the coordination topic."""

    setting: str
    found: str
    wanted: str
    why: str
    """Why the setting matters."""
    fix: str
    """How to fix it."""
    severity: Severity = Severity.DANGER

    def __str__(self) -> str:
        return f"{self.setting} is {self.found}, it must be {self.wanted}: {self.why} (to fix it: {self.fix})"


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
        "staleness is judged by the timestamps of records; with senders' timestamps, one wrong clock takes over live "
        "claims",
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
        "Go consumers stop forever at a record that is compressed with lz4 or zstd",
        lambda found: found not in {"lz4", "zstd"},
        if_not_reported=Severity.WARNING,
    ),
    _Check(
        "unclean.leader.election.enable",
        "false",
        "an unclean election can lose acknowledged records; then two runs can own one partition",
        lambda found: found == "false",
        if_not_reported=Severity.WARNING,  # some brokers with Kafka's protocol have no such elections
    ),
    _Check(
        "cleanup.policy",
        "delete",
        "retention.ms and retention.bytes apply only to a topic with this policy",
        lambda found: found == "delete" or "compact" in found,
        if_not_reported=Severity.WARNING,
    ),
    *(
        _Check(
            setting,
            UNLIMITED,
            "retention deletes offsets, plans and pauses; without a snapshot, nothing can be claimed any more",
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
        "a claim of many partitions is sent as one batch, and the topic would refuse it",
        lambda found: not LEAST_MESSAGE_BYTES <= int(found) < BATCH_BYTES,
        severity=Severity.WARNING,
        if_not_reported=Severity.WARNING,
    ),
)


def settings_for(replication: int) -> dict[str, str]:
    """Return the topic settings that the protocol needs, for `replication` replicas."""
    return {**ALWAYS, "min.insync.replicas": str(min(LEAST_INSYNC, replication))}


def create_coordination_topic(
    topics: Topics,
    name: str = DEFAULT_COORDINATION_TOPIC,
    partitions: int = DEFAULT_COORDINATION_PARTITIONS,
    replication: int | None = None,
) -> TopicCreation:
    """Create the coordination topic, unless it exists with the same partition count and safe settings.

    Settings that the brokers refuse are left out, except `message.timestamp.type`, without which the topic cannot be
    used. Check a topic that was created (`check_coordination_topic`), because brokers may also ignore settings.

    Args:
        topics: the topics of the cluster.
        name: the name of the coordination topic.
        partitions: its partition count.
        replication: its replication factor; by default 3, or the number of brokers if that is less.

    Returns:
        Whether it was created now, and which settings the brokers refused.

    Raises:
        ConfigurationError: it exists with another partition count, or with another replication than was requested; or
            the brokers refuse it.
        UnsafeTopicError: it exists with settings under which the guarantees do not hold.
        AuthorizationError: this user may not create or describe it.
        UnavailableError: no answer in time.
    """
    replicas = min(MOST_REPLICAS, topics.broker_count()) if replication is None else replication
    creation = create_with_allowed_settings(
        topics, name, partitions, replicas, settings_for(replicas), required=("message.timestamp.type",)
    )
    if creation.created:
        return creation
    found = topics.describe(name)
    if len(found.partitions) != partitions:
        raise ConfigurationError(
            f"coordination topic {name!r} exists with {len(found.partitions)} partitions, not {partitions}, and that "
            f"must never change: use --partitions {len(found.partitions)}, or another topic name"
        )
    if replication not in (None, found.replication):
        raise ConfigurationError(
            f"coordination topic {name!r} exists with {found.replication} replicas, not {replication}: reassign its "
            f"partitions with Kafka's own tools, or use --replication {found.replication}"
        )
    require_safe(topics, found)
    return creation


def create_snapshot_topic(topics: Topics, name: str = DEFAULT_COORDINATION_TOPIC) -> bool:
    """Create the compacted topic for the snapshots of the coordination topic `name`, unless it exists.

    It gets as many partitions and replicas as the coordination topic.

    Returns:
        Whether it was created now.

    Raises:
        TopicNotFoundError: the coordination topic does not exist.
        ConfigurationError: the name of the snapshot topic is too long for Kafka.
        AuthorizationError: this user may not create it.
        UnavailableError: no answer in time.
    """
    beside = topics.describe(name)
    settings = {**SNAPSHOT_SETTINGS, "min.insync.replicas": str(min(LEAST_INSYNC, beside.replication))}
    return create_and_warn(
        topics,
        snapshot_topic_of(name),
        len(beside.partitions),
        beside.replication,
        settings,
        required=("cleanup.policy",),
    )


def check_coordination_topic(topics: Topics, described: TopicDescription) -> list[SettingProblem]:
    """Return the problems in the settings of a coordination topic.

    Raises:
        TopicNotFoundError: it does not exist.
        AuthorizationError: this user has no right DESCRIBE_CONFIGS on it.
        UnavailableError: no answer in time.
    """
    name = described.name
    settings = topics.settings(name)
    wrong = [problem for check in _CHECKS if (problem := _problem(name, check, settings.get(check.setting)))]
    if any(map(_is_ample_retention, wrong)) and _has_snapshot_topic(topics, name):
        wrong = [_outlived(problem) if _is_ample_retention(problem) else problem for problem in wrong]
    return [*_id_problems(described), *wrong, *_replica_problems(topics, described, settings)]


def with_reasons(problems: Iterable[SettingProblem], refused: Mapping[str, str]) -> list[SettingProblem]:
    """Return the problems; those of settings that the brokers `refused` state so in place of a command to fix them."""
    return [
        replace(problem, fix=f"the brokers refused it ({refused[problem.setting]}): ask who operates them")
        if problem.setting in refused
        else problem
        for problem in problems
    ]


def require_usable(topics: Topics, described: TopicDescription) -> None:
    """Raise `UnsafeTopicError` for a coordination topic without an id, with compaction or with senders' timestamps.

    Settings that this user may not see are not checked here. If the topic stores senders' timestamps, a member notices
    that when it reads back its first record. Raises `UnavailableError` without an answer in time.
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
    """Return the problems of a coordination topic that are allowed; raise `UnsafeTopicError` for the others.

    Warnings are always allowed, dangers only with `allow_unsafe`. A topic that is unusable is never allowed.
    """
    problems = check_coordination_topic(topics, described)
    is_unusable = any(problem.severity is Severity.UNUSABLE for problem in problems)
    dangers = [str(problem) for problem in problems if problem.severity is not Severity.WARNING]
    if is_unusable or (dangers and not allow_unsafe):
        raise UnsafeTopicError(described.name, dangers, can_be_accepted=not is_unusable)
    return problems


def usable_topic_id(topics: Topics, name: str, *, allow_unsafe: bool = False) -> str | None:
    """Check this user's rights and the settings of a coordination topic, for a member; return the topic's id.

    `allow_unsafe` allows dangerous settings, with a warning. Returns None if the settings could not be checked.

    Raises `TopicNotFoundError`, `AuthorizationError`, `UnsafeTopicError` and `UnavailableError`.
    """
    topics.require(on_topic(name, Right.READ, Right.WRITE))
    try:
        described = topics.describe(name)
        problems = require_safe(topics, described, allow_unsafe=allow_unsafe)
    except AuthorizationError as missing:
        logger.warning("the settings of coordination topic %r cannot be checked: %s", name, missing)
        return None
    for problem in problems:
        if problem.severity is Severity.DANGER:
            logger.warning("allow_unsafe_topic accepts a dangerous setting of coordination topic %r: %s", name, problem)
    return described.topic_id


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
            "present",
            "without an id, members do not notice that the topic was deleted and re-created",
            "use brokers of Kafka 2.8 or newer, with inter.broker.protocol.version 2.8 or newer",
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
        "readers start from the snapshots that runs write when they end; if no run ends well for longer than records "
        "are kept, nothing can be claimed until an operator has run `marshal-dagster recover`"
    )
    return replace(problem, why=why, severity=Severity.WARNING)


def _replica_problems(topics: Topics, described: TopicDescription, settings: Mapping[str, str]) -> list[SettingProblem]:
    replicas, reported = described.replication, settings.get("min.insync.replicas")
    problems: list[SettingProblem] = []
    if replicas < MOST_REPLICAS:
        alone, brokers = replicas == 1, topics.broker_count()
        missing = f"; the cluster has only {brokers} now" if brokers < MOST_REPLICAS else ""
        problems.append(
            SettingProblem(
                "replication factor",
                str(replicas),
                str(MOST_REPLICAS),
                "if one broker fails, all members stop" + (", and its disk has the only copies" if alone else ""),
                "kafka-reassign-partitions --execute --reassignment-json-file replicas.json (a file that names "
                f"{MOST_REPLICAS} brokers for each partition of {described.name}{missing}: see More replicas in "
                "docs/how-to/deployment.md)",
                Severity.DANGER if alone and brokers > 1 else Severity.WARNING,
            )
        )
    wanted = min(LEAST_INSYNC, replicas)
    fix = _alter(described.name, "min.insync.replicas", str(wanted))
    if reported is None:
        # Some brokers with Kafka's protocol always acknowledge a record by a majority, or in an object store.
        why = "if the brokers acknowledge a record that only one replica has, it is lost with that replica"
        problem = SettingProblem("min.insync.replicas", NOT_REPORTED, str(wanted), why, fix, Severity.WARNING)
        return [*problems, problem] if replicas > 1 else problems
    insync = int(reported)
    if not wanted <= insync <= replicas:
        why = "the topic has fewer replicas than that, so nothing can be written"
        if insync < wanted:
            why = "a record that only one replica has acknowledged is lost if that replica is lost"
        problems.append(SettingProblem("min.insync.replicas", str(insync), str(wanted), why, fix))
    return problems


def _alter(name: str, setting: str, value: str) -> str:
    return f"kafka-configs --alter --entity-type topics --entity-name {name} --add-config {setting}={value}"
