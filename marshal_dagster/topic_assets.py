"""A data topic as an observable asset: what it holds, how far its group is, how fast it grows."""

import hashlib
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dagster import (
    AssetExecutionContext,
    AssetKey,
    AssetObservation,
    AssetRecordsFilter,
    AssetsDefinition,
    BetaWarning,
    DataVersion,
    EventRecordsResult,
    MetadataValue,
    ObserveResult,
    multi_observable_source_asset,
)

from marshal_dagster.assets import MarshalTranslator, kafka_partitions
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import is_topic
from marshal_dagster.resources import ClaimerResource
from marshal_dagster.standing import PartitionStanding, Standing, standing

DATA_VERSION_TAG: Final = "dagster/data_version"
_ENDS: Final = "end_offsets"


def build_topic_asset(
    topic: str,
    *,
    translator: MarshalTranslator | None = None,
    per_partition: bool = False,
    claimer_key: str = "claimer",
) -> AssetsDefinition:
    """Make the observable asset of a data topic, on which the assets of `marshal_asset` depend.

    An observation has lag, end offsets, and the offsets per second since the one before. Its data version is made of
    the end offsets, so automation conditions (`AutomationCondition.eager`) see new messages; observe it by a schedule
    or an automation condition of its own (a translator's). With `per_partition` there is one for each partition, and
    new partitions become Dagster partitions. Reads alone; the claimer of resource `claimer_key` says of which group.

    Raises `ConfigurationError`.
    """
    if not is_topic(topic):
        raise ConfigurationError(f"topic {topic!r} is no name that Kafka allows: use letters, digits, '.', '_' and '-'")
    spec = (translator or MarshalTranslator()).topic_spec(topic)

    def observe(context: AssetExecutionContext) -> Iterator[ObserveResult]:
        claimer = getattr(context.resources, claimer_key)
        if not isinstance(claimer, ClaimerResource):
            raise ConfigurationError(f"resource {claimer_key!r} is no ClaimerResource")
        found = standing(claimer, topic)
        if not per_partition:
            yield _observation(context, spec.key, claimer.group, found)
            return
        name = kafka_partitions(topic).name
        context.instance.add_dynamic_partitions(str(name), [str(each.partition) for each in found.partitions])
        for each in found.partitions:
            context.log_event(_partition_observation(context, spec.key, claimer.group, found.topic_id, each))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BetaWarning)  # what a user cannot change
        made: AssetsDefinition = multi_observable_source_asset(
            name="observe_" + "__".join(spec.key.path).replace(".", "_").replace("-", "_"),
            specs=[spec.replace_attributes(skippable=True)],
            partitions_def=kafka_partitions(topic) if per_partition else None,
            required_resource_keys={claimer_key},
        )(observe)
    return made


def data_version(topic_id: str, ends: Mapping[int, int]) -> DataVersion:
    """Make a data version of end offsets; another incarnation of a topic has another one."""
    text = ",".join(f"{number}={end}" for number, end in sorted(ends.items()))
    return DataVersion(hashlib.sha256(f"{topic_id}:{text}".encode()).hexdigest()[:16])


def _observation(context: AssetExecutionContext, key: AssetKey, group: str, found: Standing) -> ObserveResult:
    before = context.instance.fetch_observations(key, limit=1)
    return ObserveResult(
        key,
        data_version=data_version(found.topic_id, found.ends),
        metadata={
            "lag": found.lag,
            "offsets": sum(found.ends.values()),
            **_rate(before, found.ends),
            _ENDS: MetadataValue.json({str(number): end for number, end in found.ends.items()}),
            "partitions": found.table(),
            "topic_id": found.topic_id,
            "group": group,
        },
    )


def _partition_observation(
    context: AssetExecutionContext, key: AssetKey, group: str, topic_id: str, one: PartitionStanding
) -> AssetObservation:
    number, ends = str(one.partition), {one.partition: one.end}
    before = context.instance.fetch_observations(AssetRecordsFilter(key, asset_partitions=[number]), limit=1)
    return AssetObservation(
        key,
        partition=number,
        tags={DATA_VERSION_TAG: data_version(topic_id, ends).value},
        metadata={
            "lag": one.lag,
            "offsets": one.end,
            **_rate(before, ends),
            _ENDS: MetadataValue.json({number: one.end}),
            "topic_id": topic_id,
            "group": group,
        },
    )


def _rate(before: EventRecordsResult, ends: Mapping[int, int]) -> dict[str, Any]:
    """Give how many offsets a second were added since the observation before, if there is one to compare with."""
    if not before.records:
        return {}
    record = before.records[0]
    observation = record.asset_observation
    then = observation.metadata.get(_ENDS) if observation is not None else None
    passed_s = time.time() - record.timestamp
    if then is None or not isinstance(then.value, dict) or passed_s <= 0:
        return {}
    added = sum(max(0, end - then.value.get(str(number), end)) for number, end in ends.items())
    return {"offsets_per_s": round(added / passed_s, 3)}
