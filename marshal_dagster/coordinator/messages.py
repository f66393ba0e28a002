"""The messages between members and coordinators: versioned JSON records in the coordinator's topics.

Parsing never raises: a value that is not a valid message is ignored.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from marshal_dagster.coordinator.assignment import DataPartitionId

VERSION: Final = 1
MOST_BYTES: Final = 900_000
"""The largest size of a record. Readers skip larger ones."""
LONGEST_SESSION_MS: Final = 3_600_000
LONGEST_PATTERN: Final = 249
Refusal = Literal[
    "duplicate_id", "session_timeout_too_short", "session_timeout_too_long", "bad_pattern", "unknown_member"
]
ALL: Final = "*"
"""The value of `member` in a ping, which is for all members."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^/\x00-\x1f\x7f]+$")]
NUMBERS_BELOW: Final = 2**62
Number = Annotated[int, Field(ge=0, lt=NUMBERS_BELOW)]
"""The bound leaves room to count up without exceeding a 64-bit integer."""
Topic = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
Places = dict[Topic, list[Annotated[int, Field(ge=0, lt=2**31)]]]
"""The numbers of partitions, by topic."""


class Record(BaseModel):
    """The fields of every record: the group, the member that sends or receives it, and the coordinator's epoch.

    Each new coordinator has a larger `epoch`. Records with an older epoch are ignored.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = VERSION
    group: Name
    member: Name
    epoch: Number


class Register(Record):
    """A member's registration, with the topics that it subscribes to and the partitions that it has.

    Values that a coordinator refuses with a reason are valid here, such as a session timeout of 0.
    """

    kind: Literal["register"] = "register"
    topics: list[Topic] = []
    """The names of topics that the member subscribes to."""
    pattern: str | None = None
    """A pattern of topic names that it subscribes to: `*` matches any characters, `?` one character."""
    capacity: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Its share of the work relative to other members."""
    auto_commit: bool = False
    """Whether the member commits offsets by itself, and reports them in its answers to pings."""
    auto_offset_reset: Literal["smallest", "largest"] = "smallest"
    session_timeout_ms: Number
    """The session timeout in milliseconds."""
    tenure: Name
    """The id of the process. Two processes with the same name have different ids."""
    is_static: bool = False
    """Whether the name is fixed: a process that comes back under it in time gets the partitions that it had."""
    holds: Places = {}
    """The partitions that the member has now. A new coordinator leaves them with it."""


class Pong(Record):
    """A member's answer to a ping, with the next offsets of its partitions if it has `auto_commit`."""

    kind: Literal["pong"] = "pong"
    tenure: Name
    round: Number
    offsets: dict[Topic, dict[int, Number]] | None = None


class Stopped(Record):
    """A member has stopped the requested partitions and committed their offsets."""

    kind: Literal["stopped"] = "stopped"
    tenure: Name
    generation: Number


class Started(Record):
    """A member has started with the share that it was sent."""

    kind: Literal["started"] = "started"
    tenure: Name
    generation: Number


class Leave(Record):
    """A member leaves the group."""

    kind: Literal["leave"] = "leave"
    tenure: Name


class Ping(Record):
    """A ping, which all members of a group must answer; `member` is `*`.

    `retry` is the number of earlier rounds that still lack the answer of some member.
    """

    kind: Literal["ping"] = "ping"
    round: Number
    retry: Number = 0


class Registered(Record):
    """The answer to a registration: `error` is why it was refused, or None."""

    kind: Literal["registered"] = "registered"
    tenure: Name
    error: Refusal | None = None


class StopFetcher(Record):
    """A request to a member to stop processing these partitions, and to report when it has stopped."""

    kind: Literal["stop"] = "stop"
    tenure: Name
    generation: Number
    places: Places


class StartFetcher(Record):
    """The share of a member: all partitions that it must process.

    Compaction keeps the last one of each member, which is the assignment. A new coordinator waits `session_timeout_ms`
    for the member to register again. `gained` are the partitions in `places` that the member did not have before.
    """

    kind: Literal["start"] = "start"
    tenure: Name
    generation: Number
    places: Places
    session_timeout_ms: Annotated[int, Field(ge=0, le=LONGEST_SESSION_MS)] = 0
    gained: Places = {}


MemberMessage = Register | Pong | Stopped | Started | Leave
"""A message that a member writes."""

CoordinatorMessage = Ping | Registered | StopFetcher | StartFetcher
"""A message that a coordinator writes."""

_MEMBER_MESSAGES: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[MemberMessage, Field(discriminator="kind")])
_COORDINATOR_MESSAGES: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[CoordinatorMessage, Field(discriminator="kind")])


def render(record: MemberMessage | CoordinatorMessage) -> bytes:
    """Return the bytes of a record in its topic."""
    return record.model_dump_json(exclude_defaults=False).encode()


def parse_member_message(value: bytes | None) -> MemberMessage | None:
    """Parse a member's message; return None if the value is not one."""
    found: MemberMessage | None = _parsed(_MEMBER_MESSAGES, value)
    return found


def parse_coordinator_message(value: bytes | None) -> CoordinatorMessage | None:
    """Parse a coordinator's message; return None if the value is not one."""
    found: CoordinatorMessage | None = _parsed(_COORDINATOR_MESSAGES, value)
    return found


def places_of(places: Places) -> frozenset[DataPartitionId]:
    """Return the partitions of a record as a set."""
    return frozenset((topic, number) for topic, numbers in places.items() for number in numbers)


def by_topic(places: Iterable[DataPartitionId]) -> Places:
    """Return a set of partitions in the form that records have."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for topic, number in sorted(places):
        found[topic].append(number)
    return dict(found)


def _parsed(adapter: TypeAdapter[Any], value: bytes | None) -> Any:  # noqa: ANN401 - one of the adapter's
    if value is None or len(value) > MOST_BYTES:
        return None
    try:
        return adapter.validate_json(value)
    except (ValidationError, ValueError, RecursionError):
        return None
