"""A data topic as an observable asset: what it holds, how far its group is, how fast it grows."""

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
from marshal_dagster.errors import TopicNotFoundError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.state import Key, Phase
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, sensor_name, unique_name
from marshal_dagster.runs.tables import Column, table
from marshal_dagster.telemetry.metrics import record_lag

MOST_SHOWN: Final = 100
"""How many partitions a table has at most."""


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """One partition of a data topic: what it holds, up to `end` (exclusive), and the group's position in it."""

    partition: int
    start: int
    end: int
    key: Key | None

    @property
    def offset(self) -> int | None:
        """The next offset to read; None before the group has claimed the partition of this very topic."""
        return None if self.key is None else self.key.offset

    @property
    def lag(self) -> int:
        """How many offsets are left to read; all that there is while the group has no position."""
        first = max(self.start, self.offset or 0)
        ahead = () if self.key is None else (range_ for range_ in self.key.ranges if range_.phase is Phase.DONE)
        done = sum(max(0, min(range_.end, self.end) - max(range_.start, first)) for range_ in ahead)
        return max(0, self.end - first - done)

    @property
    def lost(self) -> int:
        """How many offsets retention deleted before the group had read them."""
        return 0 if self.offset is None else max(0, min(self.start, self.end) - self.offset)


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """A data topic, by its id, and its partitions in order."""

    topic_id: str
    partitions: tuple[PartitionProgress, ...]

    @property
    def lag(self) -> int:
        """How many offsets are left to read in all."""
        return sum(partition.lag for partition in self.partitions)

    @property
    def ends(self) -> Mapping[int, int]:
        """The next offset of each partition that nothing has been written to."""
        return {partition.partition: partition.end for partition in self.partitions}

    def table(self) -> TableMetadataValue:
        """Show the partitions; of more than 100 those with the most lag, because Dagster keeps each observation."""
        shown = sorted(self.partitions, key=lambda partition: -partition.lag)[:MOST_SHOWN]
        return table(_COLUMNS, sorted(shown, key=lambda partition: partition.partition))


_COLUMNS: Final[Sequence[Column[PartitionProgress]]] = (
    Column("partition", "int", "The partition."),
    Column("start", "int", "The first offset that it holds."),
    Column("end", "int", "The next one to be written, as far as no open transaction holds it."),
    Column("offset", "int", "The next one that the group reads; empty before it has begun."),
    Column("lag", "int", "How many are left to read."),
)


def topic_progress(claimer: ClaimerResource, topic: str) -> TopicProgress:
    """Return where the group of `claimer` is in `topic`; nothing is claimed or written.

    Raises `ConfigurationError`, `TopicNotFoundError` for either topic, `AuthorizationError`, `UnavailableError`.
    """
    with closing(claimer.open_data()) as data:
        described = data.describe(topic)
        bounds = data.offsets(topic, described.partitions)
    keys = claimer.group_keys()

    def key(partition: int) -> Key | None:
        """Return its key, unless that belongs to an earlier topic of that name (protocol.md, section 6)."""
        known = keys.get((topic, partition))
        return known if known is not None and known.data_topic_id in {None, described.topic_id} else None

    found = TopicProgress(
        described.topic_id,
        tuple(
            PartitionProgress(partition, bounds[partition].start, bounds[partition].end, key(partition))
            for partition in described.partitions
        ),
    )
    record_lag(claimer.group, topic, found.lag)
    return found


DATA_VERSION_TAG: Final = "dagster/data_version"
_ENDS: Final = "end_offsets"
_RATE: Final = "offsets_per_s"


@dataclass(frozen=True, slots=True)
class _Topic:
    """What is observed, and of which asset."""

    name: str
    key: AssetKey
    per_partition: bool
    claimer_key: str

    def look(
        self, resources: object, instance: DagsterInstance, only: str | None = None
    ) -> tuple[list[str], list[tuple[EventLogRecord | None, AssetObservation]]]:
        """Look at the topic, or at the partition `only` of it.

        Return all partitions, as Dagster names them, and the observations, each with the one before.
        """
        claimer = claimer_of(resources, self.claimer_key)
        progress = topic_progress(claimer, self.name)
        names = [str(partition.partition) for partition in progress.partitions]
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
    """Make the observable asset of a data topic, on which the assets of `marshal_asset` depend.

    An observation has lag, end offsets, and the offsets per second since the one before. Its data version is made of
    the end offsets, so automation conditions (`AutomationCondition.eager`) see new messages. `build_topic_sensor` makes
    observations without runs. With `per_partition` there is one for each partition, in a run of one Dagster partition
    for that one, and new partitions become Dagster partitions. Reads alone; the claimer of resource `claimer_key` says
    of which group.

    Raises `ConfigurationError`.
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
        warnings.simplefilter("ignore", BetaWarning)  # what a user cannot change
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
    """Build the sensor that observes the asset of `build_topic_asset` without a run.

    A tick reports nothing if ends and lag are unchanged and nothing has grown since. It fails if the topic does not
    exist, unless `allow_missing_topic`. Pass the same `translator` and `per_partition` as to the asset. Default name:
    `<topic>_messages`. Raises `ConfigurationError`.
    """
    observed = _Topic(topic, _spec(topic, translator).key, per_partition, claimer_key)

    # Dagster hands over resources by keyword too when a test calls the sensor directly.
    def tick(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        try:
            names, looked = observed.look(context.resources, context.instance)
        except TopicNotFoundError as missing:
            if not allow_missing_topic:
                raise
            return SensorResult(skip_reason=str(missing))
        observations = [observation for before, observation in looked if _is_new(before, observation)]
        partitions = kafka_partitions_def(topic)
        known = set(context.instance.get_dynamic_partitions(str(partitions.name))) if per_partition else set()
        new = [name for name in names if name not in known]
        return SensorResult(
            asset_events=observations,
            dynamic_partitions_requests=[partitions.build_add_request(new)] if per_partition and new else [],
            skip_reason=f"{len(observations)} observations of {observed.key.to_user_string()}: the rest is as it was",
        )

    return SensorDefinition(
        name=name or sensor_name(topic, "messages"),
        evaluation_fn=tick,
        minimum_interval_seconds=minimum_interval_s,
        required_resource_keys={claimer_key},
        default_status=default_status,
        description=f"Observes topic {topic!r}: its end offsets, and how far the group is.",
    )


def data_version(topic_id: str, ends: Mapping[int, int]) -> str:
    """Make a data version of end offsets; another incarnation of a topic has another one."""
    text = ",".join(f"{number}={end}" for number, end in sorted(ends.items()))
    return hashlib.sha256(f"{topic_id}:{text}".encode()).hexdigest()[:16]


def _spec(topic: str, translator: DagsterMarshalTranslator | None) -> AssetSpec:
    require_topic_name("topic", topic)
    return (translator or DagsterMarshalTranslator()).get_topic_spec(topic)


def _rate(before: EventLogRecord | None, ends: Mapping[int, int]) -> dict[str, float]:
    """Give how many offsets a second were added since the observation before, if there is one to compare with."""
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
