"""The resource that claims partitions in the name of a run.

Nothing is connected when a resource is made, be it at import, at a sensor's tick or at a run's start: the first use
opens what it needs.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, Final, Literal, Required, Self, TypedDict, TypeVar, Unpack

from dagster import ConfigurableResource, InitResourceContext
from pydantic import Field, PrivateAttr, field_validator, model_validator

from marshal_dagster.coordination.log import Append, CoordinationLog
from marshal_dagster.coordinator import DEFAULT_TOPIC
from marshal_dagster.errors import AuthorizationError, ConfigurationError, CoordinationLogChangedError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.messages import (
    DEFAULT_SETTINGS,
    GO_HEARTBEAT_INTERVAL_MS,
    DeliveryMode,
    GroupSettings,
    RevokingClaim,
    RevokingRange,
    RuleSet,
    coordination_partition,
    is_name,
    render,
)
from marshal_dagster.protocol.state import RANGES
from marshal_dagster.resources.connection import KafkaConnectionConfig, check_topic
from marshal_dagster.resources.rationalizer import NOT_AUTHORIZED, CoordinationResource, require_rights
from marshal_dagster.runs.announcements import announcer
from marshal_dagster.runs.log_forwarding import logs_to_run
from marshal_dagster.runs.names import run_of
from marshal_dagster.runs.status import EndedRunDetector, run_is_over, run_worker_ended

if TYPE_CHECKING:
    from marshal_dagster.batches import Advise, BatchRequest, BatchSession, ClaimedBatch, RangeOptions
    from marshal_dagster.coordination.rationalizer import Rationalizer
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.protocol.batch_planning import StartPolicy
    from marshal_dagster.protocol.state import DataPartitionId, Key
    from marshal_dagster.runs.names import RunContext
    from marshal_dagster.sinks import Sink


DEFAULT_HEARTBEAT_INTERVAL_S: Final = DEFAULT_SETTINGS.heartbeat_interval_ms / 1_000
logger = logging.getLogger(__name__)
_Resource = TypeVar("_Resource", bound=ConfigurableResource)  # type: ignore[type-arg] # as of CheckedResource
_TRIES: Final = 3
_PAUSE_S: Final = 0.5
"""How often a revocation is tried, and the seconds in between."""
_NO_NAME: Final = "cannot be a name: use 1 to 255 characters, no '/' and no control characters"
_LONGEST_NAMES: Final = 1_600
"""So many bytes of group and client id leave room for all else in the longest record (protocol.md, section 1)."""


class BatchOptions(TypedDict, total=False):
    """What a claimed batch should take: the fields of `marshal_dagster.batches.BatchRequest`, by name."""

    topic: Required[str]
    partitions: tuple[int, ...] | None
    max_records: int | None
    max_claims: int | None
    claim_entire_topic: bool
    start: "StartPolicy"
    max_attempts: int
    retry_exhausted: bool
    allow_data_loss: bool | None
    allow_log_reset: bool
    late_plan: bool
    except_partitions: frozenset[int]
    ranges: "RangeOptions | None"


@dataclass(slots=True)
class Revocation:
    """What happened to the claims of runs that are over."""

    run_ids: Collection[str]
    held: "dict[DataPartitionId, Key]" = dataclass_field(default_factory=dict)
    """All keys that they held, as these were when they were first read."""
    kept: "Mapping[DataPartitionId, Key] | None" = None
    """Those that they still hold, by what was read last; None if the log could not be read."""
    problem: str = ""
    """Why, if there are any."""
    awaited: "Mapping[DataPartitionId, Key]" = dataclass_field(default_factory=dict)
    """Those that they hold where Go consumers share the group: nothing is revoked, they go stale by themselves."""

    @property
    def taken(self) -> "Mapping[DataPartitionId, Key]":
        """The keys that were taken from them."""
        return {place: key for place, key in self.held.items() if place not in (self.kept or {})}


class ClaimerResource(CoordinationResource):
    """Claims partitions in the name of a run and gives claimed batches. For ops and assets.

    Making one raises `ConfigurationError` for a field that is wrong, a name that no record could carry among them.

    What all members of a group agree on (`heartbeat_interval_s`, `delivery`, `rule_set`, `claim_ranges`) is written
    into the coordination log when the group claims for the first time; a member that is configured otherwise later
    claims nothing and says which value differs.
    """

    connection: KafkaConnectionConfig = Field(description="The Kafka cluster that has the data topics.")
    coordination_connection: KafkaConnectionConfig | None = Field(
        default=None, description="The cluster that has the coordination topic; by default that of the data topics."
    )
    group: str = Field(description="The group whose members share the partitions and one position in each of them.")
    client_id: str | None = Field(
        default=None,
        description="The name that people see as the holder of a claim; by default the id of the (root) run.",
    )
    heartbeat_interval_s: float = Field(
        default=DEFAULT_HEARTBEAT_INTERVAL_S,
        ge=0.1,
        le=3600,
        description="Seconds between heartbeats. A claim without one for twice as long is stale: others may take it. "
        "Agreed on by the group.",
    )
    delivery: Literal["at_most_once", "at_least_once", "effectively_once"] = Field(
        default="at_least_once",
        description="What the group promises for each message. Agreed on by the group; effectively_once needs a sink.",
    )
    rule_set: Literal["native", "go"] = Field(
        default="native",
        description="'go' for a group shared with consumers of the Go library: 60 s heartbeats, at_least_once only. "
        "Agreed on by the group.",
    )
    claim_ranges: bool = Field(
        default=False,
        description="Claim ranges of a partition's offsets, not all of them: several runs can work on one partition "
        "at once, and the order of its messages is lost. Agreed on by the group.",
    )
    allow_unsafe_topic: bool = Field(
        default=False,
        description="Claim even when the coordination topic has settings under which the protocol does not hold.",
    )
    member: str | None = Field(
        default=None,
        description="This deployment's name as a member of a group with a coordinator: claim only what that assigns to "
        "it, and what is free when the coordinator is silent. By default first come, first served.",
    )
    member_session_s: float = Field(
        default=30.0, ge=1, le=3600, description="The member's session time-out towards the coordinator, in seconds."
    )
    coordinator_topic: str = Field(
        default=DEFAULT_TOPIC,
        description="The first of the coordinator's topics, beside the coordination topic.",
    )

    _open: dict[str, Any] = PrivateAttr(default_factory=dict)

    _coordinator_topic_is_allowed = field_validator("coordinator_topic")(check_topic)

    @field_validator("delivery", "rule_set", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:  # noqa: ANN401 - pydantic judges it next
        """Take the enum's member for its text, which is what Dagster config knows."""
        return value.value if isinstance(value, DeliveryMode | RuleSet) else value

    @field_validator("group", "client_id", "member")
    @classmethod
    def _name_is_allowed(cls, value: str | None) -> str | None:
        if value is not None and not is_name(value):
            raise ValueError(f"{value!r} {_NO_NAME}")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if len(f"{self.group}{self.client_id or ''}".encode()) > _LONGEST_NAMES:
            raise ConfigurationError(f"group and client_id have more than {_LONGEST_NAMES} bytes of UTF-8 together")
        if RuleSet(self.rule_set) is not RuleSet.GO:
            return self
        if self.heartbeat_interval_s * 1_000 != GO_HEARTBEAT_INTERVAL_MS:
            raise ConfigurationError(
                f"heartbeat_interval_s is {self.heartbeat_interval_s:g}; with rule_set 'go' it must be 60"
            )
        if DeliveryMode(self.delivery) is not DeliveryMode.AT_LEAST_ONCE:
            raise ConfigurationError(
                f"delivery is {self.delivery}; with rule_set 'go' only at_least_once can be promised"
            )
        if self.claim_ranges:
            raise ConfigurationError(
                "claim_ranges: a Go consumer would take a partition for free that is claimed by ranges"
            )
        return self

    @property
    def member_session_ms(self) -> int:
        """The member's session time-out, in milliseconds."""
        return round(self.member_session_s * 1_000)

    @property
    def settings(self) -> GroupSettings:
        """What this member expects its group to have agreed on (protocol.md, section 3)."""
        return GroupSettings(
            heartbeat_interval_ms=round(self.heartbeat_interval_s * 1_000),
            rule_set=RuleSet(self.rule_set),
            delivery=DeliveryMode(self.delivery),
            features=(RANGES,) if self.claim_ranges else (),
        )

    def claimed_batch(
        self, context: "RunContext", *, sink: "Sink | None" = None, **options: Unpack[BatchOptions]
    ) -> "ClaimedBatch":
        """Give a batch for a `with` block in an op or asset; nothing is claimed before it is entered.

        `sink` takes part in effectively once, and only there. Raises `ConfigurationError`, `TopicNotFoundError` for the
        coordination topic, `UnsafeTopicError`, `UnavailableError`.
        """
        request = _request(options)
        return self.open_delivery(context).claimed_batch(request, sink)

    def batches(
        self,
        context: "RunContext",
        *,
        sink: "Sink | None" = None,
        max_batches: int | None = None,
        time_budget_s: float | None = None,
        **options: Unpack[BatchOptions],
    ) -> "Iterator[ClaimedBatch]":
        """Give batch after batch, each for a `with` block, until one is idle or a limit is reached.

        No batch is begun after `time_budget_s` seconds. Raises what `claimed_batch` does.
        """
        request = _request(options)
        return self.open_delivery(context).batches(request, sink, max_batches=max_batches, time_budget_s=time_budget_s)

    def open_delivery(self, context: "RunContext") -> "BatchSession":
        """Give what the batches of this op or asset share: connections and the world state; opened at the first call.

        Raises `ConfigurationError`, `TopicNotFoundError`, `UnsafeTopicError`, `UnavailableError`.
        """
        from marshal_dagster.telemetry.observer import telemetry_observer

        if self._open.get("context") is not context:
            self.close()
            stack = ExitStack()
            with stack:
                stack.enter_context(logs_to_run(context))
                observer = stack.enter_context(telemetry_observer(self.group))
                delivery = self._make_delivery(context, stack.callback)
                delivery.observer = observer
                self._open.update(context=context, delivery=delivery, stack=stack.pop_all())
        opened: BatchSession = self._open["delivery"]
        return opened

    def revoke_runs(self, run_ids: Collection[str]) -> "Revocation":
        """Take from the group's members what runs held that are over, with one append.

        See protocol.md, section 6, "Revoke".

        If the runs' processes still live, they are fenced. What is not acknowledged is tried again, three times at
        most and within the connection's time-out. Where Go consumers share the group nothing is revoked. Raises
        `ConfigurationError`, `TopicNotFoundError`, `AuthorizationError`, and `UnavailableError` when it cannot even be
        read what the runs hold.
        """
        from marshal_dagster.coordination.kafka_log import KafkaLog

        connection = self.coordination()
        deadline_s = time.monotonic() + connection.timeout_s
        # A producer for a long interval would wait beyond a sensor's tick.
        interval_ms = min(self.settings.heartbeat_interval_ms, round(2_000 * connection.timeout_s))
        revocation = Revocation(frozenset(run_ids))
        with closing(KafkaLog(connection, self.coordination_topic, interval_ms)) as log:
            for attempt in range(_TRIES):
                if attempt:
                    time.sleep(_PAUSE_S)
                try:
                    self._revoke_held(log, revocation)
                except (UnavailableError, CoordinationLogChangedError) as error:
                    revocation.problem = str(error)  # a reader that failed is replaced at its next use
                is_done = revocation.kept is not None and not any(_epochs(revocation.kept))
                if is_done or time.monotonic() + _PAUSE_S >= deadline_s:
                    break
        if revocation.kept is None:
            raise UnavailableError(
                f"what run {', '.join(sorted(run_ids))} held of group {self.group!r} could not be revoked: "
                f"{revocation.problem}. Its claims go stale by themselves within {2 * self.heartbeat_interval_s:g} s "
                "of its last heartbeat"
            )
        return revocation

    def open_log(self, interval_ms: int) -> "Rationalizer":
        """Open a reader of all of the coordination log, by which members of that heartbeat interval (ms) can write.

        Who opens it closes it. Raises `ConfigurationError`, `TopicNotFoundError`, `UnavailableError`.
        """
        from marshal_dagster.coordination.checked_log import open_rationalizer

        return open_rationalizer(self.coordination(), self.coordination_topic, interval_ms=interval_ms)

    def require_rights(self) -> None:
        """Make sure that this user may read and write the coordination topic, as who claims or acts on a group must.

        Raises `AuthorizationError` naming what is missing, `ConfigurationError`, `TopicNotFoundError`,
        `UnavailableError`.
        """
        require_rights(self.coordination(), self.coordination_topic, to_write=True)

    def group_keys(self) -> "dict[DataPartitionId, Key]":
        """Read to the present end of the log and give copies of the group's keys.

        Raises `ConfigurationError`, `TopicNotFoundError`, `UnavailableError`.
        """
        with self.world() as world:
            return {place: replace(key) for name, place, _, key in world.keys() if name == self.group}  # noqa: SIM118 - no dict

    def _revoke_held(self, log: CoordinationLog, revocation: Revocation) -> None:
        """Append revocations for what the runs hold now, and read their results."""
        kept, revocation.awaited, partitions = self._held_by(revocation.run_ids)
        revocation.held, revocation.kept = {**kept, **revocation.held}, kept
        if not kept:
            return
        records = self._revocations(revocation.run_ids, kept, partitions)
        if not records:
            revocation.problem = "the log no longer begins at offset 0, so it shows no epoch to revoke"
            return
        refused = [ack.error or "no acknowledgement came" for ack in log.append(records) if ack.offset is None]
        if any(NOT_AUTHORIZED in error for error in refused):
            self.require_rights()
        revocation.problem = "; ".join(dict.fromkeys(refused)) or "the log does not show the revocation accepted"
        revocation.kept, revocation.awaited, _ = self._held_by(revocation.run_ids)

    def _held_by(
        self, run_ids: Collection[str]
    ) -> "tuple[dict[DataPartitionId, Key], dict[DataPartitionId, Key], int]":
        """Return copies of the keys that the runs hold or have ranges of, and the number of coordination partitions.

        First those that can be revoked, then those where Go consumers share the group. Nothing that others hold of a
        key is in the copy.
        """
        revocable: dict[DataPartitionId, Key] = {}
        awaited: dict[DataPartitionId, Key] = {}
        with self.world() as world:
            for name, place, group, key in world.keys():  # noqa: SIM118 - no dict
                if name == self.group and (held := _held_of(key, run_ids)) is not None:
                    (awaited if group.is_go and not key.provisional else revocable)[place] = held
            return revocable, awaited, world.coordination_partitions

    def _revocations(
        self, run_ids: Collection[str], held: "Mapping[DataPartitionId, Key]", partitions: int
    ) -> list[Append]:
        from marshal_dagster.coordination.claimer import new_instance_id

        name = f"revoking-{min(run_ids)}"
        instance, client, time_s = new_instance_id(name), self.client_id or name, int(time.time())
        return [
            Append(
                coordination_partition(topic, partitions),
                render(
                    kind(
                        topic=topic,
                        partition=partition,
                        epoch=epoch,
                        instance=instance,
                        client=client,
                        group=self.group,
                        time_s=time_s,
                    )
                ),
            )
            for (topic, partition), kind, epoch in _epochs(held)
        ]

    def coordination(self) -> KafkaConnection:
        """Return the connection to the cluster of the coordination topic. Raises `ConfigurationError`."""
        if self.coordination_connection is not None:
            return self.coordination_connection.to_connection("coordination_connection")
        return self.data()

    def data(self) -> KafkaConnection:
        """Return the connection to the cluster of the data topics. Raises `ConfigurationError`."""
        return self.connection.to_connection("connection")

    def close(self) -> None:
        """Let go of all connections; claims still held are not released."""
        stack: ExitStack | None = self._open.get("stack")
        self._open.clear()
        if stack is not None:
            stack.close()

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002 - Dagster's signature
        """Close, at the end of the step."""
        self.close()

    def _make_delivery(self, context: "RunContext", at_end: Callable[[Callable[[], object]], object]) -> "BatchSession":
        from marshal_dagster.batches import BatchSession
        from marshal_dagster.coordination.kafka_log import KafkaLog
        from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
        from marshal_dagster.kafka.admin_client import Topics

        data, coordination = self.data(), self.coordination()
        log = KafkaLog(coordination, self.coordination_topic, self.settings.heartbeat_interval_ms)
        topics = Topics(data)
        worker_ended = run_worker_ended(context.instance, context.run_id)
        is_over = run_is_over(context.instance, context.run_id)
        delivery = BatchSession(
            log=log,
            data=topics,
            connection=data,
            group=self.group,
            client=self.client_id or context.run.root_run_id or context.run_id,
            run_id=context.run_id,
            settings=self.settings,
            is_dead=EndedRunDetector(context.instance),
            announce=announcer(context),
            reasons_to_stop=[reason for reason in (worker_ended, is_over) if reason is not None],
            timeout_s=coordination.timeout_s,
            snapshots=kafka_snapshots(coordination, self.coordination_topic),
        )
        at_end(delivery.close)
        delivery.advise = self._advise()
        log.usable_id = self._check_coordination_topic(coordination, topics if coordination == data else None)
        return delivery

    def _advise(self) -> "Advise | None":
        """Return what limits batches to this member's partitions."""
        if self.member is None:
            return None
        from marshal_dagster.coordinator.assignment_reader import AssignmentReader
        from marshal_dagster.coordinator.transport import CoordinatorTopics

        topics = CoordinatorTopics(self.coordinator_topic)
        reader = AssignmentReader(self.coordination(), topics, self.group, self.member, self.member_session_ms)
        return reader.assigned_partitions

    def _check_coordination_topic(self, coordination: KafkaConnection, topics: "Topics | None") -> str | None:
        """Refuse one that this user may not write, or with dangerous settings, unless `allow_unsafe_topic`.

        Return the id of the topic, or None where its settings could not be checked.
        """
        from marshal_dagster.coordination.topic_settings import Severity, require_safe
        from marshal_dagster.kafka.acls import Right, on_topic
        from marshal_dagster.kafka.admin_client import Topics

        with nullcontext(topics) if topics else Topics(coordination) as asked:
            asked.require(on_topic(self.coordination_topic, Right.READ, Right.WRITE))
            try:
                described = asked.describe(self.coordination_topic)
                problems = require_safe(asked, described, allow_unsafe=self.allow_unsafe_topic)
            except AuthorizationError as missing:
                logger.warning("the settings of the coordination topic are not checked: %s", missing)
                return None
        for problem in problems:
            if problem.severity is Severity.DANGER:
                logger.warning(
                    "accepted, though dangerous, in coordination topic %r: %s", self.coordination_topic, problem
                )
        return described.topic_id


def claimer_of(resources: object, key: str) -> ClaimerResource:
    """Give the resource `key` of an op, asset, check or sensor. Raises `ConfigurationError` for another kind."""
    return resource_of(ClaimerResource, resources, key)


def require_group(group: str) -> None:
    """Raise `ConfigurationError` unless records can carry `group` as the name of a group."""
    if not is_name(group):
        raise ConfigurationError(f"group {group!r} {_NO_NAME}")


def resource_of(kind: type[_Resource], resources: object, key: str) -> _Resource:
    """Return the resource `key` of an op, asset, check or sensor. Raises `ConfigurationError` for another kind."""
    found = getattr(resources, key)
    if not isinstance(found, kind):
        raise ConfigurationError(f"resource {key!r} is of type {type(found).__name__}; it must be {kind.__name__}")
    return found


def _request(options: BatchOptions) -> "BatchRequest":
    from marshal_dagster.batches import BatchRequest

    require_topic_name("topic", options["topic"])
    return BatchRequest(**options)


def _held_of(key: "Key", run_ids: Collection[str]) -> "Key | None":
    """Give a copy of `key` with what the runs hold of it, or None where that is nothing."""
    owner = key.owner if key.owner is not None and run_of(key.owner.instance) in run_ids else None
    ranges = tuple(
        range_ for range_ in key.ranges if range_.owner is not None and run_of(range_.owner.instance) in run_ids
    )
    return None if owner is None and not ranges else replace(key, owner=owner, ranges=ranges)


def _epochs(
    held: "Mapping[DataPartitionId, Key]",
) -> "Iterator[tuple[DataPartitionId, type[RevokingClaim | RevokingRange], int]]":
    """Give what can be revoked: where, by which record, of which epoch."""
    for place, key in held.items():
        if key.owner is not None and key.owner.epoch is not None:
            yield place, RevokingClaim, key.owner.epoch
        for range_ in key.ranges:
            if range_.owner is not None and range_.owner.epoch is not None:
                yield place, RevokingRange, range_.owner.epoch
