"""Check the senders of the newest records: their clocks, the settings they request, and their heartbeats.

The findings are advice. No rule uses a sender's time, and a member with other settings than its group writes nothing.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import first_few
from marshal_dagster.admin.texts import settings_text
from marshal_dagster.cli import output
from marshal_dagster.cli.doctor_checks.finding import Finding, ok, problem, warning
from marshal_dagster.coordination.appender import GO_TIME_SHIFT_S
from marshal_dagster.coordination.log import CoordinationLog, PositionLostError
from marshal_dagster.coordination.rationalizer import LOG_TIME_AHEAD_MS
from marshal_dagster.protocol.messages import (
    GroupSettingsRecord,
    Heartbeat,
    InvalidMessage,
    Message,
    RangeHeartbeat,
    RuleSet,
    parse,
)
from marshal_dagster.protocol.world import World

NEWEST: Final = 2_000
"""How many records of each coordination partition are checked."""
RECENT_MS: Final = 86_400_000
"""Their maximum age. What was wrong earlier may have been fixed."""
_LEAST_BEHIND: Final = 3
"""How many records must show that their sender's clock is slow, because a single one may have been sent late."""
_LEAST_BEATS: Final = 3
_LATE: Final = 1.25
"""A heartbeat waits at most a quarter of the interval, then it is abandoned (protocol.md, section 6)."""
_SECOND_MS: Final = 1_000
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class SentRecord:
    """A valid record: its place in the log, the broker's timestamp, and its message."""

    partition: int
    offset: int
    timestamp_ms: int
    message: Message
    is_sender_timed: bool = False
    """Whether its timestamp is its sender's, not the broker's."""

    @property
    def delay_ms(self) -> int:
        """By how much the broker's clock was ahead of the sender's, which is recorded in whole seconds."""
        return self.timestamp_ms - self.message.time_s * _SECOND_MS


def newest(log: CoordinationLog, timeout_s: float, at_ms: int) -> list[SentRecord]:
    """Read the newest records of a log, except those that retention deletes meanwhile. Raises `MarshalError`."""
    bounds = log.bounds(range(log.identity().partitions))
    log.follow({number: max(each.start, each.end - NEWEST) for number, each in bounds.items()})
    sent: list[SentRecord] = []
    try:
        for chunk in log.read_until({number: each.end for number, each in bounds.items()}, timeout_s):
            for offset, timestamp_ms, value in chunk.records:
                message = parse(value)
                if not isinstance(message, InvalidMessage) and timestamp_ms >= at_ms - RECENT_MS:
                    is_sender_timed = offset in chunk.sender_timed
                    sent.append(SentRecord(chunk.partition, offset, timestamp_ms, message, is_sender_timed))
    except PositionLostError:
        pass
    return sent


def check_senders(sent: Collection[SentRecord], world: World, at_ms: int) -> Iterator[Finding]:
    """Check for clocks that differ, and for members with other settings or rules than those in force."""
    yield _timestamps(sent)
    yield _clocks(sent, world)
    differences = [*_other_settings(sent, world), *_other_intervals(sent, world), *_other_rules(world, at_ms)]
    if not differences:
        yield ok("members", "in the last day of the log no member had other settings than its group")
        return
    yield warning(
        "members",
        first_few(differences, _SHOWN, "; "),
        "a member with other settings than its group claims nothing; if its heartbeats are too rare, it counts as "
        "stale, and others take over its partitions; a Go consumer continues on partitions that others took over",
        "marshal-dagster status (shows the settings in force); configure all members of the group alike, and a group "
        "with Go consumers with the rule set go",
    )


def _timestamps(sent: Collection[SentRecord]) -> Finding:
    wrong = [record for record in sent if record.is_sender_timed]
    if not wrong:
        return ok("timestamps", f"{len(sent)} records of the last day have the broker's timestamps")
    last = max(wrong, key=lambda record: (record.timestamp_ms, record.offset))
    return problem(
        "timestamps",
        f"{len(wrong)} of {len(sent)} records of the last day have their sender's timestamp, the last at offset "
        f"{last.offset} of coordination partition {last.partition}",
        "log time is then a sender's clock, and a wrong one would take over live claims; so members end their claims "
        "at such a record",
        "set message.timestamp.type=LogAppendTime on the topic (marshal-dagster topic check), or, where a sender's "
        "clock was far ahead, use a new one: marshal-dagster topic create --name NEW",
    )


def _clocks(sent: Collection[SentRecord], world: World) -> Finding:
    delays: dict[tuple[str, int], list[int]] = defaultdict(list)
    for record in sent:
        # Members of Go groups date their records back on purpose, unlike Go consumers.
        group = world.partitions[record.partition].groups.get(record.message.group)
        shift_ms = GO_TIME_SHIFT_S * _SECOND_MS if group is not None and group.is_go else 0
        delay_ms = max(min(0, record.delay_ms), record.delay_ms - shift_ms)
        delays[record.message.client, record.partition].append(delay_ms)
    differences: dict[str, dict[int, int]] = defaultdict(dict)
    for (client, partition), delays_ms in delays.items():
        least_ms = min(delays_ms)
        is_slow = least_ms > LOG_TIME_AHEAD_MS + _SECOND_MS and len(delays_ms) >= _LEAST_BEHIND
        if is_slow or least_ms < -LOG_TIME_AHEAD_MS:
            differences[client][partition] = least_ms
    if not differences:
        return ok(
            "clocks", f"{len(sent)} records of the last day: the clocks of their senders and of the brokers agree"
        )
    return warning(
        "clocks",
        first_few([_difference_text(*difference) for difference in sorted(differences.items())], _SHOWN, "; "),
        "a sender's clock, or the clock of the broker that leads these coordination partitions, is wrong: the end of a "
        "pause is set by the one and judged by the other; leases depend on neither",
        "on those members' machines and on the brokers: timedatectl status (the clock must be synchronised)",
    )


def _difference_text(client: str, where: Mapping[int, int]) -> str:
    most_ms = max(where.values(), key=abs)
    side = "behind" if most_ms > 0 else "ahead of"
    return (
        f"the clock of client {client} is {output.duration(most_ms)} {side} the broker's (coordination partitions "
        f"{runs_text(where)})"
    )


def _other_settings(sent: Iterable[SentRecord], world: World) -> Iterator[str]:
    """Yield the settings that were requested after those in force, and that the log refused."""
    later: dict[tuple[int, str], list[tuple[str, str]]] = defaultdict(list)
    for record in sorted(sent, key=lambda record: record.offset):
        message = record.message
        group = world.partitions[record.partition].groups.get(message.group)
        if not isinstance(message, GroupSettingsRecord) or group is None:
            continue
        if message.settings == group.settings:
            later[record.partition, message.group].clear()
        else:
            later[record.partition, message.group].append((message.client, settings_text(message.settings)))
    refused: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for (partition, name), requests in later.items():
        for client, settings in requests:
            refused[name, client, settings].add(partition)
    for (name, client, settings), partitions in sorted(refused.items()):
        where = f"in coordination partitions {runs_text(partitions)}"
        yield f"group {name}: client {client} requested settings that are not in force, {settings}, {where}"


def _other_intervals(sent: Iterable[SentRecord], world: World) -> Iterator[str]:
    """Yield the members whose heartbeats are always further apart than the group's interval."""
    beats: dict[tuple[int, str, str, str, str, int, int | None], list[int]] = defaultdict(list)
    for record in sorted(sent, key=lambda record: record.offset):
        message = record.message
        if isinstance(message, Heartbeat | RangeHeartbeat):
            member = (record.partition, message.group, message.client, message.instance)
            epoch = message.epoch if isinstance(message, RangeHeartbeat) else None
            beats[*member, message.topic, message.partition, epoch].append(record.timestamp_ms)
    slowest: dict[tuple[str, str], tuple[int, int]] = {}
    for (home, name, client, *_), times_ms in beats.items():
        group = world.partitions[home].groups.get(name)
        if group is None or len(times_ms) < _LEAST_BEATS:
            continue
        gap_ms = min(after - before for before, after in pairwise(times_ms))
        interval_ms = group.settings.heartbeat_interval_ms
        if gap_ms > _LATE * interval_ms:
            slowest[name, client] = max(slowest.get((name, client), (0, 0)), (gap_ms, interval_ms))
    for (name, client), (gap_ms, interval_ms) in sorted(slowest.items()):
        yield (
            f"group {name}: heartbeats of client {client} come every {output.duration(gap_ms)} at best, but the "
            f"group's interval is {output.duration(interval_ms)}"
        )


def _other_rules(world: World, at_ms: int) -> Iterator[str]:
    """Yield owners that sent no DataTopic before their first heartbeat, as members do (protocol.md, section 6)."""
    held: dict[tuple[str, str], int] = defaultdict(int)
    for name, _, group, key in world.keys():  # noqa: SIM118 - no mapping
        is_unnamed = key.offset is not None and key.data_topic_id is None and not key.provisional
        is_recent = key.last_beat_ms >= at_ms - RECENT_MS
        if key.owner is not None and is_unnamed and is_recent and group.settings.rule_set is RuleSet.NATIVE:
            held[name, key.owner.client] += 1
    for (name, client), count in sorted(held.items()):
        yield (
            f"group {name}: client {client} holds {count} partitions and names no data topic: it is a consumer of the "
            "Go library, or a member of an older version, in a group of the rule set native"
        )
