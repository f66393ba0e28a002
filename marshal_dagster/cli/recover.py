"""`recover`: make a log certain again whose first records were deleted without a snapshot.

An operator confirms the offsets that the log no longer proves. `admin.recovery` does the work.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import typer

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.admin.group_settings import member_interval_ms
from marshal_dagster.admin.recovery import ConfirmedOffset, LastOffsets, ObservedPartition, Recovery, Whose
from marshal_dagster.admin.texts import settings_text
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import (
    WRITING,
    connection_of,
    data_connection_of,
    hint_how_to_create,
    open_log,
    require_rights,
)
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import DataLogOptions, Yes
from marshal_dagster.cli.settings import heartbeat_interval_option
from marshal_dagster.coordination.group_settings import check_settings
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.pause_text import paused_text
from marshal_dagster.errors import AuthorizationError, ConfigurationError, TopicNotFoundError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.protocol.messages import (
    DEFAULT_SETTINGS,
    INT32_MAX,
    INT64_MAX,
    NUMBER,
    WITHOUT_SETTINGS,
    DeliveryMode,
    GroupSettings,
    RuleSet,
    coordination_partition,
    is_name,
    is_topic,
)
from marshal_dagster.protocol.state import RANGES

_OFFSET_FIELDS: Final = 3
_UNKNOWN: Final = (
    "The deleted records may have held other pauses and settings, open plans, other groups, topics and offsets, and "
    "live owners, which cannot be known. Stop all members of all groups before you continue."
)


app = command_group("Recover a log that lost its first records.")


@dataclass(frozen=True, slots=True)
class OffsetProposal:
    """What is known of one key, and the offset proposed for it; `note` is a remark for the table."""

    whose: Whose
    last_offsets: LastOffsets
    committed: int | None
    confirmed: ConfirmedOffset
    note: str = ""


@command(
    app,
    "recover",
    "Recover a log that lost its first records. Nothing can be claimed from such a coordination log if it has no "
    "snapshot. This is also the way to take over a deployment of the Go library. Stop all members of all groups first. "
    "The command shows what is known, asks for confirmation, and waits for 2 heartbeat intervals in which no member "
    "may write. Then it writes the first snapshot, with the pauses, settings and offsets as shown, and without owners "
    "and plans. A group of which neither settings nor a data topic id are left counts as a group of Go consumers.",
    "recover",
    "recover --offset flights/flights/0=1500 --heartbeat-interval 120",
)
def recover(
    *,
    heartbeat_interval: Annotated[
        float | None,
        heartbeat_interval_option("The longest heartbeat interval of any member, if it is longer than those shown."),
    ] = None,
    offset: Annotated[
        list[str] | None,
        typer.Option(
            "--offset",
            metavar="GROUP/TOPIC/PARTITION=OFFSET",
            help="Next offset to read in a partition, instead of the proposed one. Can be repeated.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--settings",
            metavar="GROUP=native,10s,at_least_once",
            help="Settings of a group whose settings record was lost (go: Go consumers). Can be repeated.",
        ),
    ] = None,
    yes: Yes = False,
    options: DataLogOptions,
) -> ExitCode:
    """Show what is known, ask for confirmation, and write the first snapshots. Raises `MarshalError`."""
    if options.as_json and not yes:
        raise output.cannot_ask("without --json")
    given, named = offsets_of(offset or ()), settings_of(settings or ())
    connection, name = connection_of(options), options.coordination_topic
    data_connection = data_connection_of(options.data_connection, connection)
    with closing(open_log(connection, name)) as log, closing(kafka_snapshots(connection, name)) as snapshots:
        with hint_how_to_create(name):
            require_rights(connection, name, WRITING)
            recovery = Recovery(log, snapshots, timeout_s=connection.timeout_s)
            observed = recovery.look()
        _require_unknown(observed, named)
        go_groups = recovery.go_groups(named)
        with Topics(data_connection, client_id="marshal-dagster-recover") as topics:
            proposals = list(propose(observed, recovery.identity.partitions, topics, given, go_groups))
        warn_of_ranges(observed)
        if not options.as_json:
            _show(observed, proposals, named, go_groups)
        question = "Are all members of all groups stopped, and are these offsets right?"
        if observed and not (yes or typer.confirm(question, err=True)):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        if observed:
            output.write_note("waiting for more than 2 heartbeat intervals of log time, in which no member may write")
        interval_ms = None if heartbeat_interval is None else round(heartbeat_interval * 1_000)
        recovered = recovery.recover({proposal.whose: proposal.confirmed for proposal in proposals}, interval_ms, named)
    if options.as_json:
        output.write_json({"recovered": recovered, "keys": [_to_json(proposal) for proposal in proposals]})
    elif recovered:
        output.show(f"Coordination partitions {runs_text(recovered)} have a snapshot now: members can claim again.")
    return ExitCode.OK


def offsets_of(texts: Sequence[str]) -> dict[Whose, int]:
    """Parse GROUP/TOPIC/PARTITION=OFFSET. Raises `ConfigurationError`."""
    return dict(map(_offset_of, texts))


def _offset_of(text: str) -> tuple[Whose, int]:
    named, _, offset = text.rpartition("=")
    fields = named.split("/")
    if len(fields) == _OFFSET_FIELDS and NUMBER.fullmatch(fields[2]) and NUMBER.fullmatch(offset):
        group, topic, partition = fields[0], fields[1], int(fields[2])
        if is_name(group) and is_topic(topic) and partition <= INT32_MAX and int(offset) <= INT64_MAX:
            return (group, (topic, partition)), int(offset)
    raise ConfigurationError(f"--offset: {text!r} is not of the form GROUP/TOPIC/PARTITION=OFFSET")


def settings_of(texts: Sequence[str]) -> dict[str, GroupSettings]:
    """Parse GROUP=native,10s,at_least_once,ranges, with the values in any order. Raises `ConfigurationError`."""
    return dict(map(_settings_of, texts))


def _settings_of(text: str) -> tuple[str, GroupSettings]:
    group, _, values = text.rpartition("=")
    if not is_name(group):
        raise ConfigurationError(f"--settings: {text!r} is not of the form GROUP=native,10s,at_least_once,ranges")
    settings = WITHOUT_SETTINGS if RuleSet.GO in values.split(",") else DEFAULT_SETTINGS
    for value in values.split(","):
        if value in set(RuleSet):
            settings = replace(settings, rule_set=RuleSet(value))
        elif value in set(DeliveryMode):
            settings = replace(settings, delivery=DeliveryMode(value))
        elif value == RANGES:
            settings = replace(settings, features=(RANGES,))
        elif not value[:1].isdigit():
            raise ConfigurationError(
                f"--settings: {value!r} is no rule set, delivery mode, interval or feature; give "
                "GROUP=native,10s,at_least_once,ranges with other values"
            )
        else:
            interval_s = duration_s(value, "--settings")
            settings = replace(settings, heartbeat_interval_ms=member_interval_ms(interval_s, "--settings"))
    check_settings(settings, 0)
    return group, settings


def _require_unknown(observed: Mapping[int, ObservedPartition], named: Mapping[str, GroupSettings]) -> None:
    """Raise `ConfigurationError` for a group in `named` that still has other settings in the log."""
    for number, partition in observed.items():
        for name, group in partition.groups.items():
            if name in named and group.settings_accepted and group.settings != named[name]:
                raise ConfigurationError(
                    f"--settings: group {name!r} has settings in coordination partition {number}: "
                    f"{settings_text(group.settings)}. Leave the group out, and change its settings "
                    f"afterwards with `{shlex.join(['marshal-dagster', 'settings', 'set', name])}`"
                )


def propose(
    observed: Mapping[int, ObservedPartition],
    partitions: int,
    topics: Topics,
    given: Mapping[Whose, int],
    go_groups: Collection[str] = (),
) -> Iterator[OffsetProposal]:
    """Yield an offset for each partition of each topic that a group has in the log, or that is in `given`.

    The offset is the one in `given`, else the last one in the log, else the one committed in Kafka, else 0.

    Args:
        observed: The coordination partitions that are not certain.
        partitions: The number of coordination partitions.
        topics: The data topics' cluster.
        given: The offsets that the operator gave.
        go_groups: Groups of Go consumers. Their keys get no data topic id.

    Raises:
        ConfigurationError: A given offset is of an unknown partition or a certain coordination partition, or an offset
            is beyond the topic's end.
        UnavailableError: Kafka does not answer.
    """
    pairs = {
        (name, topic): partition
        for partition in observed.values()
        for name, group in partition.world.groups.items()
        for topic, _ in group.keys
    }
    for group, (topic, _) in given:
        home = coordination_partition(topic, partitions)
        if home not in observed:
            raise ConfigurationError(
                f"--offset: the coordination partition of topic {topic!r} is certain; use `marshal-dagster position "
                "reset`"
            )
        pairs[group, topic] = observed[home]
    unused = set(given)
    for (group, topic), partition in sorted(pairs.items(), key=lambda pair: pair[0]):
        for proposal in _of_topic(partition, group, topic, topics, given):
            unused.discard(proposal.whose)
            if group in go_groups:
                yield replace(proposal, confirmed=proposal.confirmed._replace(data_topic_id=None))
            else:
                yield proposal
    for group, (topic, number) in unused:
        raise ConfigurationError(
            f"--offset: topic {topic!r} has no partition {number} (for group {group!r}); correct the number"
        )


def _of_topic(
    observed: ObservedPartition, group: str, topic: str, topics: Topics, given: Mapping[Whose, int]
) -> Iterator[OffsetProposal]:
    try:
        described = topics.describe(topic)
        bounds = topics.offsets(topic, described.partitions)
    except TopicNotFoundError:
        output.write_note(
            f"topic {topic!r} of group {group!r} does not exist, so its last offsets in the log are kept; if it is in "
            "another cluster, name that with --data-connection"
        )
        yield from _of_missing_topic(observed, group, topic, given)
        return
    try:
        committed = topics.group_offsets(group, topic)
    except AuthorizationError as missing:
        output.write_note(f"the offsets of group {group!r} in Kafka cannot be read: {missing}")
        committed = {}
    seen = observed.world.groups.get(group)
    for partition in described.partitions:
        whose = (group, (topic, partition))
        key = None if seen is None else seen.keys.get((topic, partition))
        is_other = key is not None and key.data_topic_id not in {None, described.topic_id}
        known = (None if is_other or key is None else key.offset, committed.get(partition))
        offset = given.get(whose, next((number for number in known if number is not None), 0))
        at = bounds[partition]
        if offset > at.end:
            raise ConfigurationError(
                f"{group}/{topic}/{partition}: offset {offset} is beyond the topic's end {at.end}; set another one "
                f"with --offset {group}/{topic}/{partition}=OFFSET"
            )
        note = "topic re-created" if is_other else "nothing known" if known == (None, None) else ""
        lost = f"deleted up to {at.start}" if offset < at.start else ""
        yield OffsetProposal(
            whose,
            observed.last_offsets.get(whose, LastOffsets()),
            committed.get(partition),
            ConfirmedOffset(offset, described.topic_id),
            ", ".join(filter(None, ("as given" if whose in given else note, lost))),
        )


def _of_missing_topic(
    observed: ObservedPartition, group: str, topic: str, given: Mapping[Whose, int]
) -> Iterator[OffsetProposal]:
    """Yield the offsets that the log has. Without them the group would begin by its start policy, and lose messages."""
    seen = observed.world.groups.get(group)
    for place, key in sorted(seen.keys.items() if seen else ()):
        whose = (group, place)
        offset = given.get(whose, key.offset)
        if place[0] == topic and offset is not None:
            last = observed.last_offsets.get(whose, LastOffsets())
            yield OffsetProposal(whose, last, None, ConfirmedOffset(offset, key.data_topic_id), "topic not found")


def warn_of_ranges(observed: Mapping[int, ObservedPartition]) -> None:
    """Warn of groups whose true offsets may be higher than the last ones in the log (protocol.md, section 8.5)."""
    groups = [named for partition in observed.values() for named in partition.world.groups.items()]
    for name in sorted({name for name, group in groups if RANGES in group.settings.features}):
        output.write_note(
            f"the members of group {name!r} claim ranges, which are not seen here: its true offsets may be higher than "
            "those shown. Messages from the shown offsets on are processed again; to avoid that, set higher offsets "
            "with --offset"
        )


def _show(
    observed: Mapping[int, ObservedPartition],
    proposals: Sequence[OffsetProposal],
    named: Mapping[str, GroupSettings],
    go_groups: Collection[str],
) -> None:
    if not observed:
        output.show("Every coordination partition is certain: there is nothing to recover.")
        return
    output.show(f"Only observed: coordination partitions {runs_text(list(observed))}.", _UNKNOWN)
    for number, partition in observed.items():
        for name, group in partition.groups.items():
            until_s = group.paused_until_s
            pause = "" if until_s is None else f", {paused_text(utc_to_second(until_s), group.pause_origin)}"
            settings = group.settings if group.settings_accepted else named.get(name, group.settings)
            origin = "" if group.settings_accepted else f" ({_origin(name, named, go_groups)})"
            output.show(f"Group {name} in {number}: {settings_text(settings)}{origin}{pause}")
    columns = ["group", "partition", "#last heartbeat", "#last release", "#in Kafka", "#to start at", "note"]
    output.show(output.Table(columns, [_row(proposal) for proposal in proposals]))


def _origin(name: str, named: Mapping[str, GroupSettings], go_groups: Collection[str]) -> str:
    """Return where the settings of a group come from that has no settings record left."""
    if name in named:
        return "as given"
    if name in go_groups:
        return (
            "no settings and no data topic id are left, so it is taken for a group of Go consumers; if it is not, "
            f"give its settings with --settings {name}=native,10s,at_least_once"
        )
    return "no settings record is left: its first member writes its own"


def _row(proposal: OffsetProposal) -> list[str | output.Line]:
    group, (topic, partition) = proposal.whose
    numbers = (
        proposal.last_offsets.heartbeat,
        proposal.last_offsets.release,
        proposal.committed,
        proposal.confirmed.offset,
    )
    return [group, f"{topic}/{partition}", *map(output.number, numbers), proposal.note or output.NOTHING]


def _to_json(proposal: OffsetProposal) -> dict[str, Any]:
    group, (topic, partition) = proposal.whose
    return {
        "group": group,
        "topic": topic,
        "partition": partition,
        "last_heartbeat": proposal.last_offsets.heartbeat,
        "last_release": proposal.last_offsets.release,
        "committed_in_kafka": proposal.committed,
        "offset": proposal.confirmed.offset,
        "data_topic_id": proposal.confirmed.data_topic_id,
        "note": proposal.note,
    }
