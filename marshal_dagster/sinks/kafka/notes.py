"""The notes of a Kafka output: records that a transaction of the sink writes besides its output.

A `PositionNote` stores the position of a partition and the offsets of which the output may have records. A
`GroupsNote` stores which groups write to the output. `kafka.sink` writes and reads both.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredPosition
from marshal_dagster.sinks.sink import fewest_intervals, newer_version, position_after

T = TypeVar("T")

VERSION: Final = 1
"""The newest version of a note that this code reads and writes; newer ones are refused."""
_MOST_INTERVALS: Final = 50
_DAMAGE: Final = (ValueError, KeyError, TypeError, RecursionError)
"""The errors that parsing a text that is not a note can raise."""
_POSITION_FIELDS: Final = ("coordination_topic_id", "data_topic_id", "generation", "epoch", "position")


@dataclass(frozen=True, slots=True)
class GroupsNote:
    """The groups that write ranges of a data topic; each is added before its first range."""

    groups: tuple[str, ...]

    def to_json(self) -> bytes:
        """Return the note as JSON."""
        return json.dumps({"version": VERSION, "groups": self.groups}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes, where: str) -> "GroupsNote":
        """Parse a note. Raises `SinkRejectedError` for a newer version and for damaged text."""
        return _read(cls._parse, text, where)

    @classmethod
    def is_note(cls, text: bytes | None) -> bool:
        """Return whether `text` is a note, possibly of a newer version."""
        return _is_read(cls._parse, text)

    @classmethod
    def _parse(cls, text: bytes) -> "GroupsNote | int":
        """Parse a note, or return its version if that is newer. Raises one of `_DAMAGE` for any other text."""
        fields: dict[str, Any] = json.loads(text)
        version = _known_version(fields)
        return cls(tuple(_typed(str, group) for group in fields["groups"])) if version == VERSION else version


@dataclass(frozen=True, slots=True)
class PositionNote:
    """The state of a partition after its newest transaction."""

    output_topic_id: str
    position: StoredPosition
    covered: tuple[tuple[int, int], ...]
    """The offsets of the data topic of which the output topic may have records, as intervals [start, end).

    If there are more than 50 intervals, the nearest ones are merged, so some offsets between them are included.
    """
    attempt: str
    """A random id of the write, by which the writer recognises its own note."""

    def to_json(self) -> bytes:
        """Return the note as JSON."""
        document = {
            "version": VERSION,
            "output_topic_id": self.output_topic_id,
            **{name: getattr(self.position, name) for name in _POSITION_FIELDS},
            "covered": self.covered,
            "attempt": self.attempt,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes, where: str) -> "PositionNote":
        """Parse a note. Raises `SinkRejectedError` for a newer version and for damaged text."""
        return _read(cls._parse, text, where)

    @classmethod
    def is_note(cls, text: bytes | None) -> bool:
        """Return whether `text` is a note, possibly of a newer version."""
        return _is_read(cls._parse, text)

    @classmethod
    def _parse(cls, text: bytes) -> "PositionNote | int":
        """Parse a note, or return its version if that is newer. Raises one of `_DAMAGE` for any other text."""
        fields: dict[str, Any] = json.loads(text)
        if (version := _known_version(fields)) != VERSION:
            return version
        covered = tuple((_typed(int, start), _typed(int, end)) for start, end in fields["covered"])
        position = StoredPosition(
            _typed(str, fields["coordination_topic_id"]),
            _typed(str, fields["data_topic_id"]),
            _typed(int, fields["generation"]),
            _typed(int, fields["epoch"]),
            _typed(int, fields["position"]),
        )
        return cls(_typed(str, fields["output_topic_id"]), position, covered, _typed(str, fields["attempt"]))

    @classmethod
    def after(
        cls,
        before: "PositionNote | None",
        taken: ClaimedRange,
        output_topic_id: str,
        *,
        has_rows: bool,
        attempt: str | None = None,
    ) -> "PositionNote":
        """Return the note to be written with a range that follows the note `before`; `attempt` is random by default."""
        covered: tuple[tuple[int, int], ...] = ()
        if before is not None and before.is_of(taken, output_topic_id):
            covered = before.covered
        if has_rows and taken.first_readable < taken.end:
            covered = fewest_intervals([*covered, (taken.first_readable, taken.end)], _MOST_INTERVALS)
        return cls(output_topic_id, position_after(taken), covered, attempt or new_attempt())

    def is_of(self, wanted: ClaimedRange, output_topic_id: str) -> bool:
        """Return whether `covered` refers to the data topic of `wanted` and to the current output topic."""
        return self.position.data_topic_id == wanted.data_topic_id and self.output_topic_id == output_topic_id

    def covers(self, wanted: ClaimedRange, output_topic_id: str) -> bool:
        """Return whether the output may have records of offsets that `wanted` can read."""
        return self.is_of(wanted, output_topic_id) and any(
            start < wanted.end and end > wanted.first_readable for start, end in self.covered
        )


def new_attempt() -> str:
    """Return the random id of a write."""
    return secrets.token_hex(16)


def _read(parse: Callable[[bytes], T | int], text: bytes, where: str) -> T:
    """Return the note in `text`. Raises `SinkRejectedError` for a newer version and for damaged text."""
    try:
        found = parse(text)
    except _DAMAGE as error:
        raise SinkRejectedError(
            f"{where} is damaged ({error!r}), so nothing was written. Another program writes to that topic: stop it, "
            "and restore the note or start a new output"
        ) from None
    if isinstance(found, int):
        raise newer_version(where, found, VERSION)
    return found


def _is_read(parse: Callable[[bytes], object], text: bytes | None) -> bool:
    try:
        parse(text or b"")
    except _DAMAGE:
        return False
    return True


def _known_version(fields: Mapping[str, Any]) -> int:
    """Return a note's version. Raises `ValueError` for a version that never existed."""
    version = _typed(int, fields["version"])
    if version < VERSION:
        raise ValueError(f"version {version}")
    return version


def _typed(kind: type[T], value: object) -> T:
    """Return `value` if it has exactly the type `kind`, so `true` is not an integer. Raises `TypeError` otherwise."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.100} is not of type {kind.__name__}")
    return value
