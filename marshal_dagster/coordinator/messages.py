"""What members and a coordinator write to each other: records of JSON, versioned, and read without ever raising."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from marshal_dagster.coordinator.assignment import Place

VERSION: Final = 1
MOST_BYTES: Final = 900_000
"""Of a record; a longer one is passed over."""
LONGEST_SESSION_MS: Final = 3_600_000
LONGEST_PATTERN: Final = 249
Refusal = Literal[
    "duplicate_id", "session_timeout_too_short", "session_timeout_too_long", "bad_pattern", "unknown_member"
]
ALL: Final = "*"
"""Whom a ping is for."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^/\x00-\x1f\x7f]+$")]
NUMBERS_BELOW: Final = 2**62
Number = Annotated[int, Field(ge=0, lt=NUMBERS_BELOW)]
"""Far from where counting on would lead out of what a record can carry."""
Topic = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
Places = dict[Topic, list[Annotated[int, Field(ge=0, lt=2**31)]]]
"""Partitions by topic."""


class Record(BaseModel):
    """Fields that each record has: who is meant or speaks, in which group, under which coordinator.

    `epoch` grows with each coordinator; what is of an older one counts for nothing.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = VERSION
    group: Name
    member: Name
    epoch: Number


class Register(Record):
    """A member wants work; it also says what it has, which a new coordinator leaves with it.

    What a coordinator refuses with a reason may stand in it, such as a session time-out of 0.

    `topics` are names; in `pattern` a `*` stands for any letters and a `?` for one. `is_static`: a member of this name
    that comes back within the session time-out takes its own place again.
    """

    kind: Literal["register"] = "register"
    topics: list[Topic] = []
    pattern: str | None = None
    capacity: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    auto_commit: bool = False
    auto_offset_reset: Literal["smallest", "largest"] = "smallest"
    session_timeout_ms: Number
    tenure: Name
    """What tells two processes of one name apart."""
    is_static: bool = False
    holds: Places = {}


class Pong(Record):
    """An answer to a ping; with offsets where the member commits by itself."""

    kind: Literal["pong"] = "pong"
    tenure: Name
    round: Number
    offsets: dict[Topic, dict[int, Number]] | None = None


class Stopped(Record):
    """A member has stopped what it was told to, and committed how far it got."""

    kind: Literal["stopped"] = "stopped"
    tenure: Name
    generation: Number


class Started(Record):
    """A member works on what it was told to."""

    kind: Literal["started"] = "started"
    tenure: Name
    generation: Number


class Leave(Record):
    """A member goes, of its own will."""

    kind: Literal["leave"] = "leave"
    tenure: Name


class Ping(Record):
    """Asks all members of a group whether they live; `member` is `*`, `retry` counts rounds not answered by some."""

    kind: Literal["ping"] = "ping"
    round: Number
    retry: Number = 0


class Registered(Record):
    """Answers a registration: `error` is None, or why not."""

    kind: Literal["registered"] = "registered"
    tenure: Name
    error: Refusal | None = None


class StopFetcher(Record):
    """Tells a member to stop working on these partitions, and to say so."""

    kind: Literal["stop"] = "stop"
    tenure: Name
    generation: Number
    places: Places


class StartFetcher(Record):
    """Tells a member what it is to work on, all of it. The last one of each member is kept, and is the assignment.

    It also keeps the member's session time-out, for how long a coordinator that takes over waits for it. `gained` is
    what of `places` was another's, or nobody's, before this was told first.
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

_WORDS: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[MemberMessage, Field(discriminator="kind")])
_ORDERS: Final[TypeAdapter[Any]] = TypeAdapter(Annotated[CoordinatorMessage, Field(discriminator="kind")])


def render(record: MemberMessage | CoordinatorMessage) -> bytes:
    """Write a record."""
    return record.model_dump_json(exclude_defaults=False).encode()


def parse_member_message(value: bytes | None) -> MemberMessage | None:
    """Read what a member wrote; None for anything else."""
    found: MemberMessage | None = _parsed(_WORDS, value)
    return found


def parse_coordinator_message(value: bytes | None) -> CoordinatorMessage | None:
    """Read what a coordinator wrote; None for anything else."""
    found: CoordinatorMessage | None = _parsed(_ORDERS, value)
    return found


def places_of(places: Places) -> frozenset[Place]:
    """Give partitions as a set."""
    return frozenset((topic, number) for topic, numbers in places.items() for number in numbers)


def by_topic(places: Iterable[Place]) -> Places:
    """Give partitions as they are written."""
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
