"""Checks of an asset of claimed batches: what dead members left, lag, and whether its record has holes or doubles."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
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
    MetadataValue,
    TableColumn,
    TableMetadataValue,
    TableRecord,
    TableSchema,
    multi_asset_check,
)

from marshal_dagster.assets.progress import TopicProgress, topic_progress
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.state import Key
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of
from marshal_dagster.runs.abandoned_work import abandoned_partitions, listed
from marshal_dagster.runs.names import TOPIC_TAG

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


_ORDER: Final = list(ClaimCheck)
"""Positions are read before records: what is committed meanwhile is beyond them, and no gap."""
_DESCRIPTIONS: Final = {
    ClaimCheck.STALE_CLAIMS: "Nothing is held, or left planned, by members that are dead.",
    ClaimCheck.LAG: "No more offsets are left to read than is allowed.",
    ClaimCheck.GAPS: "The recorded batches follow on one another, and retention has deleted nothing unread.",
    ClaimCheck.REWINDS: "No position was set back.",
    ClaimCheck.DOUBLE_COMMITS: "No offset was committed twice in one generation of its position.",
}


@dataclass(frozen=True, slots=True)
class RecordedRange:
    """A range that a materialization says was committed.

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
    """Offsets [start, end) of a partition of which a check has something to say."""

    partition: int
    start: int
    end: int
    text: str


def build_claim_checks(
    asset: AssetsDefinition,
    *,
    max_lag: int | None = None,
    last: int = DEFAULT_LAST,
    errors: Collection[ClaimCheck | str] = (ClaimCheck.DOUBLE_COMMITS,),
    blocking: Collection[ClaimCheck | str] = (),
    claimer_key: str = "claimer",
) -> AssetChecksDefinition:
    """Build the checks (`ClaimCheck`) of an asset made by `marshal_asset`; `lag` is one if `max_lag` says how much.

    Those in `errors` fail as errors, the others as warnings. Those in `blocking` are errors too, and stop what depends
    on the asset in the same run. `gaps`, `rewinds` and `double_commits` judge the `last` batches by their
    materializations: a gap says that a run committed and died before it had recorded that, or that others than this
    asset worked in the group. Reads alone; the claimer of resource `claimer_key` says of which group.

    Raises `ConfigurationError`.
    """
    topic = asset.op.tags.get(TOPIC_TAG)
    if topic is None:
        raise ConfigurationError(f"{asset.op.name!r} has no topic: give an asset made by marshal_asset")
    if last < 1 or (max_lag is not None and max_lag < 0):
        raise ConfigurationError(f"last is {last}, max_lag is {max_lag}; they must be at least 1 and 0")
    if last > MOST_LAST:
        raise ConfigurationError(f"last is {last}; it must not be above {MOST_LAST}")
    stopping = {_check(each) for each in blocking}
    failing = stopping | {_check(error) for error in errors}
    checks = [each for each in ClaimCheck if max_lag is not None or each is not ClaimCheck.LAG]
    if missing := failing.difference(checks):
        raise ConfigurationError(f"{', '.join(sorted(missing))}: give max_lag too, else it is not checked")

    def judge(context: AssetCheckExecutionContext) -> Iterator[AssetCheckResult]:
        claimer = claimer_of(context.resources, claimer_key)
        keys = sorted(context.selected_asset_check_keys, key=lambda key: _ORDER.index(key.name))
        look = _CheckContext(claimer, topic, context.instance, keys[0].asset_key, last)
        for key in keys:
            check = ClaimCheck(key.name)
            passed, text, metadata = look.judge(check, max_lag or 0)
            severity = AssetCheckSeverity.ERROR if check in failing else AssetCheckSeverity.WARN
            yield AssetCheckResult(
                passed=passed,
                asset_key=key.asset_key,
                check_name=key.name,
                severity=severity,
                description=text,
                metadata=metadata,
            )

    made: AssetChecksDefinition = multi_asset_check(
        name=f"{asset.op.name}_claim_checks",
        specs=[
            AssetCheckSpec(each.value, asset=asset.key, description=_DESCRIPTIONS[each], blocking=each in stopping)
            for each in checks
        ],
        can_subset=True,
        required_resource_keys={claimer_key},
    )(judge)
    return made


def _check(name: ClaimCheck | str) -> ClaimCheck:
    try:
        return ClaimCheck(name)
    except ValueError:
        raise ConfigurationError(f"there is no check {name!r}: it must be one of {', '.join(ClaimCheck)}") from None


_Verdict = tuple[bool, str, Mapping[str, Any]]


class _CheckContext:
    """What the checks of one execution look at; each thing once, when it is first asked for."""

    def __init__(
        self, claimer: ClaimerResource, topic: str, instance: DagsterInstance, asset_key: AssetKey, last: int
    ) -> None:
        self._claimer, self._topic = claimer, topic
        self._instance, self._asset_key, self._last = instance, asset_key, last
        self._progress: TopicProgress | None = None
        self._recorded: Sequence[RecordedRange] | None = None

    def judge(self, check: ClaimCheck, max_lag: int) -> _Verdict:
        """Carry out one check: whether it passed, a sentence, and what shows it."""
        verdicts: dict[ClaimCheck, Callable[[], _Verdict]] = {
            ClaimCheck.STALE_CLAIMS: self._stale_claims,
            ClaimCheck.LAG: lambda: self._lag(max_lag),
            ClaimCheck.GAPS: self._gaps,
            ClaimCheck.REWINDS: lambda: _summary(rewinds(self.recorded()), "no position was set back"),
            ClaimCheck.DOUBLE_COMMITS: lambda: _summary(double_commits(self.recorded()), "nothing was committed twice"),
        }
        return verdicts[check]()

    def progress(self) -> TopicProgress:
        """Where the group stands."""
        if self._progress is None:
            self._progress = topic_progress(self._claimer, self._topic)
        return self._progress

    def recorded(self) -> Sequence[RecordedRange]:
        """What the asset's last materializations say."""
        if self._recorded is None:
            group, topic = self._claimer.group, self._topic
            self._recorded = recorded_ranges(self._instance, self._asset_key, group, topic, self._last)
        return self._recorded

    def _stale_claims(self) -> _Verdict:
        wall_ms = time.time_ns() // 1_000_000
        with self._claimer.world() as world:
            found = abandoned_partitions(world, self._claimer.group, self._topic, wall_ms)
        return not found, listed(found) or "nothing is left by dead members", {"partitions": len(found)}

    def _lag(self, max_lag: int) -> _Verdict:
        found = self.progress()
        text = f"{found.lag:,} offsets are left to read; {max_lag:,} are allowed"
        return found.lag <= max_lag, text, {"lag": found.lag, "partitions": found.table()}

    def _gaps(self) -> _Verdict:
        keys = {
            partition.partition: partition.key for partition in self.progress().partitions if partition.key is not None
        }
        return _summary([*gaps(self.recorded(), keys), *self._lost()], "no gap")

    def _lost(self) -> list[OffsetFinding]:
        return [
            OffsetFinding(
                partition.partition,
                partition.offset,
                partition.offset + partition.lost,
                "retention deleted them unread",
            )
            for partition in self.progress().partitions
            if partition.offset is not None and partition.lost
        ]


def recorded_ranges(
    instance: DagsterInstance, asset_key: AssetKey, group: str, topic: str, last: int
) -> list[RecordedRange]:
    """Give what the last materializations of an asset say that `group` committed of `topic`, the newest first.

    Twice as many as `last`: ranges are not always recorded in their order.
    """
    found = []
    records = instance.fetch_materializations(asset_key, limit=2 * last).records
    for number, record in enumerate(records):
        materialization = record.asset_materialization
        metadata = materialization.metadata if materialization is not None else {}
        table, of_group, batch_id = (metadata.get(name) for name in ("ranges", "group", "batch_id"))
        if of_group is None or of_group.value != group or not isinstance(table, TableMetadataValue):
            continue
        name = str(batch_id.value) if batch_id is not None else ""
        of_topic = (one.data for one in table.records if one.data.get("topic") == topic)
        rows = (_recorded(row, name, is_recent=number < last) for row in of_topic)
        found += [one for one in rows if one is not None]
    return found


def _recorded(row: Mapping[str, Any], batch_id: str, *, is_recent: bool) -> RecordedRange | None:
    """Read a row of a table of ranges; None for what was not committed or is of another form."""
    partition, generation, start, end = (row.get(name) for name in ("partition", "generation", "start", "end"))
    if row.get("state") == _NOT_DONE or not isinstance(partition, int) or not isinstance(generation, int):
        return None
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    is_certain = row.get("state") != _PERHAPS_DONE
    return RecordedRange(partition, generation, start, end, batch_id, is_recent, is_certain)


# Judgements, of what was recorded, the newest first


def gaps(recorded: Sequence[RecordedRange], keys: Mapping[int, Key] = MappingProxyType({})) -> list[OffsetFinding]:
    """Give what lies between recorded ranges of one generation, and what a new position left out.

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
            reach, start = max(one.end for one in before), after[0].start
            if start > reach and after[0].is_recent:
                found.append(OffsetFinding(partition, reach, start, "left out by a new position"))
    return found


def _committed(one: RecordedRange, key: Key | None) -> int:
    """Give up to where all is committed below a range."""
    if key is None or key.offset is None or key.generation != one.generation:
        return one.start
    return min(one.start, key.offset)


def rewinds(recorded: Sequence[RecordedRange]) -> list[OffsetFinding]:
    """Give what a new position made to be read again."""
    found = []
    for partition, generations in _by_generation(recorded).items():
        for before, after in pairwise(generations):
            reach, start = max(one.end for one in before), after[0].start
            if start < reach and after[0].is_recent:
                found.append(OffsetFinding(partition, start, reach, f"set back in generation {after[0].generation}"))
    return found


def double_commits(recorded: Sequence[RecordedRange]) -> list[OffsetFinding]:
    """Give what two batches of one generation both say that they committed."""
    found = []
    for partition, generations in _by_generation([one for one in recorded if one.is_certain]).items():
        for ranges in generations:
            furthest = ranges[0]
            for range_ in ranges[1:]:
                if range_.start < furthest.end and (range_.is_recent or furthest.is_recent):
                    text = f"by batches {furthest.batch_id} and {range_.batch_id}"
                    found.append(OffsetFinding(partition, range_.start, min(range_.end, furthest.end), text))
                furthest = max(furthest, range_, key=lambda each: each.end)
    return found


def _by_generation(recorded: Sequence[RecordedRange]) -> dict[int, list[list[RecordedRange]]]:
    """Give the ranges of each partition, those of each generation by themselves, in the order of their offsets.

    The generations as they were recorded first, not by their numbers: of a log that was made anew, or made certain
    again without the key (`recover`), a group begins with generation 0.
    """
    found: defaultdict[int, defaultdict[int, list[RecordedRange]]] = defaultdict(lambda: defaultdict(list))
    for one in reversed(recorded):
        found[one.partition][one.generation].append(one)
    return {
        partition: [sorted(ranges, key=lambda one: (one.start, one.end)) for ranges in generations.values()]
        for partition, generations in sorted(found.items())
    }


_ODDITIES: Final = TableSchema(
    [
        TableColumn("partition", "int", "The partition."),
        TableColumn("start", "int", "The first offset."),
        TableColumn("end", "int", "The offset after the last."),
        TableColumn("what", "string", "What is to be said of them."),
    ]
)


def _summary(found: Sequence[OffsetFinding], otherwise: str) -> _Verdict:
    rows = [
        TableRecord({"partition": one.partition, "start": one.start, "end": one.end, "what": one.text})
        for one in found[:_MOST_SHOWN]
    ]
    offsets = sum(one.end - one.start for one in found)
    text = f"{offsets:,} offsets in {len(found):,} ranges: {found[0].text}" if found else otherwise
    return not found, text, {"offsets": offsets, "ranges": MetadataValue.table(rows, _ODDITIES)}
