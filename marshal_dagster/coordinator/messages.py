"""The messages of members and coordinators: versioned records of JSON; reading them never raises."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from marshal_dagster.coordinator.assignment import DataPartitionId

VERSION: Final = 1
MOST_BYTES: Final = 900_000
"""Of a record; a longer one is skipped."""
LONGEST_SESSION_MS: Final = 3_600_000
LONGEST_PATTERN: Final = 249
Refusal = Literal[
    "duplicate_id", "session_timeout_too_short", "session_timeout_too_long", "bad_pattern", "unknown_member"
]
ALL: Final = "*"
"""The member that a ping is for: all."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^/\x00-\x1f\x7f]+$")]
NUMBERS_BELOW: Final = 2**62
Number = Annotated[int, Field(ge=0, lt=NUMBERS_BELOW)]
"""So small that counting on never exceeds what a record can carry."""
Topic = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
Places = dict[Topic, list[Annotated[int, Field(ge=0, lt=2**31)]]]
"""Partitions by topic."""


class Record(BaseModel):
    """The fields of each record: the member that sends or receives it, its group, and its coordinator's epoch.

    `epoch` grows with each coordinator; records of an older one do not count.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = VERSION
    group: Name
    member: Name
    epoch: Number


class Register(Record):
    """A member wants work. It also reports what it has, which a new coordinator leaves with it.

    Values that a coordinator refuses with a reason are valid here, such as a session time-out of 0.

    `topics` are names; in `pattern` a `*` matches any letters and a `?` one. `is_static`: a member of this name that
    comes back within the session time-out has the partitions that it had.
    """

    kind: Literal["register"] = "register"
    topics: list[Topic] = []
    pattern: str | None = None
    capacity: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    auto_commit: bool = False
    auto_offset_reset: Literal["smallest", "largest"] = "smallest"
    session_timeout_ms: Number
    tenure: Name
    """The id of the process: two processes of one name have different ones."""
    is_static: bool = False
    holds: Places = {}


class Pong(Record):
    """An answer to a ping; with offsets if the member commits by itself."""

    kind: Literal["pong"] = "pong"
    tenure: Name
    round: Number
    offsets: dict[Topic, dict[int, Number]] | None = None


class Stopped(Record):
    """A member has stopped as requested, and committed how far it got."""

    kind: Literal["stopped"] = "stopped"
    tenure: Name
    generation: Number


class Started(Record):
    """A member works on what it was sent."""

    kind: Literal["started"] = "started"
    tenure: Name
    generation: Number


class Leave(Record):
    """A member leaves."""

    kind: Literal["leave"] = "leave"
    tenure: Name


class Ping(Record):
    """Asks all members of a group for an answer; `member` is `*`, `retry` counts rounds that some did not answer."""

    kind: Literal["ping"] = "ping"
    round: Number
    retry: Number = 0


class Registered(Record):
    """Answers a registration: `error` is None, or why not."""

    kind: Literal["registered"] = "registered"
    tenure: Name
    error: Refusal | None = None


class StopFetcher(Record):
    """Asks a member to stop working on these partitions, and to report that."""

    kind: Literal["stop"] = "stop"
    tenure: Name
    generation: Number
    places: Places


class StartFetcher(Record):
    """Sends a member all that it is to work on. The last one of each member is kept, and is the assignment.

    A coordinator that takes over waits for the member as long as `session_timeout_ms`. `gained` is the part of `places`
    that the member did not have before.
    """

    kind: Literal["start"] = "start"
    tenure: Name
    generation: Number
    places: Places
    session_timeout_ms: Annotated[int, Field(ge=0, le=LONGEST_SESSION_MS)] = 0
    gained: Places = {}


MemberMessage = Register | Pong | Stopped | Started | Leave
"""What members write."""

CoordinatorMessage = Ping | Registered | StopFetcher | StartFetcher
"""What coordinators write."""

_MEMBER_MESSAGES: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[MemberMessage, Field(discriminator="kind")])
_COORDINATOR_MESSAGES: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[CoordinatorMessage, Field(discriminator="kind")])


def render(record: MemberMessage | CoordinatorMessage) -> bytes:
    """Return a record as it is written."""
    return record.model_dump_json(exclude_defaults=False).encode()


def parse_member_message(value: bytes | None) -> MemberMessage | None:
    """Read a member's message; return None for anything else."""
    found: MemberMessage | None = _parsed(_MEMBER_MESSAGES, value)
    return found


def parse_coordinator_message(value: bytes | None) -> CoordinatorMessage | None:
    """Read a coordinator's message; return None for anything else."""
    found: CoordinatorMessage | None = _parsed(_COORDINATOR_MESSAGES, value)
    return found


def places_of(places: Places) -> frozenset[DataPartitionId]:
    """Return partitions as a set."""
    return frozenset((topic, number) for topic, numbers in places.items() for number in numbers)


def by_topic(places: Iterable[DataPartitionId]) -> Places:
    """Return partitions as they are written."""
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
