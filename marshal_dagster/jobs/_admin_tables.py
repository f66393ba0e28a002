"""The tables in which operators' jobs show what was and what is."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Generic, TypeAlias, TypeVar

from dagster import MetadataValue, TableColumn, TableMetadataValue, TableRecord, TableSchema

from marshal_dagster.admin.group_settings import PartitionSettings
from marshal_dagster.admin.pause import Pause, PauseChange
from marshal_dagster.admin.reprocess import ReprocessPlan, ReprocessResult
from marshal_dagster.admin.reset_positions import PositionChange
from marshal_dagster.admin.revoke import HeldClaim
from marshal_dagster.coordination.pause_text import paused_text
from marshal_dagster.protocol.messages import settings_text

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class _Column(Generic[Row]):
    """A column of a table: its Dagster type, what it says, and what a row has there."""

    name: str
    type: str
    about: str
    cell: Callable[[Row], str | int | bool | None]


_Columns: TypeAlias = tuple[_Column[Row], ...]


def _table(columns: _Columns[Row], rows: Iterable[Row]) -> TableMetadataValue:
    schema = TableSchema([TableColumn(column.name, column.type, column.about) for column in columns])
    records = [TableRecord({each.name: each.cell(row) for each in columns}) for row in rows]
    return MetadataValue.table(records, schema)


@dataclass(frozen=True, slots=True)
class _PauseRow:
    partitions: str
    change: PauseChange


_PAUSES: Final[_Columns[_PauseRow]] = (
    _Column("before", "string", "Whether a pause was in force.", lambda row: _pause_text(row.change.before)),
    _Column("after", "string", "Whether one is in force now.", lambda row: _pause_text(row.change.after)),
    _Column("coordination_partitions", "string", "Where that stands.", lambda row: row.partitions),
)


def pause_table(changes: Sequence[PauseChange]) -> TableMetadataValue:
    """Show pauses; coordination partitions that have the same before and after share a row."""
    alike: dict[tuple[Pause, Pause], list[PauseChange]] = {}
    for change in changes:
        alike.setdefault((change.before, change.after), []).append(change)
    rows = [
        _PauseRow("all" if len(alike) == 1 else ", ".join(str(each.number) for each in same), same[0])
        for same in alike.values()
    ]
    return _table(_PAUSES, rows)


def _pause_text(pause: Pause) -> str:
    if not pause.is_in_force or pause.until_s is None:
        return "not paused"
    return paused_text(_utc(pause.until_s), pause.by)


def _utc(at_s: int) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):
        return f"{at_s} s after 1970"  # where no calendar goes


@dataclass(frozen=True, slots=True)
class _SettingsRow:
    before: PartitionSettings
    after: PartitionSettings
    partitions: str


_SETTINGS: Final[_Columns[_SettingsRow]] = (
    _Column("before", "string", "The settings in force before.", lambda row: _settings_text(row.before)),
    _Column("after", "string", "Those in force now.", lambda row: _settings_text(row.after)),
    _Column("coordination_partitions", "string", "Where that is.", lambda row: row.partitions),
)


def settings_table(
    before: Mapping[int, PartitionSettings], after: Mapping[int, PartitionSettings]
) -> TableMetadataValue:
    """Show settings; coordination partitions that have the same before and after share a row."""
    together: dict[tuple[PartitionSettings, PartitionSettings], list[int]] = {}
    for number, there in before.items():
        together.setdefault((there, after[number]), []).append(number)
    rows = [
        _SettingsRow(*pair, "all" if len(together) == 1 else ", ".join(map(str, numbers)))
        for pair, numbers in together.items()
    ]
    return _table(_SETTINGS, rows)


def _settings_text(there: PartitionSettings) -> str:
    text = settings_text(there.settings)
    return f"{text} (by default)" if there.by_default else text


def claim_table(claims: Sequence[HeldClaim], taken: Collection[HeldClaim]) -> TableMetadataValue:
    """Show `claims`, and which of them were taken."""
    columns: _Columns[HeldClaim] = (
        _Column("partition", "int", "The partition.", lambda each: each.partition),
        _Column("start", "int", "Where the range begins; nothing for a whole partition.", lambda each: each.start),
        _Column("end", "int", "Where it ends.", lambda each: each.end),
        _Column("instance", "string", "Who held it.", lambda each: each.owner.instance),
        _Column("epoch", "int", "The fencing token of the claim.", lambda each: each.owner.epoch),
        _Column("last_beat_ms", "int", "When it was last heard of, in log time.", lambda each: each.last_beat_ms),
        _Column("freshness", "string", "How that looked.", lambda each: each.freshness.value),
        _Column("revoked", "bool", "Whether it was taken.", lambda each: each in taken),
    )
    return _table(columns, claims)


def redo_table(redo: ReprocessPlan, redone: ReprocessResult | None) -> TableMetadataValue:
    """Show what is to be done again, and how far it was; None where nothing was done."""
    reached, resume_offset = (None, None) if redone is None else (redone.reached, redone.resume_offset)
    columns: _Columns[ReprocessPlan] = (
        _Column("partition", "int", "The partition.", lambda each: each.back.partition),
        _Column("start", "int", "The first offset that is done again.", lambda each: each.back.offset),
        _Column("end", "int", "The first one behind them.", lambda each: each.end),
        _Column("before", "int", "Where the group stood.", lambda each: each.position_before),
        _Column("reached", "int", "How far it was done again.", lambda _: reached),
        _Column("after", "int", "Where the group goes on.", lambda _: resume_offset),
        _Column("note", "string", "What to think of.", lambda each: "; ".join(each.back.notes)),
    )
    return _table(columns, [redo])


def move_table(moves: Sequence[PositionChange], done: Collection[int]) -> TableMetadataValue:
    """Show positions before and after; those of the partitions in `done` were set."""
    columns: _Columns[PositionChange] = (
        _Column("partition", "int", "The partition.", lambda each: each.partition),
        _Column("log_start", "int", "The first offset that the topic holds.", lambda each: each.extent.start),
        _Column("log_end", "int", "The next offset that can be read.", lambda each: each.extent.end),
        _Column("before", "int", "The next offset to read, before.", lambda each: each.key.offset),
        _Column("after", "int", "The same afterwards.", lambda each: each.offset),
        _Column("set", "bool", "Whether it was set.", lambda each: each.partition in done),
        _Column("note", "string", "What to think of.", lambda each: "; ".join(each.notes)),
    )
    return _table(columns, moves)
