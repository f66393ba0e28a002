"""What the newest records tell of who sent them: their clocks, the settings they ask for, how often they beat.

It is advice: no rule uses a sender's time, and a member that is configured otherwise than its group writes nothing.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
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
"""How many records of each coordination partition are looked at."""
RECENT_MS: Final = 86_400_000
"""How old they may be: what was wrong before may have been mended."""
_LEAST_BEHIND: Final = 3
"""How many records must agree that their sender's clock is slow: one may only have waited to be sent."""
_LEAST_BEATS: Final = 3
_LATE: Final = 1.25
"""A heartbeat waits for a quarter of the interval at most, then it is given up (protocol.md, section 6)."""
_SECOND_MS: Final = 1_000
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class SentRecord:
    """A valid record: where it lies, when the broker took it, and what it says."""

    partition: int
    offset: int
    timestamp_ms: int
    message: Message
    is_sender_timed: bool = False
    """Whether its timestamp is its sender's, not the broker's."""

    @property
    def delay_ms(self) -> int:
        """By how much the broker's clock was ahead of the sender's, which is written down in whole seconds."""
        return self.timestamp_ms - self.message.time_s * _SECOND_MS


def newest(log: CoordinationLog, timeout_s: float, at_ms: int) -> list[SentRecord]:
    """Read the newest records of a log; those that retention takes meanwhile are left out. Raises `MarshalError`."""
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
    """Tell of clocks that disagree, and of members that go by other settings or rules than those in force."""
    yield _timestamps(sent)
    yield _clocks(sent, world)
    yield _members([*_other_settings(sent, world), *_other_intervals(sent, world), *_other_rules(world, at_ms)])


def _timestamps(sent: Collection[SentRecord]) -> Finding:
    wrong = [each for each in sent if each.is_sender_timed]
    if not wrong:
        return Finding("timestamps", CheckState.OK, f"{len(sent)} records of the last day have the broker's timestamps")
    last = max(wrong, key=lambda each: (each.timestamp_ms, each.offset))
    return Finding(
        "timestamps",
        CheckState.PROBLEM,
        f"{len(wrong)} of {len(sent)} records of the last day have their sender's timestamp, the last at offset "
        f"{last.offset} of coordination partition {last.partition}",
        "log time is then a sender's clock: one that is wrong takes over live claims, so members end what they hold "
        "at such a record",
        "set message.timestamp.type=LogAppendTime on the topic (marshal-dagster topic check), or, where a sender's "
        "clock was far ahead, use a new one: marshal-dagster topic create --name NEW",
    )


def _clocks(sent: Collection[SentRecord], world: World) -> Finding:
    delays: dict[tuple[str, int], list[int]] = defaultdict(list)
    for each in sent:
        # Members of Go groups date their records back on purpose; Go consumers do not.
        group = world.partitions[each.partition].groups.get(each.message.group)
        shift_ms = GO_TIME_SHIFT_S * _SECOND_MS if group is not None and group.is_go else 0
        delays[each.message.client, each.partition].append(max(min(0, each.delay_ms), each.delay_ms - shift_ms))
    apart: dict[str, dict[int, int]] = defaultdict(dict)
    for (client, number), found in delays.items():
        least_ms = min(found)
        is_slow = least_ms > LOG_TIME_AHEAD_MS + _SECOND_MS and len(found) >= _LEAST_BEHIND
        if is_slow or least_ms < -LOG_TIME_AHEAD_MS:
            apart[client][number] = least_ms
    if not apart:
        return Finding(
            "clocks",
            CheckState.OK,
            f"{len(sent)} records of the last day: their senders' clocks and the brokers' agree",
        )
    return Finding(
        "clocks",
        CheckState.WARNING,
        _listed(_apart(client, where) for client, where in sorted(apart.items())),
        "a sender's clock, or that of the broker that leads these coordination partitions, is wrong: the end of a "
        "pause is reckoned by the one and judged by the other; leases go by neither",
        "on those members' machines and on the brokers: timedatectl status (the clock must be synchronised)",
    )


def _apart(client: str, where: dict[int, int]) -> str:
    most_ms = max(where.values(), key=abs)
    side = "behind" if most_ms > 0 else "ahead of"
    return (
        f"the clock of client {client} is {output.duration(most_ms)} {side} the broker's (coordination partitions "
        f"{world_view.listed(where)})"
    )


def _members(differences: list[str]) -> Finding:
    if not differences:
        return Finding(
            "members", CheckState.OK, "none is seen in the log's last day that goes by other settings than its group"
        )
    return Finding(
        "members",
        CheckState.WARNING,
        _listed(differences),
        "a member that is configured otherwise than its group claims nothing; one that beats too seldom is taken for "
        "stale, and its partitions are taken over; a Go consumer goes on with what others took over",
        "marshal-dagster status (shows the settings in force); give all members of the group the same, and a group "
        "with Go consumers the rule set go",
    )


def _other_settings(sent: Collection[SentRecord], world: World) -> Iterator[str]:
    """Find settings that were asked for after those in force, and are not: the log refused them."""
    asked = [
        (each, each.message, group.settings)
        for each in sent
        if isinstance(each.message, GroupSettingsRecord)
        and (group := world.partitions[each.partition].groups.get(each.message.group)) is not None
    ]
    in_force_from = {
        (each.partition, message.group): each.offset
        for each, message, in_force in sorted(asked, key=lambda one: one[0].offset)
        if message.settings == in_force
    }
    refused: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for each, message, in_force in asked:
        is_later = each.offset > in_force_from.get((each.partition, message.group), -1)
        if message.settings != in_force and is_later:
            refused[message.group, message.client, world_view.settings_text(message.settings)].add(each.partition)
    for (name, client, settings), numbers in sorted(refused.items()):
        where = f"in coordination partitions {world_view.listed(numbers)}"
        yield f"group {name}: client {client} asked for settings that are not in force, {settings}, {where}"


def _other_intervals(sent: Iterable[SentRecord], world: World) -> Iterator[str]:
    """Find members whose heartbeats come further apart than the group's interval, each time."""
    slowest: dict[tuple[str, str], tuple[int, int]] = {}
    for tenure, times in _beats(sent).items():
        group = world.partitions[tenure.home].groups.get(tenure.group)
        if group is None or len(times) < _LEAST_BEATS:
            continue
        gap_ms = min(after - before for before, after in pairwise(times))
        interval_ms = group.settings.heartbeat_interval_ms
        if gap_ms > _LATE * interval_ms:
            who = (tenure.group, tenure.client)
            slowest[who] = max(slowest.get(who, (0, 0)), (gap_ms, interval_ms))
    for (name, client), (gap_ms, interval_ms) in sorted(slowest.items()):
        yield (
            f"group {name}: client {client} beats every {output.duration(gap_ms)} at best, the group's interval is "
            f"{output.duration(interval_ms)}"
        )


def _other_rules(world: World, at_ms: int) -> Iterator[str]:
    """Find owners that named no data topic before their first heartbeat, as members do (protocol.md, section 6)."""
    held: dict[tuple[str, str], int] = defaultdict(int)
    for name, _, group, key in world.keys():  # noqa: SIM118 - no mapping
        is_unnamed = key.offset is not None and key.data_topic_id is None and not key.provisional
        is_recent = key.last_beat_ms >= at_ms - RECENT_MS
        if key.owner is not None and is_unnamed and is_recent and group.settings.rule_set is RuleSet.NATIVE:
            held[name, key.owner.client] += 1
    for (name, client), count in sorted(held.items()):
        yield (
            f"group {name}: client {client} holds {count} partitions and names no data topic: it is a consumer of the "
            "Go library, or of an older version, in a group of the rule set native"
        )


class _Holding(NamedTuple):
    """Who holds what: a key, or the range of that epoch."""

    home: int
    group: str
    client: str
    instance: str
    topic: str
    partition: int
    epoch: int


def _beats(sent: Iterable[SentRecord]) -> Mapping[_Holding, list[int]]:
    """Give when each tenure beat, in order."""
    beats: dict[_Holding, list[int]] = defaultdict(list)
    for each in sorted(sent, key=lambda one: one.offset):
        message = each.message
        if isinstance(message, Heartbeat | RangeHeartbeat):
            epoch = message.epoch if isinstance(message, RangeHeartbeat) else -1
            what = (message.topic, message.partition, epoch)
            tenure = _Holding(each.partition, message.group, message.client, message.instance, *what)
            beats[tenure].append(each.timestamp_ms)
    return beats


def _listed(parts: Iterable[str]) -> str:
    every = list(parts)
    rest = f"; and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return "; ".join(every[:_SHOWN]) + rest
