"""Data topics as observable assets in Dagster.

An observation of a topic has its end offsets, the lag of the group and the growth per second. `build_topic_asset` makes
observations in runs, `build_topic_sensor` makes them without runs. Assets of `marshal_asset` depend on these assets.
"""

import hashlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from dagster import (
    AssetExecutionContext,
    AssetKey,
    AssetObservation,
    AssetRecordsFilter,
    AssetsDefinition,
    AssetSpec,
    BetaWarning,
    DagsterInstance,
    DefaultSensorStatus,
    EventLogRecord,
    MetadataValue,
    ObserveResult,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    TableMetadataValue,
    multi_observable_source_asset,
)

from marshal_dagster.assets.decorator import DagsterMarshalTranslator, kafka_partitions_def
from marshal_dagster.errors import ConfigurationError, TopicNotFoundError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.state import Key, OffsetBounds, Phase
from marshal_dagster.protocol.unread_records import is_of_topic, unread_after
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, sensor_name, unique_name
from marshal_dagster.runs.tables import Column, table
from marshal_dagster.telemetry.metrics import record_lag

MOST_SHOWN: Final = 100
"""The maximum number of partitions in a table."""


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """One partition of a data topic: its offsets from `start` to `end` (exclusive), and the group's state in it."""

    partition: int
    start: int
    end: int
    key: Key | None
    is_of_another_topic: bool = False
    """Whether the group's position cannot be one of this topic, which was deleted and re-created."""

    @property
    def offset(self) -> int | None:
        """The next offset to read; None if the group has not claimed the partition of this incarnation of the topic."""
        return None if self.key is None else self.key.offset

    @property
    def lag(self) -> int:
        """The number of unread offsets; if the group has no position, all offsets of the partition."""
        done = () if self.key is None else (range_ for range_ in self.key.ranges if range_.phase is Phase.DONE)
        return unread_after(self.offset or 0, done, OffsetBounds(self.start, self.end)).records

    @property
    def lost(self) -> int:
        """The number of offsets that retention deleted before the group read them."""
        return 0 if self.offset is None else max(0, min(self.start, self.end) - self.offset)


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """The partitions of a data topic, in their order, and the topic's id."""

    topic_id: str
    partitions: tuple[PartitionProgress, ...]

    @property
    def lag(self) -> int:
        """The number of unread offsets of all partitions together."""
        return sum(partition.lag for partition in self.partitions)

    @property
    def of_another_topic(self) -> list[int]:
        """The partitions in which every batch fails, because the position is not one of this topic."""
        return [partition.partition for partition in self.partitions if partition.is_of_another_topic]

    @property
    def ends(self) -> Mapping[int, int]:
        """The end offset of each partition: the next offset to be written."""
        return {partition.partition: partition.end for partition in self.partitions}

    def table(self) -> TableMetadataValue:
        """Return the partitions as a table.

        Only the 100 partitions with the highest lag are included, because Dagster stores each observation.
        """
        shown = sorted(self.partitions, key=lambda partition: -partition.lag)[:MOST_SHOWN]
        return table(_COLUMNS, sorted(shown, key=lambda partition: partition.partition))


_COLUMNS: Final[Sequence[Column[PartitionProgress]]] = (
    Column("partition", "int", "The partition."),
    Column("start", "int", "The first offset in the partition."),
    Column("end", "int", "The end offset that read_committed consumers see."),
    Column("offset", "int", "The next offset that the group reads; empty before its first claim."),
    Column("lag", "int", "Number of unread offsets."),
)


def topic_progress(claimer: ClaimerResource, topic: str) -> TopicProgress:
    """Return the progress of the claimer's group in `topic`, without claiming or writing anything.

    Raises `ConfigurationError`, `TopicNotFoundError` (data topic or coordination topic), `AuthorizationError` and
    `UnavailableError`.
    """
    with closing(claimer.open_data()) as data:
        described = data.describe(topic)
        bounds = data.offsets(topic, described.partitions)
        with claimer.world() as world:
            group = world.group_of(claimer.group, topic)
            is_go = group.is_go
            keys = {number: key.copy() for (name, number), key in group.keys.items() if name == topic}
        beyond = [number for number, at in bounds.items() if number in keys and (keys[number].offset or 0) > at.end]
        ends = data.offsets(topic, beyond)  # again, because the group may have read what was written meanwhile

    def progress(partition: int) -> PartitionProgress:
        """Leave out a key that belongs to an earlier topic of that name (protocol.md, section 6)."""
        key, start, end = keys.get(partition), bounds[partition].start, ends.get(partition, bounds[partition]).end
        is_known = key is None or is_of_topic(key, described.topic_id, is_go=is_go)
        is_other = not is_known or (key is not None and (key.offset or 0) > end)
        return PartitionProgress(partition, start, end, key if is_known else None, is_other)

    found = TopicProgress(described.topic_id, tuple(map(progress, described.partitions)))
    record_lag(claimer.group, topic, found.lag)
    return found


DATA_VERSION_TAG: Final = "dagster/data_version"
_ENDS: Final = "end_offsets"
_RATE: Final = "offsets_per_s"


@dataclass(frozen=True, slots=True)
class _Topic:
    """A topic to observe, and the asset that shows it."""

    name: str
    key: AssetKey
    per_partition: bool
    claimer_key: str

    def look(
        self, resources: object, instance: DagsterInstance, only: str | None = None
    ) -> tuple[list[str], list[tuple[EventLogRecord | None, AssetObservation]]]:
        """Read the topic, or only its partition `only`.

        Return the names of all partitions, and the new observations, each with the observation before it.
        """
        claimer = claimer_of(resources, self.claimer_key)
        progress = topic_progress(claimer, self.name)
        names = [str(partition.partition) for partition in progress.partitions]
        if only is not None and only not in names:
            raise ConfigurationError(
                f"topic {self.name!r} has no partition {only!r}, but {len(names)} partitions, numbered from 0: delete "
                f"the Dagster partition {only!r}"
            )
        parts: dict[str | None, TopicProgress] = {None: progress}
        if self.per_partition:
            parts = {
                name: TopicProgress(progress.topic_id, (partition,))
                for name, partition in zip(names, progress.partitions, strict=True)
                if only in {None, name}
            }
        return names, [self._observation(instance, claimer.group, part, name) for name, part in parts.items()]

    def _observation(
        self, instance: DagsterInstance, group: str, progress: TopicProgress, partition: str | None
    ) -> tuple[EventLogRecord | None, AssetObservation]:
        of = self.key if partition is None else AssetRecordsFilter(self.key, asset_partitions=[partition])
        before = next(iter(instance.fetch_observations(of, limit=1).records), None)
        return before, AssetObservation(
            self.key,
            partition=partition,
            tags={DATA_VERSION_TAG: data_version(progress.topic_id, progress.ends)},
            metadata={
                "lag": progress.lag,
                "offsets": sum(progress.ends.values()),
                **_rate(before, progress.ends),
                _ENDS: MetadataValue.json({str(number): end for number, end in progress.ends.items()}),
                "partitions": progress.table(),
                "topic_id": progress.topic_id,
                "group": group,
            },
        )


def build_topic_asset(
    topic: str,
    *,
    translator: DagsterMarshalTranslator | None = None,
    per_partition: bool = False,
    claimer_key: str = "claimer",
) -> AssetsDefinition:
    """Build the observable asset of a data topic, on which the assets of `marshal_asset` depend.

    An observation has the lag, the end offsets, and the offsets per second since the observation before. Its data
    version is computed from the end offsets, so automation conditions (`AutomationCondition.eager`) see new messages.
    The asset only reads. `build_topic_sensor` makes the same observations without runs.

    Args:
        topic: The data topic.
        translator: Defines key, group and tags of the asset. Pass the same one to the assets that read the topic.
        per_partition: Whether each partition of the topic has its own observation. A run of one Dagster partition then
            observes only that one. An observation adds new partitions of the topic as Dagster partitions.
        claimer_key: The key of the `ClaimerResource`, which determines the group.

    Returns:
        The asset, for `Definitions(assets=[...])`.

    Raises:
        ConfigurationError: `topic` is not a valid name of a topic.

    Example:
        ```python
        orders_topic = build_topic_asset("orders", per_partition=True)
        ```
    """
    spec = _spec(topic, translator)
    observed = _Topic(topic, spec.key, per_partition, claimer_key)

    def observe(context: AssetExecutionContext) -> Iterator[ObserveResult]:
        here = replace(observed, key=context.asset_key)
        only = context.partition_key if context.has_partition_key else None
        names, observations = here.look(context.resources, context.instance, only)
        if per_partition:
            context.instance.add_dynamic_partitions(str(kafka_partitions_def(topic).name), names)
        for _, observation in observations:
            context.log_event(observation)
        yield from ()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BetaWarning)  # users cannot avoid this warning
        made: AssetsDefinition = multi_observable_source_asset(
            name=f"observe_{unique_name('__'.join(spec.key.path))}",
            specs=[spec.replace_attributes(skippable=True)],
            partitions_def=kafka_partitions_def(topic) if per_partition else None,
            required_resource_keys={claimer_key},
        )(observe)
    return made


def build_topic_sensor(
    topic: str,
    *,
    translator: DagsterMarshalTranslator | None = None,
    per_partition: bool = False,
    name: str | None = None,
    allow_missing_topic: bool = False,
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    claimer_key: str = "claimer",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> SensorDefinition:
    """Build a sensor that observes the asset of `build_topic_asset` without runs.

    A tick makes no observation if end offsets and lag are unchanged and the last observation recorded no growth.

    Args:
        topic: The data topic.
        translator: The same translator as for `build_topic_asset`.
        per_partition: The same value as for `build_topic_asset`.
        name: The name of the sensor (default: `<topic>_messages`).
        allow_missing_topic: Skip a tick if the topic does not exist. By default the tick fails.
        minimum_interval_s: The minimum time between two ticks, in seconds.
        claimer_key: The key of the `ClaimerResource`, which determines the group.
        default_status: `RUNNING` starts the sensor with the code location, `STOPPED` leaves that to Dagster's UI.

    Returns:
        The sensor, for `Definitions(sensors=[...])`.

    Raises:
        ConfigurationError: `topic` is not a valid name of a topic.

    Example:
        ```python
        orders_sensor = build_topic_sensor("orders", per_partition=True, default_status=DefaultSensorStatus.RUNNING)
        ```
    """
    observed = _Topic(topic, _spec(topic, translator).key, per_partition, claimer_key)

    # Dagster also passes resources by keyword if a test calls the sensor directly.
    def tick(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        try:
            names, observed_pairs = observed.look(context.resources, context.instance)
        except TopicNotFoundError as missing:
            if not allow_missing_topic:
                raise
            return SensorResult(skip_reason=str(missing))
        observations = [observation for before, observation in observed_pairs if _is_new(before, observation)]
        partitions = kafka_partitions_def(topic)
        known = set(context.instance.get_dynamic_partitions(str(partitions.name))) if per_partition else set()
        new = [name for name in names if name not in known]
        return SensorResult(
            asset_events=observations,
            dynamic_partitions_requests=[partitions.build_add_request(new)] if per_partition and new else [],
            skip_reason=f"{len(observations)} new observations of {observed.key.to_user_string()}; all else is "
            "unchanged",
        )

    return SensorDefinition(
        name=name or sensor_name(topic, "messages"),
        evaluation_fn=tick,
        minimum_interval_seconds=minimum_interval_s,
        required_resource_keys={claimer_key},
        default_status=default_status,
        description=f"Observes the end offsets of topic {topic!r} and the lag of the group.",
    )


def data_version(topic_id: str, ends: Mapping[int, int]) -> str:
    """Return the data version of these end offsets; it differs for another incarnation of the topic."""
    text = ",".join(f"{number}={end}" for number, end in sorted(ends.items()))
    return hashlib.sha256(f"{topic_id}:{text}".encode()).hexdigest()[:16]


def _spec(topic: str, translator: DagsterMarshalTranslator | None) -> AssetSpec:
    require_topic_name("topic", topic)
    return (translator or DagsterMarshalTranslator()).get_topic_spec(topic)


def _rate(before: EventLogRecord | None, ends: Mapping[int, int]) -> dict[str, float]:
    """Return the offsets per second since the observation before; empty without one to compare with."""
    then = _numbers_of(before).get(_ENDS)
    passed_s = time.time() - before.timestamp if before is not None else 0.0
    if not isinstance(then, dict) or passed_s <= 0:
        return {}
    added = sum(max(0, end - then.get(str(number), end)) for number, end in ends.items())
    return {_RATE: round(added / passed_s, 3)}


def _is_new(before: EventLogRecord | None, now: AssetObservation) -> bool:
    known = _numbers_of(before)
    is_changed = any(known.get(name) != now.metadata[name].value for name in (_ENDS, "lag", "topic_id"))
    return is_changed or bool(known.get(_RATE, 1))


def _numbers_of(record: EventLogRecord | None) -> Mapping[str, object]:
    observation = record.asset_observation if record is not None else None
    return {name: value.value for name, value in observation.metadata.items()} if observation is not None else {}
