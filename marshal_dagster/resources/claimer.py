"""The resource that claims partitions for ops and assets. Jobs and sensors use it to act on the group.

Creating a resource opens no connection. The first use opens the connections that it needs.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, Final, Literal, Required, Self, TypedDict, TypeVar, Unpack

from dagster import ConfigurableResource, InitResourceContext
from pydantic import Field, PrivateAttr, field_validator, model_validator

from marshal_dagster.admin.group_settings import LONGEST_INTERVAL_S, SHORTEST_INTERVAL_S
from marshal_dagster.coordination.log import Append, CoordinationLog
from marshal_dagster.coordinator import DEFAULT_TOPIC
from marshal_dagster.errors import ConfigurationError, CoordinationLogChangedError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.messages import (
    DEFAULT_SETTINGS,
    GO_HEARTBEAT_INTERVAL_MS,
    NO_NAME,
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
from marshal_dagster.resources.branch_deployments import require_own_group
from marshal_dagster.resources.connection import KafkaConnectionConfig, check_topic
from marshal_dagster.resources.rationalizer import NOT_AUTHORIZED, CoordinationResource, require_rights
from marshal_dagster.runs.announcements import announcer
from marshal_dagster.runs.log_forwarding import logs_to_run
from marshal_dagster.runs.names import run_of
from marshal_dagster.runs.status import EndedRunDetector, run_is_over, run_worker_ended

if TYPE_CHECKING:
    from marshal_dagster.batches import Advise, BatchRequest, BatchSession, ClaimedBatch, RangeOptions
    from marshal_dagster.batches.session import Announce
    from marshal_dagster.coordination.heartbeats import ReasonToStop
    from marshal_dagster.coordination.rationalizer import Rationalizer
    from marshal_dagster.protocol.batch_planning import StartPolicy
    from marshal_dagster.protocol.state import DataPartitionId, Key, Owner
    from marshal_dagster.protocol.world import World
    from marshal_dagster.runs.names import RunContext
    from marshal_dagster.sinks import Sink


DEFAULT_HEARTBEAT_INTERVAL_S: Final = DEFAULT_SETTINGS.heartbeat_interval_ms / 1_000
logger = logging.getLogger(__name__)
_Resource = TypeVar("_Resource", bound=ConfigurableResource)  # type: ignore[type-arg] # as of CheckedResource
_TRIES: Final = 3
"""The maximum number of attempts to revoke claims."""
_PAUSE_S: Final = 0.5
"""The time between two attempts, in seconds."""
_LONGEST_NAMES: Final = 1_600
"""The maximum bytes of group and client id together, so that every record fits (protocol.md, section 1)."""


class BatchOptions(TypedDict, total=False):
    """Options of a claimed batch: the fields of `marshal_dagster.batches.BatchRequest`, which describes them."""

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
    allow_topic_without_id: bool
    late_plan: bool
    except_partitions: frozenset[int]
    ranges: "RangeOptions | None"


class MemberOptions(TypedDict):
    """What a run adds to the settings of its claimer: arguments of `BatchSession.open`, which describes them."""

    client: str
    run_id: str
    is_dead: "Callable[[Owner], bool]"
    announce: "Announce"
    reasons_to_stop: "Sequence[ReasonToStop]"


@dataclass(slots=True)
class Revocation:
    """The result of revoking the claims of ended runs."""

    run_ids: Collection[str]
    """The ids of the runs."""
    held: "dict[DataPartitionId, Key]" = dataclass_field(default_factory=dict)
    """All keys that the runs held, as first read."""
    kept: "Mapping[DataPartitionId, Key] | None" = None
    """The keys that the runs still held at the last reading; None if the log could not be read."""
    problem: str = ""
    """Why some claims were not revoked; empty if all were."""
    awaited: "Mapping[DataPartitionId, Key]" = dataclass_field(default_factory=dict)
    """The keys that the runs hold in a group shared with Go consumers. They are not revoked; they become stale."""

    @property
    def taken(self) -> "Mapping[DataPartitionId, Key]":
        """The keys that were revoked."""
        return {place: key for place, key in self.held.items() if place not in (self.kept or {})}


class ClaimerResource(CoordinationResource):
    """Claims partitions for a run and returns claimed batches, for ops and assets.

    Four fields must be equal in all members of a group: `heartbeat_interval_s`, `delivery`, `rule_set` and
    `claim_ranges`. The group's first claim writes them into the coordination log. A member with other values claims
    nothing and raises `SettingsMismatchError`, which names the difference.

    An invalid field raises `ConfigurationError` when the resource is created.

    Example:
        ```python
        claimer = ClaimerResource(
            connection=KafkaConnectionConfig(bootstrap_servers="localhost:9092"),
            group="shops",
            delivery="effectively_once",
        )
        ```
    """

    connection: KafkaConnectionConfig = Field(description="The Kafka cluster with the data topics.")
    coordination_connection: KafkaConnectionConfig | None = Field(
        default=None,
        description="The Kafka cluster with the coordination topic (default: the cluster of the data topics).",
    )
    group: str = Field(description="The group. Its members share the partitions and have one position in each.")
    client_id: str | None = Field(
        default=None,
        description="The name shown as the owner of a claim (default: the id of the run, or of its root run).",
    )
    heartbeat_interval_s: float = Field(
        default=DEFAULT_HEARTBEAT_INTERVAL_S,
        ge=SHORTEST_INTERVAL_S,
        le=LONGEST_INTERVAL_S,
        description="Seconds between heartbeats. After twice this time without one a claim is stale, and others may "
        "take it. The same in all members of the group.",
    )
    delivery: Literal["at_most_once", "at_least_once", "effectively_once"] = Field(
        default="at_least_once",
        description="The delivery guarantee for each message; effectively_once needs a sink. The same in all members "
        "of the group.",
    )
    rule_set: Literal["native", "go"] = Field(
        default="native",
        description="'go' for a group shared with consumers of the Go library; it requires a heartbeat interval of "
        "60 s and at_least_once. The same in all members of the group.",
    )
    claim_ranges: bool = Field(
        default=False,
        description="Claim ranges of offsets instead of whole partitions: several runs process one partition at once, "
        "without the order of its messages. The same in all members of the group.",
    )
    allow_unsafe_topic: bool = Field(
        default=False,
        description="Claim even if the coordination topic has settings that break the guarantees of the protocol.",
    )
    allow_branch_deployments: bool = Field(
        default=False,
        description="Claim and act on the group in branch deployments of Dagster+ too. By default that is refused "
        "unless the group's name contains the name of the deployment.",
    )
    member: str | None = Field(
        default=None,
        description="The name of this deployment in a group with a coordinator. Its runs claim only partitions "
        "assigned to it, or any free ones if the coordinator is silent (default: no coordinator).",
    )
    member_session_s: float = Field(
        default=30.0, ge=1, le=3600, description="Session timeout of the member at the coordinator, in seconds."
    )
    coordinator_topic: str = Field(
        default=DEFAULT_TOPIC,
        description="The name of the coordinator's first topic, in the cluster of the coordination topic.",
    )

    _open: dict[str, Any] = PrivateAttr(default_factory=dict)

    _coordinator_topic_is_allowed = field_validator("coordinator_topic")(check_topic)

    @field_validator("delivery", "rule_set", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:  # noqa: ANN401 - pydantic validates it next
        """Convert a member of an enum to its text, because Dagster config has only texts."""
        return value.value if isinstance(value, DeliveryMode | RuleSet) else value

    @field_validator("group", "client_id", "member")
    @classmethod
    def _name_is_allowed(cls, value: str | None) -> str | None:
        if value is not None and not is_name(value):
            raise ValueError(f"{value!r} {NO_NAME}")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if len(f"{self.group}{self.client_id or ''}".encode()) > _LONGEST_NAMES:
            raise ConfigurationError(
                f"group and client_id together have more than {_LONGEST_NAMES} bytes of UTF-8: shorten one of them"
            )
        if RuleSet(self.rule_set) is not RuleSet.GO:
            return self
        if self.heartbeat_interval_s * 1_000 != GO_HEARTBEAT_INTERVAL_MS:
            raise ConfigurationError(
                f"group {self.group!r}: heartbeat_interval_s is {self.heartbeat_interval_s:g}; with rule_set 'go' it "
                "must be 60"
            )
        if DeliveryMode(self.delivery) is not DeliveryMode.AT_LEAST_ONCE:
            raise ConfigurationError(
                f"group {self.group!r}: delivery is {self.delivery}; with rule_set 'go' it must be at_least_once"
            )
        if self.claim_ranges:
            raise ConfigurationError(
                f"group {self.group!r}: claim_ranges does not work with rule_set 'go', because Go consumers do not see "
                "claims of ranges: remove claim_ranges"
            )
        return self

    @property
    def member_session_ms(self) -> int:
        """The session timeout of the member, in milliseconds."""
        return round(self.member_session_s * 1_000)

    @property
    def settings(self) -> GroupSettings:
        """The settings of this member, which must equal those of its group (protocol.md, section 3)."""
        return GroupSettings(
            heartbeat_interval_ms=round(self.heartbeat_interval_s * 1_000),
            rule_set=RuleSet(self.rule_set),
            delivery=DeliveryMode(self.delivery),
            features=(RANGES,) if self.claim_ranges else (),
        )

    def claimed_batch(
        self, context: "RunContext", *, sink: "Sink | None" = None, **options: Unpack[BatchOptions]
    ) -> "ClaimedBatch":
        """Return a batch for a `with` block in an op or asset. It claims partitions when the block is entered.

        Args:
            context: The context of the op or asset.
            sink: The output in `effectively_once`. Leave it out in the other modes.
            **options: The fields of `BatchRequest`, such as `topic` and `max_records`.

        Returns:
            The batch. Check `batch.idle` first: it is set if there is nothing to do.

        Raises:
            ConfigurationError: An option is invalid, or the sink does not fit the delivery mode.
            TopicNotFoundError: The coordination topic does not exist.
            UnsafeTopicError: The coordination topic has dangerous settings.
            UnavailableError: Kafka cannot be reached.

        Example:
            ```python
            with claimer.claimed_batch(context, topic="orders", max_records=1_000_000) as batch:
                if not batch.idle:
                    send_somewhere(batch.read(spark))
            ```
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
        """Yield batch after batch, each for a `with` block, until one is idle or a limit is reached.

        Args:
            context: The context of the op or asset.
            sink: The output in `effectively_once`. Leave it out in the other modes.
            max_batches: The maximum number of batches (default: no limit).
            time_budget_s: The time after which no further batch is yielded, in seconds (default: no limit).
            **options: The fields of `BatchRequest`, such as `topic` and `max_records`.

        Returns:
            An iterator of batches.

        Raises:
            MarshalError: As in `claimed_batch`.

        Example:
            ```python
            for claimed in claimer.batches(context, topic="orders", max_batches=10):
                with claimed as batch:
                    if not batch.idle:
                        send_somewhere(batch.read(spark))
            ```
        """
        request = _request(options)
        return self.open_delivery(context).batches(request, sink, max_batches=max_batches, time_budget_s=time_budget_s)

    def open_delivery(self, context: "RunContext") -> "BatchSession":
        """Return the session of this op or asset: the connections and the world state that its batches share.

        The first call opens the session. The resource closes it at the end of the step.

        Args:
            context: The context of the op or asset.

        Returns:
            The session.

        Raises:
            ConfigurationError: A field is invalid, or this is a branch deployment of Dagster+.
            TopicNotFoundError: The coordination topic does not exist.
            UnsafeTopicError: The coordination topic has dangerous settings.
            UnavailableError: Kafka cannot be reached.
        """
        from marshal_dagster.telemetry.observer import telemetry_observer

        self.require_own_group()
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
        """Revoke the claims of ended runs (protocol.md, section 6, "Revoke").

        If processes of the runs are still alive, they are fenced. Records that are not acknowledged are retried, up to
        three attempts within the timeout of the connection. In a group that Go consumers share, nothing is revoked.

        Args:
            run_ids: The ids of the runs.

        Returns:
            The claims that were revoked, and those that were not.

        Raises:
            ConfigurationError: A field is invalid.
            TopicNotFoundError: The coordination topic does not exist.
            AuthorizationError: This user may not read or write the coordination topic.
            UnavailableError: The claims of the runs cannot be read.
        """
        from marshal_dagster.coordination.kafka_log import KafkaLog

        connection = self.coordination()
        deadline_s = time.monotonic() + connection.timeout_s
        # The producer of a long heartbeat interval would wait longer than a sensor's tick may take.
        interval_ms = min(self.settings.heartbeat_interval_ms, round(2_000 * connection.timeout_s))
        revocation = Revocation(frozenset(run_ids))
        with closing(KafkaLog(connection, self.coordination_topic, interval_ms)) as log:
            for attempt in range(_TRIES):
                if attempt:
                    time.sleep(_PAUSE_S)
                try:
                    self._revoke_held(log, revocation)
                except (UnavailableError, CoordinationLogChangedError) as error:
                    revocation.problem = str(error)  # the next use replaces a reader that failed
                is_done = revocation.kept is not None and not any(_epochs(revocation.kept))
                if is_done or time.monotonic() + _PAUSE_S >= deadline_s:
                    break
        if revocation.kept is None:
            raise UnavailableError(
                f"the claims of run {', '.join(sorted(run_ids))} in group {self.group!r} could not be revoked: "
                f"{revocation.problem}. They become stale {2 * self.heartbeat_interval_s:g} s after the last heartbeat"
            )
        return revocation

    def open_log(self, interval_ms: int) -> "Rationalizer":
        """Open a reader of the whole coordination log, through which members can also write.

        Args:
            interval_ms: The heartbeat interval of these members, in ms.

        Returns:
            The reader. The caller closes it.

        Raises:
            ConfigurationError: A field is invalid.
            TopicNotFoundError: The coordination topic does not exist.
            UnavailableError: Kafka cannot be reached.
        """
        from marshal_dagster.coordination.checked_log import open_rationalizer

        return open_rationalizer(self.coordination(), self.coordination_topic, interval_ms=interval_ms)

    def require_own_group(self) -> None:
        """Check that this deployment may act on the group.

        Raises:
            ConfigurationError: This is a branch deployment of Dagster+, its name is not part of the group's name, and
                `allow_branch_deployments` is not set.
        """
        require_own_group(self.group, allowed=self.allow_branch_deployments)

    def require_rights(self) -> None:
        """Check that this deployment and this user may read and write the coordination topic.

        Raises:
            AuthorizationError: A right is missing; the message names it.
            ConfigurationError: A field is invalid, or this is a branch deployment of Dagster+.
            TopicNotFoundError: The coordination topic does not exist.
            UnavailableError: Kafka cannot be reached.
        """
        self.require_own_group()
        require_rights(self.coordination(), self.coordination_topic, to_write=True)

    def group_keys(self) -> "dict[DataPartitionId, Key]":
        """Read to the current end of the log and return copies of the group's keys.

        Returns:
            The key of each (data topic, partition) of the group.

        Raises:
            ConfigurationError: A field is invalid.
            TopicNotFoundError: The coordination topic does not exist.
            UnavailableError: Kafka cannot be reached.
        """
        with self.world() as world:
            return copied_keys(world, self.group)

    def _revoke_held(self, log: CoordinationLog, revocation: Revocation) -> None:
        """Append revocations for the current claims of the runs, and read back the results."""
        kept, revocation.awaited, partitions = self._held_by(revocation.run_ids)
        revocation.held, revocation.kept = {**kept, **revocation.held}, kept
        if not kept:
            return
        records = self._revocations(revocation.run_ids, kept, partitions)
        if not records:
            revocation.problem = (
                "the log no longer starts at offset 0, so the epochs are unknown (see `marshal-dagster recover`)"
            )
            return
        refused = [ack.error or "no acknowledgement came" for ack in log.append(records) if ack.offset is None]
        if any(NOT_AUTHORIZED in error for error in refused):
            self.require_rights()
        revocation.problem = (
            "; ".join(dict.fromkeys(refused)) or "the revocation was not read back from the log as accepted"
        )
        revocation.kept, revocation.awaited, _ = self._held_by(revocation.run_ids)

    def _held_by(
        self, run_ids: Collection[str]
    ) -> "tuple[dict[DataPartitionId, Key], dict[DataPartitionId, Key], int]":
        """Return copies of the keys in which the runs hold claims, and the number of coordination partitions.

        The first mapping has the keys that can be revoked, the second those of a group that Go consumers share. The
        copies contain only the claims of these runs.
        """
        revocable: dict[DataPartitionId, Key] = {}
        awaited: dict[DataPartitionId, Key] = {}
        with self.world() as world:
            for name, place, group, key in world.keys():  # noqa: SIM118 - no dict
                if name == self.group and (held := _held_of(key, run_ids)) is not None:
                    keys = awaited if group.is_go and not key.provisional else revocable
                    keys[place] = held
            return revocable, awaited, world.coordination_partitions

    def _revocations(
        self, run_ids: Collection[str], held: "Mapping[DataPartitionId, Key]", partitions: int
    ) -> list[Append]:
        from marshal_dagster.coordination.claims import REVOKING, new_instance_id

        name = f"{REVOKING}-{min(run_ids)}"
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
        """Close all connections. Claims that are still held are not released."""
        stack: ExitStack | None = self._open.get("stack")
        self._open.clear()
        if stack is not None:
            stack.close()

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002 - Dagster's signature
        """Close the resource at the end of the step.

        Args:
            context: Dagster's context.
        """
        self.close()

    def _make_delivery(self, context: "RunContext", at_end: Callable[[Callable[[], object]], object]) -> "BatchSession":
        worker_ended = run_worker_ended(context.instance, context.run_id)
        is_over = run_is_over(context.instance, context.run_id)
        delivery = self._open_session(
            client=self.client_id or context.run.root_run_id or context.run_id,
            run_id=context.run_id,
            is_dead=EndedRunDetector(context.instance),
            announce=announcer(context),
            reasons_to_stop=[reason for reason in (worker_ended, is_over) if reason is not None],
        )
        at_end(delivery.close)
        delivery.advise = self._advise()
        return delivery

    def _open_session(self, **member: Unpack[MemberOptions]) -> "BatchSession":
        """Open a session over this resource's connections; that of `marshal_dagster.testing` is in memory."""
        from marshal_dagster.batches import BatchSession

        return BatchSession.open(
            self.data(),
            self.group,
            settings=self.settings,
            coordination_topic=self.coordination_topic,
            coordination_connection=self.coordination(),
            allow_unsafe_topic=self.allow_unsafe_topic,
            **member,
        )

    def _advise(self) -> "Advise | None":
        """Return the function that limits batches to the partitions assigned to this member; None without one."""
        if self.member is None:
            return None
        from marshal_dagster.coordinator.assignment_reader import AssignmentReader
        from marshal_dagster.coordinator.transport import CoordinatorTopics

        topics = CoordinatorTopics(self.coordinator_topic)
        reader = AssignmentReader(self.coordination(), topics, self.group, self.member, self.member_session_ms)
        return reader.assigned_partitions


def copied_keys(world: "World", group: str) -> "dict[DataPartitionId, Key]":
    """Return copies of a group's keys, for use without the lock on the world state."""
    return {place: replace(key) for name, place, _, key in world.keys() if name == group}  # noqa: SIM118 - no dict


def claimer_of(resources: object, key: str) -> ClaimerResource:
    """Return the claimer with the key `key`. Raises `ConfigurationError` if the resource has another type."""
    return resource_of(ClaimerResource, resources, key)


def require_group(group: str) -> None:
    """Raise `ConfigurationError` unless `group` is a valid name of a group (protocol.md, section 1.3)."""
    if not is_name(group):
        raise ConfigurationError(f"group {group!r} {NO_NAME}")


def resource_of(kind: type[_Resource], resources: object, key: str) -> _Resource:
    """Return the resource with the key `key`. Raises `ConfigurationError` if it has another type."""
    found = getattr(resources, key)
    if not isinstance(found, kind):
        raise ConfigurationError(f"resource {key!r} is of type {type(found).__name__}; it must be {kind.__name__}")
    return found


def _request(options: BatchOptions) -> "BatchRequest":
    from marshal_dagster.batches import BatchRequest

    require_topic_name("topic", options["topic"])
    return BatchRequest(**options)


def _held_of(key: "Key", run_ids: Collection[str]) -> "Key | None":
    """Return a copy of `key` with only the claims of the runs, or None if they hold nothing of it."""
    owner = key.owner if key.owner is not None and run_of(key.owner.instance) in run_ids else None
    ranges = tuple(
        range_ for range_ in key.ranges if range_.owner is not None and run_of(range_.owner.instance) in run_ids
    )
    return None if owner is None and not ranges else replace(key, owner=owner, ranges=ranges)


def _epochs(
    held: "Mapping[DataPartitionId, Key]",
) -> "Iterator[tuple[DataPartitionId, type[RevokingClaim | RevokingRange], int]]":
    """Yield what can be revoked: the data partition, the type of the record, and the epoch."""
    for place, key in held.items():
        if key.owner is not None and key.owner.epoch is not None:
            yield place, RevokingClaim, key.owner.epoch
        for range_ in key.ranges:
            if range_.owner is not None and range_.owner.epoch is not None:
                yield place, RevokingRange, range_.owner.epoch
