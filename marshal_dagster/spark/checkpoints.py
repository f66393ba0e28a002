"""Reading the Kafka offsets in a checkpoint of Spark Structured Streaming, without Spark.

The import of positions uses it. In the folder of a checkpoint, the file `offsets/N` has one line for each source: the
offsets up to which batch N reads it. The file `commits/N` exists if that batch is done. The line of a Kafka source is
`{"topic": {"partition": next offset, ...}, ...}`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from marshal_dagster.errors import ConfigurationError

_VERSION: Final = "v1"
_HEAD_LINES: Final = 2
"""The lines before the sources: the version and the settings of the batch."""
SourceOffsets = Mapping[str, Mapping[int, int]]
"""The next offset of each partition, by topic."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest committed batch of a checkpoint."""

    folder: Path
    batch: int
    started: int | None
    """The newest batch that was started, if it is later than `batch`."""
    sources: tuple[SourceOffsets | None, ...]
    """The offsets of each source; None for a source that is not Kafka's."""

    def offsets(self, topic: str) -> Mapping[int, int]:
        """Return the next offset of each partition of `topic`. Raises `ConfigurationError` if it is ambiguous."""
        read = [source[topic] for source in self.sources if source is not None and topic in source]
        if not read:
            names = sorted({name for source in self.sources if source is not None for name in source})
            raise ConfigurationError(
                f"the checkpoint {self.folder} does not read topic {topic!r}; it reads {names or 'no Kafka topic'}"
            )
        if any(offsets != read[0] for offsets in read):
            raise ConfigurationError(
                f"the checkpoint {self.folder} has {len(read)} sources that read topic {topic!r} and are at "
                "different offsets: choose one of them, and set the position to its offsets"
            )
        return read[0]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a query's checkpoint. Raises `ConfigurationError` if the folder has none, or no committed batch."""
    started, committed = _batches(folder / "offsets"), _batches(folder / "commits")
    if not started:
        raise ConfigurationError(
            f"{folder} is not a checkpoint of Structured Streaming on this machine: its folder offsets has no batch"
        )
    done = started & committed
    if not done:
        raise ConfigurationError(f"the checkpoint {folder} has no committed batch, so it has no offsets to import")
    batch = max(done)
    path = folder / "offsets" / str(batch)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if len(lines) <= _HEAD_LINES:
        raise ConfigurationError(
            f"checkpoint file {path} is truncated: it has no source. Use another checkpoint, or set the position"
        )
    if lines[0] != _VERSION:
        raise ConfigurationError(
            f"checkpoint file {path} has version {lines[0]!r}, but only {_VERSION!r} is supported: set the position "
            "yourself"
        )
    later = max(started)
    sources = tuple(_source(line, path) for line in lines[_HEAD_LINES:])
    return Checkpoint(folder, batch, later if later > batch else None, sources)


def _batches(folder: Path) -> set[int]:
    """Return the numbers of the batches with a file; ignore checksums and unfinished files."""
    try:
        return {int(file.name) for file in folder.iterdir() if file.name.isascii() and file.name.isdigit()}
    except OSError:
        return set()


def _source(line: str, path: Path) -> SourceOffsets | None:
    """Return the offsets of one source; None if it is not a Kafka source. Raises `ConfigurationError`."""
    try:
        topics = json.loads(line)
    except ValueError:
        return None
    if not isinstance(topics, dict) or not all(map(_is_of_kafka, topics.values())):
        return None
    source = {topic: {int(number): at for number, at in offsets.items()} for topic, offsets in topics.items()}
    negative = [f"{topic}/{number}" for topic, offsets in source.items() for number, at in offsets.items() if at < 0]
    if negative:
        raise ConfigurationError(
            f"{path} has no offset for {', '.join(negative)}, only a marker for the start or the end: set the position "
            "of these partitions yourself"
        )
    return source


def _is_of_kafka(partitions: object) -> bool:
    return (
        isinstance(partitions, dict)
        and all(isinstance(number, str) and number.isascii() and number.isdigit() for number in partitions)
        and all(type(offset) is int for offset in partitions.values())
    )
