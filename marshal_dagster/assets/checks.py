"""Checks of an asset of claimed batches: what dead members left, lag, holes or doubles in its record, its outbox."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from marshal_dagster.assets.topics import TopicProgress, topic_progress
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS, exhausted, open_plans
from marshal_dagster.protocol.state import Key
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of, resource_of
from marshal_dagster.resources.outbox import OutboxResource, backlog_metadata, backlog_text
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
MOST_LAST: Final = 5_000
"""Twice as many are read, and Dagster gives no more than 10,000 at once."""
_NOT_DONE: Final = "not committed"
_PERHAPS_DONE: Final = "possibly dropped"
_MOST_SHOWN: Final = 100


class ClaimCheck(StrEnum):
    """What is checked; the names of the checks in Dagster."""

    STALE_CLAIMS = "stale_claims"
    LAG = "lag"
    GAPS = "gaps"
    REWINDS = "rewinds"
    DOUBLE_COMMITS = "double_commits"
    EXHAUSTED_PLANS = EXHAUSTED_PLANS


_ORDER: Final = list(ClaimCheck)
"""Positions are read before records: what is committed meanwhile is beyond them, and no gap."""
_DESCRIPTIONS: Final = {
    ClaimCheck.EXHAUSTED_PLANS: "No plan has failed so often that runs do not retry it any more.",
    ClaimCheck.STALE_CLAIMS: "Nothing is held, or left planned, by members that are dead.",
    ClaimCheck.LAG: "No more offsets are left to read than is allowed.",
    ClaimCheck.GAPS: "The recorded batches follow on one another, and retention has deleted nothing unread.",
    ClaimCheck.REWINDS: "No position was set back.",
    ClaimCheck.DOUBLE_COMMITS: "No offset was committed twice in one generation of its position.",
}


@dataclass(frozen=True, slots=True)
class RecordedRange:
    """A range that a materialization records as committed.

    `is_recent` where it is among those that are judged. Not `is_certain` where at most once could not learn whether it
    was: then another may commit it.
    """

    partition: int
    generation: int
    start: int
    end: int
    batch_id: str
    is_recent: bool = True
    is_certain: bool = True


@dataclass(frozen=True, slots=True)
class OffsetFinding:
    """Offsets [start, end) of a partition that a check found."""

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
    """Build the checks (`ClaimCheck`) of what `marshal_asset` or `build_claimed_batch_op` made.

    `lag` is one of them if `max_lag` is given. The checks of an op belong to the asset that its batches materialize.

    Those in `errors` fail as errors, the others as warnings. Those in `blocking` are errors too, and stop what depends
    on the asset in the same run. `exhausted_plans` is evaluated by the asset's own runs too. `gaps`, `rewinds` and
    `double_commits` judge the `last` batches by their materializations. A gap means that a run committed and died
    before it recorded the batch, or that another asset or process worked in the group. The checks only read; the
    claimer of resource `claimer_key` determines the group.

    Raises `ConfigurationError`.
    """
    op = asset.op if isinstance(asset, AssetsDefinition) else asset
    topic = op.tags.get(TOPIC_TAG)
    if topic is None:
        raise ConfigurationError(
            f"{op.name!r} has no topic: give an asset made by marshal_asset, or an op made by build_claimed_batch_op"
        )
    if last < 1 or (max_lag is not None and max_lag < 0):
        raise ConfigurationError(f"last is {last}, max_lag is {max_lag}; they must be at least 1 and 0")
    if last > MOST_LAST:
        raise ConfigurationError(f"last is {last}; it must not be above {MOST_LAST}")
    max_attempts = int(op.tags.get(MAX_ATTEMPTS_TAG, DEFAULT_MAX_ATTEMPTS))
    stopping = {enum_member(ClaimCheck, "blocking", name) for name in blocking}
    failing = stopping | {enum_member(ClaimCheck, "errors", name) for name in errors}
    named = op.tags.get(ASSET_KEY_TAG, op.name)
    asset_key = asset.key if isinstance(asset, AssetsDefinition) else AssetKey.from_user_string(named)
    checks = [check for check in ClaimCheck if max_lag is not None or check is not ClaimCheck.LAG]
    if missing := failing.difference(checks):
        raise ConfigurationError(f"{', '.join(sorted(missing))}: give max_lag too, else it is not checked")

    def judge(context: AssetCheckExecutionContext) -> Iterator[AssetCheckResult]:
        claimer = claimer_of(context.resources, claimer_key)
        keys = sorted(context.selected_asset_check_keys, key=lambda key: _ORDER.index(key.name))
        checked = _CheckContext(claimer, topic, context.instance, keys[0].asset_key, last, max_lag or 0, max_attempts)
        for key in keys:
            check = ClaimCheck(key.name)
            passed, text, metadata = checked.judge(check)
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
    """What the checks of one execution look at; each thing is read once, when a check needs it."""

    claimer: ClaimerResource
    topic: str
    instance: DagsterInstance
    asset_key: AssetKey
    last: int
    max_lag: int
    max_attempts: int

    @cached_property
    def progress(self) -> TopicProgress:
        return topic_progress(self.claimer, self.topic)

    @cached_property
    def recorded(self) -> Sequence[RecordedRange]:
        """What the asset's last materializations record."""
        return recorded_ranges(self.instance, self.asset_key, self.claimer.group, self.topic, self.last)

    def judge(self, check: ClaimCheck) -> _Verdict:
        """Carry out one check: return whether it passed, a sentence, and what shows it."""
        match check:
            case ClaimCheck.EXHAUSTED_PLANS:
                wall_ms, group = time.time_ns() // 1_000_000, self.claimer.group
                with self.claimer.world() as world:
                    left_open = open_plans(world, wall_ms, group=group, topic=self.topic)
                plans = exhausted(left_open, self.max_attempts)
                text = exhausted_plans_text(self.instance, plans) or NOTHING_EXHAUSTED
                return not plans, text, exhausted_plans_metadata(plans)
            case ClaimCheck.STALE_CLAIMS:
                wall_ms = time.time_ns() // 1_000_000
                with self.claimer.world() as world:
                    left = abandoned_partitions(world, self.claimer.group, self.topic, wall_ms)
                return not left, listed(left) or "nothing is left by dead members", {"partitions": len(left)}
            case ClaimCheck.LAG:
                lag = self.progress.lag
                text = f"{lag:,} offsets are left to read; {self.max_lag:,} are allowed"
                return lag <= self.max_lag, text, {"lag": lag, "partitions": self.progress.table()}
            case ClaimCheck.GAPS:
                partitions = self.progress.partitions
                keys = {partition.partition: partition.key for partition in partitions if partition.key is not None}
                lost = [
                    OffsetFinding(at.partition, at.offset, at.offset + at.lost, "retention deleted them unread")
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
    """Return what the last materializations of an asset record that `group` committed of `topic`, the newest first.

    Twice as many as `last`: ranges are not always recorded in their order.
    """
    found = []
    records = instance.fetch_materializations(asset_key, limit=2 * last).records
    for number, record in enumerate(records):
        materialization = record.asset_materialization
        metadata = materialization.metadata if materialization is not None else {}
        ranges, of_group, batch_id = (metadata.get(name) for name in ("ranges", "group", "batch_id"))
        if of_group is None or of_group.value != group or not isinstance(ranges, TableMetadataValue):
            continue
        name = str(batch_id.value) if batch_id is not None else ""
        rows = (row.data for row in ranges.records if row.data.get("topic") == topic)
        recorded = (_recorded(row, name, is_recent=number < last) for row in rows)
        found += [range_ for range_ in recorded if range_ is not None]
    return found


def _recorded(row: Mapping[str, Any], batch_id: str, *, is_recent: bool) -> RecordedRange | None:
    """Read a row of a table of ranges; None for what was not committed or is of another form."""
    numbers: list[Any] = [row.get(name) for name in ("partition", "generation", "start", "end")]
    if row.get("state") == _NOT_DONE or not all(isinstance(number, int) for number in numbers):
        return None
    partition, generation, start, end = numbers
    is_certain = row.get("state") != _PERHAPS_DONE
    return RecordedRange(partition, generation, start, end, batch_id, is_recent, is_certain)


# Judgements, of what was recorded, the newest first


def gaps(recorded: Sequence[RecordedRange], keys: Mapping[int, Key] = MappingProxyType({})) -> list[OffsetFinding]:
    """Return what lies between recorded ranges of one generation, and what a new position left out.

    Not what lies beyond the position of a partition's key: it is not committed, a member that claims ranges may be at
    work on it.
    """
    found = []
    for partition, generations in _by_generation(recorded).items():
        for ranges in generations:
            reach = ranges[0].end
            for range_ in ranges[1:]:
                end = _committed(range_, keys.get(partition))
                if end > reach and range_.is_recent:
                    found.append(OffsetFinding(partition, reach, end, "committed by nobody who recorded it"))
                reach = max(reach, range_.end)
        for before, after in pairwise(generations):
            reach, start = max(range_.end for range_ in before), after[0].start
            if start > reach and after[0].is_recent:
                found.append(OffsetFinding(partition, reach, start, "left out by a new position"))
    return found


def _committed(range_: RecordedRange, key: Key | None) -> int:
    """Return up to where all is committed below a range."""
    if key is None or key.offset is None or key.generation != range_.generation:
        return range_.start
    return min(range_.start, key.offset)


def rewinds(recorded: Sequence[RecordedRange]) -> list[OffsetFinding]:
    """Return what a new position made to be read again."""
    found = []
    for partition, generations in _by_generation(recorded).items():
        for before, after in pairwise(generations):
            reach, start = max(range_.end for range_ in before), after[0].start
            if start < reach and after[0].is_recent:
                found.append(OffsetFinding(partition, start, reach, f"set back in generation {after[0].generation}"))
    return found


def double_commits(recorded: Sequence[RecordedRange]) -> list[OffsetFinding]:
    """Return what two batches of one generation both recorded as committed."""
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
    """Return the ranges of each partition, those of each generation by themselves, in the order of their offsets.

    The generations as they were recorded first, not by their numbers: in a log that was deleted and re-created, or made
    certain again without the key (`recover`), a group begins with generation 0.
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
    Column("end", "int", "The offset after the last."),
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
    """Build the check, of an asset whose events go through the outbox, that these are published.

    It fails when the oldest row has waited for longer than `max_age_s` seconds, or when more than `max_parked` are set
    aside: as an error where it is `blocking`, else as a warning. Raises `ConfigurationError`.
    """
    if max_age_s < 0 or max_parked < 0:
        raise ConfigurationError(f"max_age_s is {max_age_s}, max_parked is {max_parked}; they must be 0 or more")

    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        status = resource_of(OutboxResource, context.resources, outbox_key).status()
        problems, age_s = [], status.oldest_age_s or 0.0
        if age_s > max_age_s:
            problems.append(
                f"the oldest of {status.rows} rows has waited for {age_s:.0f} s, more than {max_age_s:g} s: is a "
                "harvester running?"
            )
        if status.parked > max_parked:
            problems.append(f"{status.parked} rows are set aside: `marshal-dagster outbox parked list` shows why")
        return AssetCheckResult(
            passed=not problems,
            severity=AssetCheckSeverity.ERROR if blocking else AssetCheckSeverity.WARN,
            description="; ".join(problems) or backlog_text(status),
            metadata=backlog_metadata(status),
        )

    return asset_check(
        asset=asset,
        name=name,
        description="The outbox's rows are published soon.",
        blocking=blocking,
        required_resource_keys={outbox_key},
    )(check)
