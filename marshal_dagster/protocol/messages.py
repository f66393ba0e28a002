"""Parse and render the records of the coordination log (protocol.md, section 1).

The value of a record is text. Its fields are joined with `/`:

    Type/version/time/instance/client/group/topic/partition[/tail]

`parse` never raises: it returns an `InvalidMessage` with the reason for a value that is not valid. `render` is its
inverse, byte for byte. The module also defines the settings of a group, because a record carries them.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from hashlib import md5
from typing import Any, Final, TypeVar, cast, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record_type(cls: type[T]) -> type[T]:
    """Make `cls` a dataclass with keyword-only fields that type checkers treat as frozen.

    It is not frozen at run time, because a frozen object takes three times as long to create, and a claim of many
    partitions creates thousands. All types share the methods of `Message`, because to generate them for each type takes
    a new process some milliseconds.
    """
    return dataclass(slots=True, kw_only=True, eq=False, repr=False)(cls)


MAX_VALUE_BYTES: Final = 2_048
MAX_NAME_LENGTH: Final = 255
INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
GO_HEARTBEAT_INTERVAL_MS: Final = 60_000
TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
TOPIC_ID: Final = re.compile(r"[A-Za-z0-9_-]{22}")
FEATURE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")
_NOT_IN_NAMES: Final = frozenset({"Cc", "Cs"})
"""Unicode's general categories of control characters and surrogates."""


class RuleSet(StrEnum):
    """The rules by which the records of a group are judged (protocol.md, sections 4 and 7)."""

    NATIVE = "native"
    """The rules of this library: records of a member that lost its claim are refused."""
    GO = "go"
    """The rules of the Go library, for groups that Go consumers share; the heartbeat interval is 60 s."""


class DeliveryMode(StrEnum):
    """The guarantee of a group for each message (protocol.md, section 6)."""

    AT_MOST_ONCE = "at_most_once"
    """Commit before processing. If the run crashes, the rest of the batch is not processed."""
    AT_LEAST_ONCE = "at_least_once"
    """Commit after processing. If the run crashes, another run repeats the whole batch."""
    EFFECTIVELY_ONCE = "effectively_once"
    """Commit after processing, into a sink that takes each range of offsets once."""


RULE_SETS: Final = frozenset(RuleSet)
DELIVERY_MODES: Final = frozenset(DeliveryMode)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings that all members of a group share (protocol.md, section 3.2).

    The first member of a group writes them to the coordination log. A member with other settings does not claim.

    Example:
        ```python
        GroupSettings(10_000, delivery=DeliveryMode.EFFECTIVELY_ONCE)
        ```
    """

    heartbeat_interval_ms: int = 60_000
    """The heartbeat interval HI in milliseconds. An owner without a heartbeat for 2 HI is stale."""
    rule_set: RuleSet = RuleSet.NATIVE
    """The rules by which the group's records are judged."""
    delivery: DeliveryMode = DeliveryMode.AT_LEAST_ONCE
    """The guarantee for each message."""
    features: tuple[str, ...] = ()
    """Features that every member must know; `ranges` is the only one (protocol.md, section 8)."""


DEFAULT_SETTINGS: Final = GroupSettings(10_000)
"""The settings of a member whose user configures none."""
WITHOUT_SETTINGS: Final = GroupSettings(GO_HEARTBEAT_INTERVAL_MS, RuleSet.GO)
"""The settings in force until a `GroupSettings` record is accepted: the group's members are Go consumers.

See protocol.md, section 3.2.
"""


@record_type
class Message:
    """The fields of every record. `time_s` is the sender's clock in unix seconds; no rule uses it."""

    instance: str
    client: str
    group: str
    topic: str
    partition: int
    time_s: int
    version: int = 1

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same type and equal fields."""
        if type(other) is not type(self):
            return NotImplemented
        return _values(self) == _values(other)

    def __hash__(self) -> int:
        """Return a hash of the fields."""
        return hash(_values(self))

    def __repr__(self) -> str:
        """Return the type and all fields."""
        shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{type(self).__name__}({shown})"


def _values(message: Message) -> tuple[object, ...]:
    """Return the fields of a message."""
    return tuple(getattr(message, field.name) for field in fields(message))


@record_type
class ClaimingPartition(Message):
    """A request for the partition."""


@record_type
class Heartbeat(Message):
    """A sign that the owner is alive; everything before `offset` is done."""

    offset: int


@record_type
class ReleasingPartition(Message):
    """The release of the partition, which is at `offset`; the pausing instance sets the position with it."""

    offset: int


@record_type
class ClaimingMessages(Message):
    """A plan: the messages up to `plan_end` (exclusive) are one batch."""

    plan_end: int


@record_type
class RevokingClaim(Message):
    """The revocation of the claim with this epoch."""

    epoch: int


@record_type
class DataTopic(Message):
    """The id of the incarnation of the data topic to which the key's offset belongs."""

    topic_id: str


@record_type
class ClaimingRange(Message):
    """A request for the offsets from `start` to `end` (exclusive)."""

    start: int
    end: int


@record_type
class RangeMessage(Message):
    """A record about the range that the record at log offset `epoch` won."""

    epoch: int


@record_type
class PlanningRange(RangeMessage):
    """A plan: the range up to `end` (exclusive) is one batch."""

    end: int


@record_type
class RangeHeartbeat(RangeMessage):
    """A sign that the owner of the range is alive."""


@record_type
class RangeDone(RangeMessage):
    """The commit of a planned range: it is done."""


@record_type
class ReleasingRange(RangeMessage):
    """The release of the range."""


@record_type
class RevokingRange(RangeMessage):
    """The revocation of the range."""


@record_type
class GroupMessage(Message):
    """A record that concerns a whole group, or no group: its topic is empty and its partition is 0."""

    topic: str = ""
    partition: int = 0


@record_type
class ReleaseGroup(GroupMessage):
    """A pause of the group until `expiry_s` (unix seconds); if that time has passed, the group resumes."""

    expiry_s: int
    version: int = 0


@record_type
class GroupSettingsRecord(GroupMessage):
    """The settings of the group."""

    settings: GroupSettings


@record_type
class Mark(GroupMessage):
    """A record that moves log time and does nothing else."""


GROUP_MESSAGES: Final[frozenset[type[Message]]] = frozenset({ReleaseGroup, GroupSettingsRecord, Mark})
"""The types of records that concern a whole group, or no group."""


class Invalid(StrEnum):
    """Why a value is not a valid message. Snapshots store these texts as keys of their counts."""

    NO_VALUE = "no value"
    TOO_LONG = "longer than 2048 bytes"
    NOT_UTF8 = "not UTF-8"
    UNKNOWN_TYPE = "unknown type"
    FIELD_COUNT = "wrong number of fields"
    NUMBER = "a number is malformed or out of range"
    NAME = "instance, client or group is empty, too long or has control characters"
    TOPIC = "malformed topic"
    NOT_GROUP_WIDE = "a record about a group has a topic or a partition"
    TAIL = "malformed tail"
    MISPLACED = "not in the coordination partition of its topic"


@dataclass(frozen=True, slots=True)
class InvalidMessage:
    """A value that is not valid: every reader counts and skips it."""

    reason: Invalid


class InvalidError(Exception):
    """A value, or a text in it, is not valid; `parse` returns the reason as an `InvalidMessage`."""

    def __init__(self, reason: Invalid) -> None:
        self.reason = reason


def _number(text: str, most: int = INT64_MAX) -> int:
    if NUMBER.fullmatch(text) is None or (value := int(text)) > most:
        raise InvalidError(Invalid.NUMBER)
    return value


_repeated_number = lru_cache(maxsize=4_096)(_number)
"""Parses numbers that many records share."""


NO_NAME: Final = "cannot be a name: use 1 to 255 characters, no '/' and no control characters"
"""How an error continues after a text for which `is_name` is false."""


def is_name(text: str) -> bool:
    """Return whether `text` may be an instance, client or group: 1 to 255 code points, no `/`, no control character.

    A lone surrogate is not allowed either. No UTF-8 text has one, but a command argument or a JSON text may.
    """
    if not 0 < len(text) <= MAX_NAME_LENGTH or "/" in text:
        return False
    return (text.isascii() and text.isprintable()) or not any(unicodedata.category(c) in _NOT_IN_NAMES for c in text)


def is_topic(text: str) -> bool:
    """Return whether Kafka allows `text` as the name of a topic."""
    return TOPIC.fullmatch(text) is not None and text not in {".", ".."}


# Texts that many records share. Equal texts are the same object, so that the state has each of them in memory once.


@lru_cache(maxsize=4_096)
def shared_name(text: str) -> str:
    """Return `text`, or an equal text from before, if it `is_name`; raise `InvalidError` if not."""
    if not is_name(text):
        raise InvalidError(Invalid.NAME)
    return text


@lru_cache(maxsize=4_096)
def shared_topic(text: str) -> str:
    """Return `text`, or an equal text from before, if it `is_topic`; raise `InvalidError` if not."""
    if not is_topic(text):
        raise InvalidError(Invalid.TOPIC)
    return text


@lru_cache(maxsize=4_096)
def shared_topic_id(text: str) -> str:
    """Return `text`, or an equal text from before, if it is the id of a topic; raise `InvalidError` if not."""
    if TOPIC_ID.fullmatch(text) is None:
        raise InvalidError(Invalid.TAIL)
    return text


def _read_settings(tail: list[str]) -> GroupSettings:
    interval, rule_set, delivery, features = tail
    names = () if features == "-" else tuple(features.split(","))
    interval_ms = _number(interval)
    well_formed = (
        interval_ms >= 1
        and rule_set in RULE_SETS
        and delivery in DELIVERY_MODES
        and all(FEATURE.fullmatch(name) for name in names)
        and len(set(names)) == len(names)
        and (rule_set != RuleSet.GO or interval_ms == GO_HEARTBEAT_INTERVAL_MS)
    )
    if not well_formed:
        raise InvalidError(Invalid.TAIL)
    return GroupSettings(interval_ms, RuleSet(rule_set), DeliveryMode(delivery), names)


def _write_settings(settings: GroupSettings) -> str:
    features = ",".join(settings.features) or "-"
    tail = f"{settings.heartbeat_interval_ms}/{settings.rule_set}/{settings.delivery}/{features}"
    if _read_settings(tail.split("/")) != settings:
        raise ValueError(settings)
    return f"/{tail}"


def settings_text(settings: GroupSettings) -> str:
    """Return settings as the tail of a `GroupSettings` record.

    Raises:
        ValueError: no record can carry these settings.
    """
    try:
        return _write_settings(settings)[1:]
    except InvalidError:
        raise ValueError(
            f"no group can have these settings: {settings}; see protocol.md, section 1.3, for valid values"
        ) from None


def settings_of(text: str) -> GroupSettings:
    """Parse the text that `settings_text` returns.

    Raises:
        ValueError: `text` is not the tail of a `GroupSettings` record.
    """
    tail = text.split("/")
    try:
        if len(tail) == _SETTINGS_FIELDS:
            return _read_settings(tail)
    except InvalidError:
        pass
    raise ValueError(
        f"not the settings of a group: {text[:MAX_NAME_LENGTH]!r}; expected HI in ms/rule set/delivery mode/features"
    )


_SETTINGS_FIELDS: Final = 4


def _read_topic_id(tail: list[str]) -> str:
    return shared_topic_id(tail[0])


def _write_topic_id(topic_id: str) -> str:
    return f"/{_read_topic_id([topic_id])}"


def _read_offset(tail: list[str]) -> int:
    return _number(tail[0])


def _write_offset(offset: int) -> str:
    if not 0 <= offset <= INT64_MAX:
        raise ValueError(offset)
    return f"/{offset}"


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a record type: which fields its tail fills, and how the tail is parsed and rendered.

    `parts` is the number of parts of the tail. If it fills two fields, the last part is a number and fills `second`.
    """

    name: str
    type: type[Message]
    field: str | None = None
    parts: int = 0
    read: Callable[[list[str]], object] = _read_offset
    write: Callable[[Any], str] = _write_offset
    second: str | None = None

    def message(self, tail: list[str]) -> Message:
        """Create a message that has only the fields that the tail fills; the caller sets all others.

        A call of the type with all fields by name would take three times as long.
        """
        message = object.__new__(self.type)
        if self.field is not None:
            setattr(message, self.field, self.read(tail))
        if self.second is not None:
            setattr(message, self.second, _number(tail[-1]))
        return message

    def tail(self, message: Message) -> str:
        """Return the tail of `message` with the slash before it."""
        if self.field is None:
            return ""
        first = self.write(getattr(message, self.field))
        return first if self.second is None else first + _write_offset(getattr(message, self.second))


FORMS: Final = {
    form.name: form
    for form in (
        _Form("ClaimingPartition", ClaimingPartition),
        _Form("Heartbeat", Heartbeat, "offset", 1),
        _Form("ReleasingPartition", ReleasingPartition, "offset", 1),
        _Form("ClaimingMessages", ClaimingMessages, "plan_end", 1),
        _Form("ReleaseGroup", ReleaseGroup, "expiry_s", 1),
        _Form("RevokingClaim", RevokingClaim, "epoch", 1),
        _Form("GroupSettings", GroupSettingsRecord, "settings", _SETTINGS_FIELDS, _read_settings, _write_settings),
        _Form("DataTopic", DataTopic, "topic_id", 1, _read_topic_id, _write_topic_id),
        _Form("Mark", Mark),
        _Form("ClaimingRange", ClaimingRange, "start", 2, second="end"),
        _Form("PlanningRange", PlanningRange, "epoch", 2, second="end"),
        _Form("RangeHeartbeat", RangeHeartbeat, "epoch", 1),
        _Form("RangeDone", RangeDone, "epoch", 1),
        _Form("ReleasingRange", ReleasingRange, "epoch", 1),
        _Form("RevokingRange", RevokingRange, "epoch", 1),
    )
}
_FORM_OF: Final = {form.type: form for form in FORMS.values()}


def type_name(message: Message) -> str:
    """Return the name of the record type of `message`, the first field of its value."""
    return _FORM_OF[type(message)].name


_HEAD_FIELDS: Final = 8


def parse(value: bytes | None) -> Message | InvalidMessage:
    """Parse the value of a record. Never raises.

    The caller checks whether the record lies in the coordination partition of its topic.
    """
    try:
        return _parse(value)
    except InvalidError as invalid:
        return InvalidMessage(invalid.reason)


def _parse(value: bytes | None) -> Message:
    if value is None:
        raise InvalidError(Invalid.NO_VALUE)
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidError(Invalid.TOO_LONG)
    try:
        fields = value.decode().split("/")
    except UnicodeDecodeError:
        raise InvalidError(Invalid.NOT_UTF8) from None
    form = FORMS.get(fields[0])
    if form is None:
        raise InvalidError(Invalid.UNKNOWN_TYPE)
    if len(fields) != _HEAD_FIELDS + form.parts:
        raise InvalidError(Invalid.FIELD_COUNT)
    _, version, time_s, instance, client, group, topic, partition, *tail = fields
    instance, client, group = shared_name(instance), shared_name(client), shared_name(group)
    place = _repeated_number(partition, INT32_MAX)
    if form.type not in GROUP_MESSAGES:
        topic = shared_topic(topic)
    elif topic or place:
        raise InvalidError(Invalid.NOT_GROUP_WIDE)
    sent_s, version_number = _repeated_number(time_s), _repeated_number(version)
    message: Any = form.message(tail)
    message.instance, message.client, message.group = instance, client, group
    message.topic, message.partition = topic, place
    message.time_s, message.version = sent_s, version_number
    return cast("Message", message)


def render(message: Message) -> bytes:
    """Return `message` as the value of a record; `parse` returns an equal message for it.

    Raises:
        ValueError: the message is not valid as a record. So no name can inject a field, and no member appends an
            invalid record.
    """
    kind, partition = type(message), message.partition
    form = _FORM_OF[kind]
    try:
        head = _head(
            form.name, message.version, message.time_s, message.instance, message.client, message.group, message.topic
        )
        tail = form.tail(message)
    except (InvalidError, ValueError):
        raise ValueError(f"no valid record can carry this message: {message}") from None
    value = f"{head}{partition}{tail}".encode()
    if not 0 <= partition <= (0 if kind in GROUP_MESSAGES else INT32_MAX) or len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"no valid record can carry this message: {message}")
    return value


@lru_cache(maxsize=1_024)
def _head(  # noqa: PLR0917 - the fields of a record, in their order
    kind: str, version: int, time_s: int, instance: str, client: str, group: str, topic: str
) -> str:
    """Return the fields before the partition. They are equal in all records that a member sends within one second."""
    numbers = 0 <= version <= INT64_MAX and 0 <= time_s <= INT64_MAX
    names = is_name(instance) and is_name(client) and is_name(group)
    place = not topic if FORMS[kind].type in GROUP_MESSAGES else is_topic(topic)
    if not (numbers and names and place):
        raise ValueError(kind)
    return f"{kind}/{version}/{time_s}/{instance}/{client}/{group}/{topic}/"


@lru_cache(maxsize=65_536)
def coordination_partition(topic: str, coordination_partitions: int) -> int:
    """Return the coordination partition that holds all records of `topic` (protocol.md, section 1.5).

    It is the first 8 bytes of md5(topic), read as a little-endian unsigned integer, modulo the partition count.
    """
    digest = md5(topic.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") % coordination_partitions
