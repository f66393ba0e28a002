"""Tables in the metadata of operators' jobs: the state before and after.

`marshal_dagster.jobs.admin` shows them on the page of a run.
"""

from collections.abc import Collection, Mapping, Sequence

from dagster import TableMetadataValue

from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.admin.group_settings import PartitionSettings
from marshal_dagster.admin.pause import Pause, PauseChange
from marshal_dagster.admin.reprocess import ReprocessPlan, ReprocessResult
from marshal_dagster.admin.reset_positions import PositionChange
from marshal_dagster.admin.revoke import HeldClaim
from marshal_dagster.coordination.pause_text import paused_text
from marshal_dagster.runs.tables import Column, table


def pause_table(changes: Sequence[PauseChange]) -> TableMetadataValue:
    """Return a table of pauses; coordination partitions with the same values before and after share a row."""
    texts = {change.number: (_pause_text(change.before), _pause_text(change.after)) for change in changes}
    return _changes_table("The pause in force before.", "The pause in force now.", texts)


def settings_table(
    before: Mapping[int, PartitionSettings], after: Mapping[int, PartitionSettings]
) -> TableMetadataValue:
    """Return a table of settings; coordination partitions with the same values before and after share a row."""
    texts = {number: (_settings_text(before[number]), _settings_text(after[number])) for number in before}
    return _changes_table(
        "Heartbeat interval, rule set, delivery and features before.",
        "The same now, or after a dry run's change.",
        texts,
    )


def _changes_table(about_before: str, about_after: str, texts: Mapping[int, tuple[str, str]]) -> TableMetadataValue:
    """Return a table of values before and after, with the coordination partitions that have them."""
    alike: dict[tuple[str, str], list[int]] = {}
    for number, pair in texts.items():
        alike.setdefault(pair, []).append(number)

    def partitions(pair: tuple[str, str]) -> str:
        return "all" if len(alike) == 1 else ", ".join(map(str, alike[pair]))

    columns: Sequence[Column[tuple[str, str]]] = (
        Column("before", "string", about_before, lambda pair: pair[0]),
        Column("after", "string", about_after, lambda pair: pair[1]),
        Column("coordination_partitions", "string", "The coordination partitions with these values.", partitions),
    )
    return table(columns, alike)


def _pause_text(pause: Pause) -> str:
    if not pause.is_in_force or pause.until_s is None:
        return "not paused"
    return paused_text(utc_to_second(pause.until_s), pause.by)


def _settings_text(there: PartitionSettings) -> str:
    settings = there.settings
    values = (settings.rule_set, settings.delivery, *settings.features)
    text = ", ".join((f"{settings.heartbeat_interval_ms / 1_000:g} s", *values))
    return f"{text} (by default)" if there.by_default else text


def claim_table(claims: Sequence[HeldClaim], taken: Collection[HeldClaim]) -> TableMetadataValue:
    """Return a table of `claims`, with a column that shows which of them were revoked (`taken`)."""
    columns: Sequence[Column[HeldClaim]] = (
        Column("partition", "int", "The partition."),
        Column("start", "int", "The first offset of the range; empty for a whole partition."),
        Column("end", "int", "The next offset after the range; empty for a whole partition."),
        Column("instance", "string", "The instance id of the owner.", lambda claim: claim.owner.instance),
        Column("epoch", "int", "The fencing token of the claim.", lambda claim: claim.owner.epoch),
        Column("last_beat_ms", "int", "The last heartbeat, in log time (unix ms)."),
        Column(
            "freshness",
            "string",
            "How old the last heartbeat was: fresh, unknown or stale.",
            lambda claim: claim.freshness.value,
        ),
        Column("revoked", "bool", "Whether the claim was revoked.", lambda claim: claim in taken),
    )
    return table(columns, claims)


def redo_table(plans: Sequence[ReprocessPlan], redone: ReprocessResult | None) -> TableMetadataValue:
    """Return a table of the ranges to repeat and of their progress; `redone` is None in a dry run."""
    columns: Sequence[Column[ReprocessPlan]] = (
        Column("partition", "int", "The partition."),
        Column("start", "int", "The first offset to repeat.", lambda plan: plan.back.offset),
        Column("end", "int", "The next offset after the range."),
        Column("before", "int", "The position of the group before.", lambda plan: plan.position_before),
        Column(
            "reached",
            "int",
            "The offset up to which the range was repeated.",
            lambda plan: None if redone is None else redone.of(plan.partition).reached,
        ),
        Column(
            "after",
            "int",
            "The position where the group continues.",
            lambda plan: None if redone is None else redone.of(plan.partition).resume_offset,
        ),
        Column("note", "string", "What the operator should consider.", lambda plan: "; ".join(plan.notes)),
    )
    return table(columns, plans)


def move_table(moves: Sequence[PositionChange], done: Collection[int]) -> TableMetadataValue:
    """Return a table of positions before and after; `done` has the partitions whose position was set."""
    columns: Sequence[Column[PositionChange]] = (
        Column("partition", "int", "The partition.", lambda move: move.partition),
        Column("log_start", "int", "The first offset in the partition.", lambda move: move.extent.start),
        Column("log_end", "int", "The end offset of the partition.", lambda move: move.extent.end),
        Column("before", "int", "The next offset to read, before the change.", lambda move: move.key.offset),
        Column("after", "int", "The next offset to read, after the change.", lambda move: move.offset),
        Column("set", "bool", "Whether the position was set.", lambda move: move.partition in done),
        Column("note", "string", "What the operator should consider.", lambda move: "; ".join(move.notes)),
    )
    return table(columns, moves)
