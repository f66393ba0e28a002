"""A group's first positions, taken from where its work was done before: a consumer group, or a Spark checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.admin.position_spec import LogEnd, ToOffsets, choose_partitions
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.coordination.claimer import assume_alive
from marshal_dagster.errors import ConfigurationError, PositionNotSetError
from marshal_dagster.protocol.state import Owner
from marshal_dagster.spark.checkpoints import read_checkpoint

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics


@dataclass(frozen=True, slots=True)
class PositionSource:
    """Where offsets are taken from: its `name` in words, the next offset to read by partition, and what to know of it.

    `others` is where its own reader would begin in other partitions; None where that is not known. `is_at_work`: it
    reads on, so that its offsets will soon be old.
    """

    name: str
    offsets: Mapping[int, int]
    others: LogEnd | None = None
    notes: tuple[str, ...] = ()
    is_at_work: bool = False

    def require_at_rest(self) -> None:
        """Raise `ConfigurationError` for one that is seen at work: what it does from now on would be done twice."""
        if self.is_at_work:
            raise ConfigurationError(f"{self.name} is at work: stop its consumers first; nothing was written")


def consumer_group(topics: "Topics", group: str, topic: str) -> PositionSource:
    """Take what Kafka holds as the committed offsets of a consumer group.

    Raises `ConfigurationError` where it holds none; `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`.
    """
    is_at_work = topics.has_consumers(group)
    offsets = topics.group_offsets(group, topic)
    if not offsets:
        raise ConfigurationError(f"Kafka holds no offsets of a consumer group {group!r} in topic {topic!r}")
    name = f"consumer group {group!r}"
    notes = (f"{name} has consumers at work: these offsets will soon be old",) if is_at_work else ()
    return PositionSource(name, offsets, notes=notes, is_at_work=is_at_work)


def checkpoint(folder: Path, topic: str) -> PositionSource:
    """Take the end of the newest committed batch in a checkpoint of Structured Streaming. Raises `ConfigurationError`.

    Whether its query is still at work cannot be seen.
    """
    found = read_checkpoint(folder)
    notes = [f"the newest committed batch of {folder} is {found.batch}: make sure that its query is stopped"]
    if found.begun is not None:
        notes.append(
            f"batch {found.begun} was begun and not committed: what it has written already will be written again"
        )
    return PositionSource(f"checkpoint {folder}", found.offsets(topic), LogEnd.EARLIEST, tuple(notes))


@dataclass(frozen=True, slots=True)
class PositionSourceOptions:
    """A source as a person gives it, one of both; and where partitions begin of which it has no offset."""

    consumer_group: str | None = None
    checkpoint: str | None = None
    others: str | None = None

    @property
    def is_one(self) -> bool:
        """Whether one source is given."""
        return (self.consumer_group is None) != (self.checkpoint is None)

    def begin_at(self, prefix: str = "") -> LogEnd | None:
        """Read where other partitions begin; `prefix` is what a person writes before the names.

        Raises `ConfigurationError` for that, and unless one source is given.
        """
        if not self.is_one:
            raise ConfigurationError("give one of the two: a consumer group or a checkpoint")
        return None if self.others is None else enum_member(LogEnd, f"{prefix}others", self.others)

    def source(self, topics: "Topics", topic: str) -> PositionSource:
        """Look it up. Raises as `consumer_group` and `checkpoint`."""
        if self.consumer_group is not None:
            return consumer_group(topics, self.consumer_group, topic)
        return checkpoint(Path(self.checkpoint or ""), topic)


class PositionImporter(PositionResetter):
    """Gives a group its first positions in a data topic: `look_at` a source, show a person the result, `carry_out`."""

    def look_at(
        self,
        source: PositionSource,
        partitions: Sequence[range] | None = None,
        *,
        others: LogEnd | None = None,
        allow_out_of_range: bool = False,
    ) -> Sequence[PositionChange]:
        """Return what is to be, by partition, in their order. Nothing is written.

        Raises `ConfigurationError` for partitions that have positions already, for those of which `source` has no
        offset unless it is known where these begin, and for offsets that the topic does not hold unless they may lie
        `allow_out_of_range`. Raises as `PositionResetter.look`.
        """
        offsets = self._offsets(source, partitions, others)
        moves = self.look(ToOffsets(by_partition=tuple(offsets.items())), allow_out_of_range=True, new_group=True)
        if positions := [move.partition for move in moves if move.key.offset is not None]:
            raise ConfigurationError(
                f"group {self.group!r} has positions already in {self.topic!r}, partitions {positions}: first "
                "positions are adopted only where there are none. To move it on or back set the position"
            )
        outside = [
            f"partition {move.partition}: offset {move.offset}: {move.outside}" for move in moves if move.outside
        ]
        if outside and not allow_out_of_range:
            raise ConfigurationError(
                f"{source.name} stands outside what topic {self.topic!r} holds: {'; '.join(outside)}. Set these "
                "positions yourself, or allow them with --allow-out-of-range (allow_out_of_range in a run config)"
            )
        return moves

    def carry_out(
        self, moves: Sequence[PositionChange], *, wait_s: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> str | None:
        """Set the positions.

        Raises as `PositionResetter.carry_out`, and `PositionNotSetError` where there are some by now.
        """
        if positions := self.positions([move.partition for move in moves]):
            raise PositionNotSetError(
                f"group {self.group!r} has got positions meanwhile in {self.topic!r}, partitions {sorted(positions)}: "
                "its members have begun. Nothing was set"
            )
        return super().carry_out(moves, wait_s=wait_s, is_dead=is_dead)

    def _offsets(
        self, source: PositionSource, partitions: Sequence[range] | None, others: LogEnd | None
    ) -> dict[int, int]:
        topics, topic = self.topics, self.topic
        existing = topics.describe(topic).partitions
        if unknown := sorted(source.offsets.keys() - set(existing)):
            raise ConfigurationError(
                f"{source.name} has offsets for partitions {unknown}, which topic {topic!r} does not have: it was made "
                "anew since, or is another one"
            )
        numbers = choose_partitions(topic, ToOffsets(each=0), partitions, existing)
        bounds = topics.offsets(topic, [number for number in numbers if number not in source.offsets])
        begin_at = others or source.others
        # Where there is nothing to read both ends are the same.
        unclear = [number for number, at in bounds.items() if begin_at is None and at.start < at.end]
        if unclear:
            raise ConfigurationError(
                f"{source.name} has no offset for partitions {unclear} of topic {topic!r}: say with others whether "
                "they begin at the earliest or at the latest, or name the partitions to adopt"
            )
        rest = {number: (begin_at or LogEnd.EARLIEST).of(at) for number, at in bounds.items()}
        known = {**source.offsets, **rest}
        return {number: known[number] for number in numbers}
