"""Asset checks for assets of claimed batches.

They find exhausted plans, claims of dead members, lag, gaps and double commits in the recorded batches, and a backlog
of the outbox. The checks only read: the coordination log, Kafka's offsets and Dagster's materializations.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetKey,
    AssetsDefinition,
    DagsterInstance,
    OpDefinition,
    TableMetadataValue,
    asset_check,
    multi_asset_check,
)

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.admin.log_access import require_certain
from marshal_dagster.admin.position_spec import partitions_text
from marshal_dagster.assets.topics import TopicProgress, topic_progress
from marshal_dagster.errors import ConfigurationError, IncompleteLogError
from marshal_dagster.jobs.batch import claimed_op
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS, exhausted, open_plans
from marshal_dagster.protocol.state import Key
from marshal_dagster.protocol.world import World
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of, resource_of
from marshal_dagster.resources.outbox import OutboxResource, backlog_metadata, backlog_text, parked_advice
from marshal_dagster.runs.abandoned_work import abandoned_partitions, listed
from marshal_dagster.runs.exhausted_plans import (
    EXHAUSTED_PLANS,
    MAX_ATTEMPTS_TAG,
    NOTHING_EXHAUSTED,
    exhausted_plans_metadata,
    exhausted_plans_text,
)
from marshal_dagster.runs.names import ASSET_KEY_TAG, TOPIC_TAG
from marshal_dagster.runs.tables import Column, table

DEFAULT_LAST: Final = 100
"""The number of batches that are checked by default."""
MOST_LAST: Final = 5_000
"""The maximum of `last`. Twice as many materializations are read, and Dagster returns at most 10,000 at once."""
_NOT_DONE: Final = "not committed"
_PERHAPS_DONE: Final = "possibly dropped"
_MOST_SHOWN: Final = 100


class ClaimCheck(StrEnum):
    """The checks of `build_claim_checks`, by their names in Dagster.

    Example:
        ```python
        checks = build_claim_checks(orders_per_shop, blocking=[ClaimCheck.DOUBLE_COMMITS])
        ```
    """

    STALE_CLAIMS = "stale_claims"
    """Dead members hold no partitions and left no open plans."""
    LAG = "lag"
    """The lag is at most `max_lag` offsets."""
    GAPS = "gaps"
    """The recorded batches have no gap, and retention deleted no unread messages."""
    REWINDS = "rewinds"
    """No position was set back."""
    DOUBLE_COMMITS = "double_commits"
    """No offset was committed twice in one generation of its position."""
    EXHAUSTED_PLANS = EXHAUSTED_PLANS
    """No plan failed so often that runs no longer retry it."""


_ORDER: Final = list(ClaimCheck)
"""The order of evaluation. Positions are read before materializations, so a commit in between is not seen as a gap."""
_DESCRIPTIONS: Final = {
    ClaimCheck.EXHAUSTED_PLANS: "No plan has failed so often that runs no longer retry it.",
    ClaimCheck.STALE_CLAIMS: "Dead members hold no partitions and left no open plans.",
    ClaimCheck.LAG: "The number of unread offsets is within the limit.",
    ClaimCheck.GAPS: "The recorded batches have no gap, and retention deleted no unread messages.",
    ClaimCheck.REWINDS: "No position was set back.",
    ClaimCheck.DOUBLE_COMMITS: "No offset was committed twice in one generation of its position.",
}


@dataclass(frozen=True, slots=True)
class RecordedRange:
    """A range that a materialization records as committed."""

    partition: int
    generation: int
    start: int
    end: int
    batch_id: str
    is_recent: bool = True
    """Whether it belongs to the last batches, which are checked. Older ranges only serve for comparison."""
    is_certain: bool = True
    """False if an at-most-once batch could not read back its commit. Another batch may then commit the range."""


@dataclass(frozen=True, slots=True)
class OffsetFinding:
    """Offsets [start, end) of a partition with a problem."""

    partition: int
    start: int
    end: int
    text: str


def build_claim_checks(
    asset: AssetsDefinition | OpDefinition,
    *,
    max_lag: int | None = None,
    last: int = DEFAULT_LAST,
    errors: Collection[ClaimCheck | str] = (ClaimCheck.EXHAUSTED_PLANS, ClaimCheck.DOUBLE_COMMITS),
    blocking: Collection[ClaimCheck | str] = (),
    claimer_key: str = "claimer",
) -> AssetChecksDefinition:
    """Build the asset checks `ClaimCheck` for an asset of `marshal_asset` or an op of `build_claimed_batch_op`.

    The checks only read. The asset's own runs evaluate the check `exhausted_plans` too. The checks `gaps`, `rewinds`
    and `double_commits` examine the materializations of the last batches. A gap means that a run committed and died
    before it recorded the batch, or that another asset or process committed for the group.

    Args:
        asset: The asset or op. The checks of an op belong to the asset that its batches materialize.
        max_lag: The maximum number of unread offsets for the check `lag` (default: no check `lag`).
        last: How many batches `gaps`, `rewinds` and `double_commits` examine, from 1 to 5,000.
        errors: The checks that fail as errors; the others fail as warnings.
        blocking: The checks that fail as errors, and then stop the assets that depend on this one in the same run.
        claimer_key: The key of the `ClaimerResource`, which determines the group.

    Returns:
        The checks, for `Definitions(asset_checks=[...])`. They can be executed one by one.

    Raises:
        ConfigurationError: An argument is invalid, or `asset` was not built by one of these two factories.

    Example:
        ```python
        checks = build_claim_checks(orders, max_lag=1_000_000, blocking=["double_commits"])
        ```
    """
    op = claimed_op(asset)
    topic = op.tags[TOPIC_TAG]
    if last < 1 or (max_lag is not None and max_lag < 0):
        raise ConfigurationError(f"last is {last} and max_lag is {max_lag}: last must be 1 or more, max_lag 0 or more")
    if last > MOST_LAST:
        raise ConfigurationError(f"last is {last}; it must not be above {MOST_LAST}")
    max_attempts = int(op.tags.get(MAX_ATTEMPTS_TAG, DEFAULT_MAX_ATTEMPTS))
    stopping = {enum_member(ClaimCheck, "blocking", name) for name in blocking}
    failing = stopping | {enum_member(ClaimCheck, "errors", name) for name in errors}
    named = op.tags.get(ASSET_KEY_TAG, op.name)
    asset_key = asset.key if isinstance(asset, AssetsDefinition) else AssetKey.from_user_string(named)
    checks = [check for check in ClaimCheck if max_lag is not None or check is not ClaimCheck.LAG]
    if missing := failing.difference(checks):
        raise ConfigurationError(f"{', '.join(sorted(missing))} is not checked without max_lag: pass max_lag too")

    def judge(context: AssetCheckExecutionContext) -> Iterator[AssetCheckResult]:
        claimer = claimer_of(context.resources, claimer_key)
        keys = sorted(context.selected_asset_check_keys, key=lambda key: _ORDER.index(key.name))
        checked = _CheckContext(claimer, topic, context.instance, keys[0].asset_key, last, max_lag or 0, max_attempts)
        for key in keys:
            check = ClaimCheck(key.name)
            try:
                passed, text, metadata = checked.judge(check)
            except IncompleteLogError as error:
                passed, text, metadata = False, str(error), {}
            yield AssetCheckResult(
                passed=passed,
                asset_key=key.asset_key,
                check_name=key.name,
                severity=AssetCheckSeverity.ERROR if check in failing else AssetCheckSeverity.WARN,
                description=text,
                metadata=metadata,
            )

    made: AssetChecksDefinition = multi_asset_check(
        name=f"{op.name}_claim_checks",
        specs=[
            AssetCheckSpec(check.value, asset=asset_key, description=_DESCRIPTIONS[check], blocking=check in stopping)
            for check in checks
        ],
        can_subset=True,
        required_resource_keys={claimer_key},
    )(judge)
    return made


_Verdict = tuple[bool, str, Mapping[str, Any]]


@dataclass(frozen=True)
class _CheckContext:
    """The data that the checks of one execution examine. Each part is read once, when a check first needs it."""

    claimer: ClaimerResource
    topic: str
    instance: DagsterInstance
    asset_key: AssetKey
    last: int
    max_lag: int
    max_attempts: int

    @contextmanager
    def certain_world(self) -> Iterator[World]:
        """Yield the world state at the present end of the log. Raises `IncompleteLogError` if it lacks records."""
        with self.claimer.world() as world:
            require_certain(world, self.topic)
            yield world

    @cached_property
    def progress(self) -> TopicProgress:
        return topic_progress(self.claimer, self.topic)

    @cached_property
    def recorded(self) -> Sequence[RecordedRange]:
        """The ranges that the asset's last materializations record."""
        return recorded_ranges(self.instance, self.asset_key, self.claimer.group, self.topic, self.last)

    def judge(self, check: ClaimCheck) -> _Verdict:
        """Evaluate one check; return whether it passed, its description and its metadata."""
        match check:
            case ClaimCheck.EXHAUSTED_PLANS:
                wall_ms, group = time.time_ns() // 1_000_000, self.claimer.group
                with self.certain_world() as world:
                    left_open = open_plans(world, wall_ms, group=group, topic=self.topic)
                plans = exhausted(left_open, self.max_attempts)
                text = exhausted_plans_text(self.instance, plans) or NOTHING_EXHAUSTED
                return not plans, text, exhausted_plans_metadata(plans)
            case ClaimCheck.STALE_CLAIMS:
                wall_ms = time.time_ns() // 1_000_000
                with self.certain_world() as world:
                    left = abandoned_partitions(world, self.claimer.group, self.topic, wall_ms)
                return (
                    not left,
                    listed(left) or "dead members hold no partitions and left no open plans",
                    {"partitions": len(left)},
                )
            case ClaimCheck.LAG:
                lag, others = self.progress.lag, self.progress.of_another_topic
                text = f"{lag:,} offsets are unread; {self.max_lag:,} are allowed"
                if others:
                    text += f"; the positions of partitions {partitions_text(others)} belong to a deleted topic"
                is_within = lag <= self.max_lag and not others
                return is_within, text, {"lag": lag, "partitions": self.progress.table()}
            case ClaimCheck.GAPS:
                partitions = self.progress.partitions
                keys = {partition.partition: partition.key for partition in partitions if partition.key is not None}
                lost = [
                    OffsetFinding(
                        at.partition, at.offset, at.offset + at.lost, "retention deleted them before they were read"
                    )
                    for at in partitions
                    if at.offset is not None and at.lost
                ]
                return _summary([*gaps(self.recorded, keys), *lost], "no gap")
            case ClaimCheck.REWINDS:
                return _summary(rewinds(self.recorded), "no position was set back")
            case ClaimCheck.DOUBLE_COMMITS:
                return _summary(double_commits(self.recorded), "nothing was committed twice")


def recorded_ranges(
    instance: DagsterInstance, asset_key: AssetKey, group: str, topic: str, last: int
) -> list[RecordedRange]:
    """Return the ranges of `topic` that the asset's materializations record for `group`, the newest first.

    Reads twice as many materializations as `last`, because ranges are not always recorded in the order of their
    offsets.
    """
    found = []
    records = instance.fetch_materializations(asset_key, limit=2 * last).records
    for number, record in enumerate(records):
        materialization = record.asset_materialization
        metadata = materialization.metadata if materialization is not None else {}
        ranges, of_group, batch_id = (metadata.get(name) for name in ("ranges", "group", "batch_id"))
        if of_group is None or of_group.value != group or not isinstance(ranges, TableMetadataValue):
            continue
        if batch_id is None:  # the output of an op that a graph or `AssetsDefinition.from_op` made an asset: a sum
            continue
        rows = (row.data for row in ranges.records if row.data.get("topic") == topic)
        recorded = (_recorded(row, str(batch_id.value), is_recent=number < last) for row in rows)
        found += [range_ for range_ in recorded if range_ is not None]
    return found


def _recorded(row: Mapping[str, Any], batch_id: str, *, is_recent: bool) -> RecordedRange | None:
    """Return the range of a table row; None if it was not committed or has another form."""
    numbers: list[Any] = [row.get(name) for name in ("partition", "generation", "start", "end")]
    if row.get("state") == _NOT_DONE or not all(isinstance(number, int) for number in numbers):
        return None
    partition, generation, start, end = numbers
    is_certain = row.get("state") != _PERHAPS_DONE
    return RecordedRange(partition, generation, start, end, batch_id, is_recent, is_certain)


# Problems in recorded ranges, which are given the newest first


def gaps(recorded: Sequence[RecordedRange], keys: Mapping[int, Key] = MappingProxyType({})) -> list[OffsetFinding]:
    """Return the offsets between recorded ranges of one generation, and those that a new position skipped.

    Offsets after the position of a partition's key are no gap. They are not committed yet, and a member that claims
    ranges may be processing them.
    """
    found = []
    for partition, generations in _by_generation(recorded).items():
        for ranges in generations:
            reach = ranges[0].end
            for range_ in ranges[1:]:
                end = _committed(range_, keys.get(partition))
                if end > reach and range_.is_recent:
                    found.append(OffsetFinding(partition, reach, end, "no recorded batch has these offsets"))
                reach = max(reach, range_.end)
        for before, after in pairwise(generations):
            reach, start = max(range_.end for range_ in before), after[0].start
            if start > reach and after[0].is_recent:
                found.append(OffsetFinding(partition, reach, start, "skipped by a new position"))
    return found


def _committed(range_: RecordedRange, key: Key | None) -> int:
    """Return the offset up to which everything before the range is committed."""
    if key is None or key.offset is None or key.generation != range_.generation:
        return range_.start
    return min(range_.start, key.offset)


def rewinds(recorded: Sequence[RecordedRange]) -> list[OffsetFinding]:
    """Return the offsets that are read again because a position was set back."""
    found = []
    for partition, generations in _by_generation(recorded).items():
        for before, after in pairwise(generations):
            reach, start = max(range_.end for range_ in before), after[0].start
            if start < reach and after[0].is_recent:
                found.append(OffsetFinding(partition, start, reach, f"set back in generation {after[0].generation}"))
    return found


def double_commits(recorded: Sequence[RecordedRange]) -> list[OffsetFinding]:
    """Return the offsets that two batches of one generation both recorded as committed."""
    found = []
    for partition, generations in _by_generation([range_ for range_ in recorded if range_.is_certain]).items():
        for ranges in generations:
            furthest = ranges[0]
            for range_ in ranges[1:]:
                if range_.start < furthest.end and (range_.is_recent or furthest.is_recent):
                    text = f"by batches {furthest.batch_id} and {range_.batch_id}"
                    found.append(OffsetFinding(partition, range_.start, min(range_.end, furthest.end), text))
                furthest = max(furthest, range_, key=lambda range_: range_.end)
    return found


def _by_generation(recorded: Sequence[RecordedRange]) -> dict[int, list[list[RecordedRange]]]:
    """Return the ranges of each partition, grouped by generation and sorted by offset.

    The generations are in the order in which they were first recorded, not in the order of their numbers. Generations
    start again at 0 if the log was deleted and re-created, or recovered (`recover`) without the key.
    """
    found: defaultdict[int, defaultdict[int, list[RecordedRange]]] = defaultdict(lambda: defaultdict(list))
    for range_ in reversed(recorded):
        found[range_.partition][range_.generation].append(range_)
    return {
        partition: [sorted(ranges, key=attrgetter("start", "end")) for ranges in generations.values()]
        for partition, generations in sorted(found.items())
    }


_FINDINGS: Final[Sequence[Column[OffsetFinding]]] = (
    Column("partition", "int", "The partition."),
    Column("start", "int", "The first offset."),
    Column("end", "int", "The next offset after the last one."),
    Column("what", "string", "What the check found.", lambda found: found.text),
)


def _summary(found: Sequence[OffsetFinding], otherwise: str) -> _Verdict:
    count = sum(offsets.end - offsets.start for offsets in found)
    text = f"{count:,} offsets in {len(found):,} ranges: {found[0].text}" if found else otherwise
    return not found, text, {"offsets": count, "ranges": table(_FINDINGS, found[:_MOST_SHOWN])}


def build_outbox_check(
    asset: AssetsDefinition | AssetKey | str,
    *,
    max_age_s: float = 60.0,
    max_parked: int = 0,
    blocking: bool = False,
    name: str = "outbox_backlog",
    outbox_key: str = "outbox",
) -> AssetChecksDefinition:
    """Build an asset check that the outbox publishes its rows in time.

    The check fails if the oldest row is too old, or if too many rows are set aside because they cannot be published.

    Args:
        asset: The asset whose events go through the outbox.
        max_age_s: The maximum age of the oldest row, in seconds.
        max_parked: The maximum number of rows that are set aside.
        blocking: Fail as an error that stops the assets that depend on this one in the same run. By default the check
            fails as a warning.
        name: The name of the check.
        outbox_key: The key of the `OutboxResource`.

    Returns:
        The check, for `Definitions(asset_checks=[...])`.

    Raises:
        ConfigurationError: `max_age_s` or `max_parked` is negative.

    Example:
        ```python
        check = build_outbox_check("orders", max_age_s=300)
        ```
    """
    if not max_age_s >= 0 or max_parked < 0:
        raise ConfigurationError(f"max_age_s is {max_age_s} and max_parked is {max_parked}: both must be 0 or more")

    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        outbox = resource_of(OutboxResource, context.resources, outbox_key)
        status = outbox.status()
        problems, age_s = [], status.oldest_age_s or 0.0
        if age_s > max_age_s:
            problems.append(
                f"outbox {status.registration.name!r}: the oldest of {status.rows} rows has waited for {age_s:.0f} s, "
                f"more than {max_age_s:g} s; check that a harvester is running"
            )
        if status.parked > max_parked:
            problems.append(
                f"outbox {status.registration.name!r}: {status.parked} rows are set aside, {max_parked} are allowed; "
                f"{parked_advice(outbox)}"
            )
        return AssetCheckResult(
            passed=not problems,
            severity=AssetCheckSeverity.ERROR if blocking else AssetCheckSeverity.WARN,
            description="; ".join(problems) or backlog_text(outbox, status),
            metadata=backlog_metadata(status),
        )

    return asset_check(
        asset=asset,
        name=name,
        description="The outbox publishes its rows in time.",
        blocking=blocking,
        required_resource_keys={outbox_key},
    )(check)
