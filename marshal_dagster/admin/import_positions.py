"""Import of a group's first positions from a Kafka consumer group or a Spark Structured Streaming checkpoint."""

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
    """The offsets of a consumer group or a checkpoint."""

    name: str
    """The name of the source in messages."""
    offsets: Mapping[int, int]
    """The next offset to read, by partition."""
    others: LogEnd | None = None
    """Where the source's own reader would start in other partitions; None if that is unknown."""
    notes: tuple[str, ...] = ()
    """What the operator should know about the source."""
    is_at_work: bool = False
    """Whether its consumers still run, so that these offsets will soon be outdated."""

    def require_at_rest(self) -> None:
        """Raise `ConfigurationError` if the source's consumers still run: their records would be processed twice."""
        if self.is_at_work:
            raise ConfigurationError(f"{self.name} has running consumers, so nothing was written. Stop them first")


def consumer_group(topics: "Topics", group: str, topic: str) -> PositionSource:
    """Return the offsets that a Kafka consumer group has committed for a topic.

    Raises `ConfigurationError` if there are none; `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`.
    """
    is_at_work = topics.has_consumers(group)
    offsets = topics.group_offsets(group, topic)
    if not offsets:
        raise ConfigurationError(
            f"Kafka has no committed offsets of a consumer group {group!r} for topic {topic!r}: check both names and "
            "the cluster"
        )
    name = f"consumer group {group!r}"
    notes = (f"{name} has running consumers: these offsets will soon be outdated",) if is_at_work else ()
    return PositionSource(name, offsets, notes=notes, is_at_work=is_at_work)


def checkpoint(folder: Path, topic: str) -> PositionSource:
    """Return the end offsets of the newest committed batch in a checkpoint of Structured Streaming.

    The checkpoint does not show whether its query still runs. Raises `ConfigurationError`.
    """
    found = read_checkpoint(folder)
    notes = [f"the newest committed batch of {folder} is {found.batch}: make sure that its query is stopped"]
    if found.started is not None:
        notes.append(f"batch {found.started} was started and not committed: its output so far will be written again")
    return PositionSource(f"checkpoint {folder}", found.offsets(topic), LogEnd.EARLIEST, tuple(notes))


@dataclass(frozen=True, slots=True)
class PositionSourceOptions:
    """The options that name a source; exactly one of `consumer_group` and `checkpoint` must be given."""

    consumer_group: str | None = None
    """The name of a Kafka consumer group."""
    checkpoint: str | None = None
    """The folder of a checkpoint."""
    others: str | None = None
    """Where partitions start for which the source has no offset: `earliest` or `latest`."""

    @property
    def is_one(self) -> bool:
        """Whether exactly one source is given."""
        return (self.consumer_group is None) != (self.checkpoint is None)

    def begin_at(self, prefix: str = "") -> LogEnd | None:
        """Return where partitions start for which the source has no offset; None if `others` is not given.

        Raises `ConfigurationError` for an invalid value, whose name in the message begins with `prefix`, and unless
        exactly one source is given.
        """
        if not self.is_one:
            raise ConfigurationError("give either a consumer group or a checkpoint")
        return None if self.others is None else enum_member(LogEnd, f"{prefix}others", self.others)

    def source(self, topics: "Topics", topic: str) -> PositionSource:
        """Read the offsets of the source. Raises what `consumer_group` and `checkpoint` raise."""
        if self.consumer_group is not None:
            return consumer_group(topics, self.consumer_group, topic)
        return checkpoint(Path(self.checkpoint or ""), topic)


class PositionImporter(PositionResetter):
    """Sets a group's first positions in a data topic from a source.

    Call `look_at`, show the operator the result, then call `carry_out`.
    """

    def look_at(
        self,
        source: PositionSource,
        partitions: Sequence[range] | None = None,
        *,
        others: LogEnd | None = None,
        allow_out_of_range: bool = False,
    ) -> Sequence[PositionChange]:
        """Return the position changes, sorted by partition; nothing is written.

        `others` is where partitions start for which `source` has no offset. Raises `ConfigurationError` for partitions
        that already have positions; for partitions without an offset if `others` is unknown; and for offsets outside
        the topic unless `allow_out_of_range`. Raises what `PositionResetter.look` raises.
        """
        offsets = self._offsets(source, partitions, others)
        moves = self.look(ToOffsets(by_partition=tuple(offsets.items())), allow_out_of_range=True, new_group=True)
        if positions := [move.partition for move in moves if move.key.offset is not None]:
            raise ConfigurationError(
                f"group {self.group!r} already has positions in topic {self.topic!r}, partitions {positions}. Only "
                "partitions without one can be imported; change existing ones with `marshal-dagster position reset`"
            )
        outside = [
            f"partition {move.partition}: offset {move.offset}: {move.outside}" for move in moves if move.outside
        ]
        if outside and not allow_out_of_range:
            raise ConfigurationError(
                f"{source.name} has offsets outside of topic {self.topic!r}: {'; '.join(outside)}. Set these positions "
                "yourself, or allow them with --allow-out-of-range (allow_out_of_range in a run config)"
            )
        return moves

    def carry_out(
        self, moves: Sequence[PositionChange], *, wait_s: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> str | None:
        """Set the positions.

        Raises what `PositionResetter.carry_out` raises, and `PositionNotSetError` if any partition has got a position
        since `look_at`.
        """
        if positions := self.positions([move.partition for move in moves]):
            raise PositionNotSetError(
                f"group {self.group!r} now has positions in topic {self.topic!r}, partitions {sorted(positions)}, "
                "because its members have started. No position was set; to change these positions, use "
                "`marshal-dagster position reset`"
            )
        return super().carry_out(moves, wait_s=wait_s, is_dead=is_dead)

    def _offsets(
        self, source: PositionSource, partitions: Sequence[range] | None, others: LogEnd | None
    ) -> dict[int, int]:
        topics, topic = self.topics, self.topic
        existing = topics.describe(topic).partitions
        if unknown := sorted(source.offsets.keys() - set(existing)):
            raise ConfigurationError(
                f"{source.name} has offsets for partitions {unknown}, which topic {topic!r} does not have. Check the "
                "topic and the cluster; the topic may have been deleted and re-created"
            )
        numbers = choose_partitions(topic, ToOffsets(each=0), partitions, existing)
        bounds = topics.offsets(topic, [number for number in numbers if number not in source.offsets])
        begin_at = others or source.others
        # In an empty partition both ends are the same offset.
        unclear = [number for number, at in bounds.items() if begin_at is None and at.start < at.end]
        if unclear:
            raise ConfigurationError(
                f"{source.name} has no offset for partitions {unclear} of topic {topic!r}. Give others as earliest or "
                "latest to choose where they start, or name the partitions to import"
            )
        rest = {number: (begin_at or LogEnd.EARLIEST).of(at) for number, at in bounds.items()}
        known = {**source.offsets, **rest}
        return {number: known[number] for number in numbers}
