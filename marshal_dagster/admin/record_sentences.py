"""One plain sentence for each record of the coordination log: who did what, where, and why it was refused.

`judge` applies a record to the world state and keeps what the sentence needs of the state before it. `sentence` is
pure. `tail --explain` and the timeline page use them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, assert_never

from marshal_dagster._internal.texts import counted, utc_to_second
from marshal_dagster.admin.texts import (
    duration,
    member_text,
    owner_text,
    settings_text,
)
from marshal_dagster.coordination.claims import is_operator
from marshal_dagster.coordination.pause_text import origin_text
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingRange,
    DataTopic,
    GroupMessage,
    GroupSettingsRecord,
    Heartbeat,
    InvalidMessage,
    Mark,
    Message,
    PlanningRange,
    RangeDone,
    RangeHeartbeat,
    RangeMessage,
    ReleaseGroup,
    ReleasingPartition,
    ReleasingRange,
    RevokingClaim,
    RevokingRange,
    parse,
)
from marshal_dagster.protocol.range_set import of_epoch
from marshal_dagster.protocol.replay import StoredRecord
from marshal_dagster.protocol.rules import RecordNote, Refusal
from marshal_dagster.protocol.staleness import stale_after_ms
from marshal_dagster.protocol.state import Group, Key, Owner, PauseOrigin, Phase, Range
from marshal_dagster.protocol.world import PartitionWorld, Verdict, VerdictKind

_SHOWN_BYTES: Final = 80
"""How many bytes of an invalid record are shown."""


@dataclass(frozen=True, slots=True)
class StateBefore:
    """The state of a record's group and key before the record was applied; it does not change later."""

    key: Key
    heartbeat_interval_ms: int
    paused_until_s: int | None
    paused_by: PauseOrigin | None

    @classmethod
    def of(cls, group: Group, key: Key) -> "StateBefore":
        """Return a copy of what the sentence needs."""
        return cls(key.copy(), group.settings.heartbeat_interval_ms, group.paused_until_s, group.pause_origin)


@dataclass(frozen=True, slots=True)
class JudgedRecord:
    """One record, the log time at it, its verdict (None if it was not judged), and the state before it."""

    record: StoredRecord
    log_time_ms: int
    verdict: Verdict | None
    before: StateBefore | None = None


def judge(world: PartitionWorld, record: StoredRecord) -> JudgedRecord:
    """Apply a record to the state of its coordination partition, and return it with its verdict.

    Args:
        world: The state before the record; it changes.
        record: The next record of that coordination partition.

    Raises:
        ValueError: The record, or a later one, was applied before.

    Example:
        ```python
        world = World(8).start(partition=0, offset=0)
        for record in records:
            print(sentence(judge(world, record)))
        ```
    """
    message = parse(record.value)
    before = None
    if not isinstance(message, InvalidMessage):
        key = world.key(message.group, message.topic, message.partition)
        before = StateBefore.of(world.group(message.group), key)
    verdict = world.apply(record.offset, record.timestamp_ms, record.value)
    if record.reason is not None:
        world.keep_pause_reason(record.value, record.reason)
    return JudgedRecord(record, max(record.timestamp_ms, world.log_time_ms or 0), verdict, before)


def sentence(judged: JudgedRecord) -> str:
    """Return what a record did, as one sentence without its time. The text is untrusted: escape it before it is shown.

    Without a state before the record, the sentence does not name the previous owner, offset or plan.

    Example:
        `Run 5b1c0d3e (flights) claimed flights/3 in group etl, taking it over from run 77aa01bc (flights), which was
        silent for 2 min 3 s.`
    """
    message = parse(judged.record.value)
    if isinstance(message, InvalidMessage):
        return _invalid_text(judged.record.value, message.reason)
    record = judged.record
    described = _Described(message, judged.log_time_ms, judged.before, judged.verdict, record.reason)
    return f"{_capitalized(_sentence(described))}."


class _Deed(NamedTuple):
    """What a record does, as past tense and as infinitive; `more` follows if it was accepted."""

    did: str
    tried: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class _Described:
    """A valid record with the texts for its parts."""

    message: Any
    at_ms: int
    before: StateBefore | None
    verdict: Verdict | None
    reason: str | None

    @property
    def key(self) -> Key:
        """The key before the record; an empty one if it is not known."""
        return Key() if self.before is None else self.before.key

    @property
    def place(self) -> str:
        """The topic, the partition and the group."""
        return f"{self.message.topic}/{self.message.partition} in group {self.message.group}"

    @property
    def range(self) -> Range | None:
        """The range that the record names."""
        return of_epoch(self.key.ranges, self.message.epoch)

    @property
    def range_text(self) -> str:
        """The range that the record names, and its place."""
        named = self.range
        which = f"the range of epoch {self.message.epoch}" if named is None else _offsets(named.start, named.end)
        return f"{which} of {self.place}"

    @property
    def is_by_pauser(self) -> bool:
        """Whether the sender paused the group, and the pause is in force."""
        before = self.before
        by = None if before is None else before.paused_by
        return by is not None and self.is_paused and by.instance == self.message.instance

    @property
    def is_paused(self) -> bool:
        """Whether the group is paused at the record."""
        until_s = None if self.before is None else self.before.paused_until_s
        return until_s is not None and self.at_ms < until_s * 1_000


def _sentence(described: _Described) -> str:
    message, verdict = described.message, described.verdict
    actor, deed = member_text(message.instance, message.client), _DEEDS[type(message)](described)
    if verdict is None:
        return f"{actor} wrote a record to {deed.tried}; it was not judged"
    match verdict.kind:
        case VerdictKind.ACCEPTED:
            notes = "".join(f"; {_note_text(described, note)}" for note in verdict.notes)
            return f"{actor} {deed.did}{deed.more}{notes}"
        case VerdictKind.REFUSED:
            return f"{actor} could not {deed.tried}: {_refusal_text(described, verdict.reason)}"
        case VerdictKind.INVALID:
            return f"{actor} could not {deed.tried}: readers skip the record, because it is {verdict.reason}"
    assert_never(verdict.kind)


def _invalid_text(value: bytes | None, reason: str) -> str:
    if value is None:
        return f"A record that is not valid was skipped: {reason}."
    shown = value[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    more = "..." if len(value) > _SHOWN_BYTES else ""
    return f"A record that is not valid was skipped: {reason}. It begins with {shown!r}{more}."


def _claim(described: _Described) -> _Deed:
    key, place = described.key, described.place
    more = _taken_over(described, key.owner, key.last_beat_ms)
    if is_operator(described.message.instance):
        return _Deed(f"claimed {place}", f"claim {place}", more)
    if key.plan_end is not None:
        more += f"; it repeats the planned offsets {_offsets(key.offset, key.plan_end)}, try {key.plan_attempts + 2}"
    elif key.offset is not None:
        more += f"; its position is {key.offset}"
    return _Deed(f"claimed {place}", f"claim {place}", more)


def _taken_over(described: _Described, owner: Owner | None, last_beat_ms: int) -> str:
    if owner is None:
        return ""
    silent = duration(described.at_ms - last_beat_ms)
    if owner.instance == described.message.instance:
        return f" again, after it was silent for {silent}"
    return f", taking it over from {owner_text(owner)}, which was silent for {silent}"


def _heartbeat(described: _Described) -> _Deed:
    offset, key, place = described.message.offset, described.key, described.place
    tried = f"confirm its claim of {place} at offset {offset}"
    if described.before is None or key.offset == offset or _is_only_noted(described):
        return _Deed(f"confirmed its claim of {place} at offset {offset}", tried)
    if key.offset is None:
        return _Deed(f"gave {place} its first position, offset {offset}", tried)
    if key.plan_end is None or offset < key.offset:
        return _Deed(f"moved the position of {place} from {key.offset} to {offset}", tried)
    done = f"committed offsets {_offsets(key.offset, offset)} of {place}"
    more = "" if offset == key.plan_end else f"; the plan was {_offsets(key.offset, key.plan_end)}"
    return _Deed(done, f"commit offsets {_offsets(key.offset, offset)} of {place}", more)


def _is_only_noted(described: _Described) -> bool:
    notes = () if described.verdict is None else described.verdict.notes
    return RecordNote.REWIND in notes or RecordNote.BEYOND_RANGES in notes


def _release(described: _Described) -> _Deed:
    offset, place, before = described.message.offset, described.place, described.key.offset
    if not described.is_by_pauser:
        return _Deed(f"released {place} at offset {offset}", f"release {place} at offset {offset}")
    was = "" if before is None else f"; it was {before}"
    return _Deed(f"set the position of {place} to {offset}", f"set the position of {place} to {offset}", was)


def _plan(described: _Described) -> _Deed:
    start, end, place = described.key.offset, described.message.plan_end, described.place
    which = f"offsets up to {end}" if start is None else f"offsets {_offsets(start, end)}"
    more = "" if start is None else f" ({counted(end - start, 'offset')})"
    return _Deed(f"planned {which} of {place} as one batch", f"plan {which} of {place} as one batch", more)


def _revoke(described: _Described) -> _Deed:
    owner, epoch = described.key.owner, described.message.epoch
    holder = f" of {owner_text(owner)}" if owner is not None and owner.epoch == epoch else f" of epoch {epoch}"
    claim = f"the claim{holder} on {described.place}"
    return _Deed(f"revoked {claim}", f"revoke {claim}")


def _name_topic(described: _Described) -> _Deed:
    before, topic_id = described.key.data_topic_id, described.message.topic_id
    is_other = before not in {None, topic_id}
    more = f"; it was {before}, so the position is unknown now" if is_other else ""
    what = f"that {described.place} belongs to the Kafka topic with id {topic_id}"
    return _Deed(f"recorded {what}", f"record {what}", more)


def _claim_range(described: _Described) -> _Deed:
    message = described.message
    more = "; it takes over this unfinished plan" if _planned_range(described) else ""
    what = f"offsets {_offsets(message.start, message.end)} of {described.place}"
    return _Deed(f"claimed {what}", f"claim {what}", more)


def _planned_range(described: _Described) -> bool:
    bounds = (described.message.start, described.message.end)
    return any((each.start, each.end) == bounds and each.phase is Phase.PLANNED for each in described.key.ranges)


def _plan_range(described: _Described) -> _Deed:
    named, end = described.range, described.message.end
    which = f"the range of epoch {described.message.epoch} up to {end}" if named is None else _offsets(named.start, end)
    what = f"{which} of {described.place} as one batch"
    return _Deed(f"planned {what}", f"plan {what}")


def _on_range(did: str, tried: str) -> "Callable[[_Described], _Deed]":
    def deed(described: _Described) -> _Deed:
        return _Deed(f"{did} {described.range_text}", f"{tried} {described.range_text}")

    return deed


def _revoke_range(described: _Described) -> _Deed:
    owner = None if described.range is None else described.range.owner
    what = f"the claim on {described.range_text}"
    return _Deed(f"revoked {what}", f"revoke {what}", "" if owner is None else f", held by {owner_text(owner)}")


def _pause(described: _Described) -> _Deed:
    until_s, group = described.message.expiry_s, f"group {described.message.group}"
    if until_s * 1_000 <= described.at_ms:
        return _Deed(f"resumed {group}", f"resume {group}")
    why = "" if described.reason is None else f", because: {described.reason}"
    end = utc_to_second(until_s)
    length = duration(until_s * 1_000 - described.at_ms)
    if described.is_paused and described.before is not None and described.before.paused_until_s is not None:
        was = utc_to_second(described.before.paused_until_s)
        changed = f"the end of the pause of {group} to {end}"
        return _Deed(f"changed {changed}", f"change {changed}", f" (in {length}); it was {was}{why}")
    return _Deed(f"paused {group} until {end}", f"pause {group} until {end}", f" (for {length}){why}")


def _set_settings(described: _Described) -> _Deed:
    what = f"the settings of group {described.message.group}: {settings_text(described.message.settings)}"
    return _Deed(f"set {what}", f"set {what}")


def _mark(_: _Described) -> _Deed:
    return _Deed("wrote a mark, which only moves log time", "write a mark")


_DEEDS: Final[Mapping[type[Message], Callable[[_Described], _Deed]]] = {
    ClaimingPartition: _claim,
    Heartbeat: _heartbeat,
    ReleasingPartition: _release,
    ClaimingMessages: _plan,
    RevokingClaim: _revoke,
    DataTopic: _name_topic,
    ClaimingRange: _claim_range,
    PlanningRange: _plan_range,
    RangeHeartbeat: _on_range("confirmed its claim of", "confirm its claim of"),
    RangeDone: _on_range("committed", "commit"),
    ReleasingRange: _on_range("released", "release"),
    RevokingRange: _revoke_range,
    ReleaseGroup: _pause,
    GroupSettingsRecord: _set_settings,
    Mark: _mark,
}


def _refusal_text(described: _Described, reason: object) -> str:
    """Return the reason of a refusal, with the part of the state that caused it."""
    detail = _refusal_detail(described, reason)
    return f"{reason} ({detail})" if detail else f"{reason}"


def _refusal_detail(described: _Described, reason: object) -> str | None:
    before, key, message = described.before, described.key, described.message
    if before is None:
        return None
    match reason:
        case Refusal.LIVE_OWNER | Refusal.NOT_OWNER:
            if isinstance(message, RangeMessage):
                named = described.range
                return "no member" if named is None or named.owner is None else owner_text(named.owner)
            return _owner_detail(described, key.owner, key.last_beat_ms)
        case Refusal.NOT_LIVE if not isinstance(message, RangeMessage):
            silent = duration(described.at_ms - key.last_beat_ms)
            allowed = duration(stale_after_ms(before.heartbeat_interval_ms))
            return f"it was silent for {silent}, more than {allowed}"
        case Refusal.PAUSED if before.paused_until_s is not None:
            by = before.paused_by
            return f"until {utc_to_second(before.paused_until_s)}" + ("" if by is None else f", by {origin_text(by)}")
        case Refusal.EMPTY_PLAN | Refusal.BELOW_OFFSET:
            return f"offset {key.offset}"
        case Refusal.OTHER_PLAN if key.plan_end is not None:
            return _offsets(key.offset, key.plan_end)
        case Refusal.OTHER_EPOCH if not isinstance(message, GroupMessage) and key.owner is not None:
            return f"the owner is {owner_text(key.owner)}, epoch {key.owner.epoch}"
        case Refusal.RANGE_TAKEN:
            return ", ".join(f"{_offsets(each.start, each.end)} {each.phase}" for each in _overlapping(described))
    return None


def _overlapping(described: _Described) -> list[Range]:
    message = described.message
    return [each for each in described.key.ranges if each.overlaps(message.start, message.end)]


def _owner_detail(described: _Described, owner: Owner | None, last_beat_ms: int) -> str:
    if owner is None:
        return "no member does"
    return f"{owner_text(owner)}, last heartbeat {duration(described.at_ms - last_beat_ms)} before"


def _note_text(described: _Described, note: RecordNote) -> str:
    key = described.key
    match note:
        case RecordNote.REWIND:
            return f"this is below the position, which stays at {key.offset}"
        case RecordNote.BEYOND_RANGES:
            return f"the position stays at {key.offset}, because the partition has ranges"
        case RecordNote.RELEASED_ELSEWHERE:
            return f"the position stays at {key.offset}"
        case RecordNote.LOWERED:
            return "this lowered the position"
        case RecordNote.DISPLACED:
            return "this displaced " + ("the owner" if key.owner is None else owner_text(key.owner))
        case RecordNote.UNPLANNED:
            return "no plan covered this, as Go consumers do it"
    assert_never(note)


def _offsets(start: int | None, end: int) -> str:
    return f"[{start}, {end})"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("run ") else text
