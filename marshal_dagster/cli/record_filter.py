"""Which records `tail` shows: those of a group, a topic or partitions, with or without heartbeats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from marshal_dagster.admin.position_spec import partitions_of
from marshal_dagster.admin.record_sentences import JudgedRecord
from marshal_dagster.admin.times import moment_ms
from marshal_dagster.cli.options import OnlyGroup, complete_topic
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.messages import (
    NO_NAME,
    GroupMessage,
    Heartbeat,
    Mark,
    Message,
    RangeHeartbeat,
    is_name,
    parse,
)
from marshal_dagster.protocol.world import ACCEPTED


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """The records that are shown; None means all. Invalid records belong to no group and no topic."""

    group: str | None = None
    topic: str | None = None
    partitions: Sequence[range] | None = None
    without_heartbeats: bool = False
    """Leave out heartbeats that change nothing but the time of the last heartbeat, and marks."""

    @property
    def is_everything(self) -> bool:
        """Whether no record is left out."""
        return self == EVERYTHING

    def may_show(self, value: bytes | None) -> bool:
        """Return false for a value that `shows` would leave out; for some others the answer is true. It is fast."""
        return self.group is None or (value is not None and f"/{self.group}/".encode() in value)

    def shows(self, judged: JudgedRecord) -> bool:
        """Return whether the record is shown. A heartbeat is left out only if it was judged."""
        if self.is_everything:
            return True
        message = parse(judged.record.value)
        if not isinstance(message, Message):
            return self.group is None and self.topic is None and self.partitions is None
        return self._has_place(message) and not (self.without_heartbeats and _changes_nothing(message, judged))

    def _has_place(self, message: Message) -> bool:
        """Return whether the record concerns the chosen group, topic and partitions; one about a group concerns all."""
        if self.group not in {None, message.group}:
            return False
        if isinstance(message, GroupMessage):
            return True
        is_chosen = self.partitions is None or any(message.partition in run for run in self.partitions)
        return is_chosen and self.topic in {None, message.topic}


EVERYTHING: Final = RecordFilter()


def _changes_nothing(message: Message, judged: JudgedRecord) -> bool:
    match message:
        case Mark():
            return True
        case RangeHeartbeat():
            return judged.verdict == ACCEPTED
        case Heartbeat(offset=offset):
            key = None if judged.before is None else judged.before.key
            return judged.verdict == ACCEPTED and key is not None and key.offset == offset
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """The options that choose records."""

    group: OnlyGroup = None
    topic: Annotated[
        str | None,
        typer.Option(
            "--topic",
            "-t",
            metavar="NAME",
            help="Only this data topic, and records about whole groups.",
            autocompletion=complete_topic,
        ),
    ] = None
    partitions: Annotated[
        str | None,
        typer.Option("--partition", "--partitions", "-p", metavar="0,2-4", help="Only these data partitions."),
    ] = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Only records since then: a duration such as 2h, or a time such as 2026-01-31T18:00:00Z.",
        ),
    ] = None
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="Only records before then; as --since."),
    ] = None
    no_heartbeats: Annotated[
        bool,
        typer.Option("--no-heartbeats", "-q", help="Leave out marks, and heartbeats that moved no position."),
    ] = False

    def record_filter(self) -> RecordFilter:
        """Return the records that are shown. Raises `ConfigurationError`."""
        if self.topic is not None:
            require_topic_name("--topic", self.topic)
        if self.group is not None and not is_name(self.group):
            raise ConfigurationError(f"--group: {self.group!r} {NO_NAME}")
        ranges = None if self.partitions is None else partitions_of(self.partitions, "--partition")
        return RecordFilter(self.group, self.topic, ranges, self.no_heartbeats)

    def times(self, now_ms: int) -> tuple[int | None, int | None]:
        """Return the times from which and before which records are shown, in unix ms. Raises `ConfigurationError`."""
        since_ms = None if self.since is None else moment_ms(self.since, "--since", now_ms)
        until_ms = None if self.until is None else moment_ms(self.until, "--until", now_ms)
        if since_ms is not None and until_ms is not None and until_ms <= since_ms:
            raise ConfigurationError("--until is not later than --since, so no record lies between them")
        return since_ms, until_ms
