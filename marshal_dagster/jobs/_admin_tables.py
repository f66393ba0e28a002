"""The tables in which operators' jobs show what was and what is."""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

from dagster import TableMetadataValue

from marshal_dagster.admin.group_settings import PartitionSettings
from marshal_dagster.admin.pause import Pause, PauseChange
from marshal_dagster.admin.reprocess import ReprocessPlan, ReprocessResult
from marshal_dagster.admin.reset_positions import PositionChange
from marshal_dagster.admin.revoke import HeldClaim
from marshal_dagster.coordination.pause_text import paused_text
from marshal_dagster.protocol.messages import settings_text
from marshal_dagster.runs.tables import Column, table


def pause_table(changes: Sequence[PauseChange]) -> TableMetadataValue:
    """Show pauses; coordination partitions that have the same before and after share a row."""
    texts = {change.number: (_pause_text(change.before), _pause_text(change.after)) for change in changes}
    return _changes_table("Whether a pause was in force.", "Whether one is in force now.", texts)


def settings_table(
    before: Mapping[int, PartitionSettings], after: Mapping[int, PartitionSettings]
) -> TableMetadataValue:
    """Show settings; coordination partitions that have the same before and after share a row."""
    texts = {number: (_settings_text(before[number]), _settings_text(after[number])) for number in before}
    return _changes_table("The settings in force before.", "Those in force now.", texts)


def _changes_table(about_before: str, about_after: str, texts: Mapping[int, tuple[str, str]]) -> TableMetadataValue:
    """Show what each coordination partition had before and has now."""
    alike: dict[tuple[str, str], list[int]] = {}
    for number, pair in texts.items():
        alike.setdefault(pair, []).append(number)

    def partitions(pair: tuple[str, str]) -> str:
        return "all" if len(alike) == 1 else ", ".join(map(str, alike[pair]))

    columns: Sequence[Column[tuple[str, str]]] = (
        Column("before", "string", about_before, lambda pair: pair[0]),
        Column("after", "string", about_after, lambda pair: pair[1]),
        Column("coordination_partitions", "string", "Where that is.", partitions),
    )
    return table(columns, alike)


def _pause_text(pause: Pause) -> str:
    if not pause.is_in_force or pause.until_s is None:
        return "not paused"
    return paused_text(_utc(pause.until_s), pause.by)


def _utc(at_s: int) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):
        return f"{at_s} s after 1970"  # where no calendar goes


def _settings_text(there: PartitionSettings) -> str:
    text = settings_text(there.settings)
    return f"{text} (by default)" if there.by_default else text


def claim_table(claims: Sequence[HeldClaim], taken: Collection[HeldClaim]) -> TableMetadataValue:
    """Show `claims`, and which of them were taken."""
    columns: Sequence[Column[HeldClaim]] = (
        Column("partition", "int", "The partition."),
        Column("start", "int", "Where the range begins; nothing for a whole partition."),
        Column("end", "int", "Where it ends."),
        Column("instance", "string", "Who held it.", lambda claim: claim.owner.instance),
        Column("epoch", "int", "The fencing token of the claim.", lambda claim: claim.owner.epoch),
        Column("last_beat_ms", "int", "When it was last heard of, in log time."),
        Column("freshness", "string", "How that looked.", lambda claim: claim.freshness.value),
        Column("revoked", "bool", "Whether it was taken.", lambda claim: claim in taken),
    )
    return table(columns, claims)


def redo_table(redo: ReprocessPlan, redone: ReprocessResult | None) -> TableMetadataValue:
    """Show what is to be done again, and how far it was; None where nothing was done."""
    reached, resume_offset = (None, None) if redone is None else (redone.reached, redone.resume_offset)
    columns: Sequence[Column[ReprocessPlan]] = (
        Column("partition", "int", "The partition.", lambda redo: redo.back.partition),
        Column("start", "int", "The first offset that is done again.", lambda redo: redo.back.offset),
        Column("end", "int", "The first one after them.", lambda redo: redo.end),
        Column("before", "int", "Where the group stood.", lambda redo: redo.position_before),
        Column("reached", "int", "How far it was done again.", lambda _: reached),
        Column("after", "int", "Where the group goes on.", lambda _: resume_offset),
        Column("note", "string", "What to think of.", lambda redo: "; ".join(redo.back.notes)),
    )
    return table(columns, [redo])


def move_table(moves: Sequence[PositionChange], done: Collection[int]) -> TableMetadataValue:
    """Show positions before and after; those of the partitions in `done` were set."""
    columns: Sequence[Column[PositionChange]] = (
        Column("partition", "int", "The partition.", lambda move: move.partition),
        Column("log_start", "int", "The first offset that the topic holds.", lambda move: move.extent.start),
        Column("log_end", "int", "The next offset that can be read.", lambda move: move.extent.end),
        Column("before", "int", "The next offset to read, before.", lambda move: move.key.offset),
        Column("after", "int", "The same afterwards.", lambda move: move.offset),
        Column("set", "bool", "Whether it was set.", lambda move: move.partition in done),
        Column("note", "string", "What to think of.", lambda move: "; ".join(move.notes)),
    )
    return table(columns, moves)
