"""What a checkpoint of Spark Structured Streaming says of Kafka, read from its files, without Spark.

In its folder `offsets/N` tells up to where each source is read by batch N, one line a source, and `commits/N` that this
batch is done. A Kafka source's line is `{"topic": {"partition": next offset, ...}, ...}`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from marshal_dagster.errors import ConfigurationError

_VERSION: Final = "v1"
_HEAD_LINES: Final = 2
"""The version, and what the batch was run with."""
SourceOffsets = Mapping[str, Mapping[int, int]]
"""The next offset of each partition, by topic."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest batch of a checkpoint that is committed.

    `begun` is the newest one that was begun, where that is a later one. `sources` has None for those that are not
    Kafka's.
    """

    folder: Path
    batch: int
    begun: int | None
    sources: tuple[SourceOffsets | None, ...]

    def offsets(self, topic: str) -> Mapping[int, int]:
        """Give the next offset of each partition of `topic`. Raises `ConfigurationError` where it is not clear."""
        read = [source[topic] for source in self.sources if source is not None and topic in source]
        if not read:
            names = sorted({name for source in self.sources if source is not None for name in source})
            raise ConfigurationError(
                f"the checkpoint {self.folder} does not read topic {topic!r}; it reads {names or 'nothing of Kafka'}"
            )
        if any(offsets != read[0] for offsets in read):
            raise ConfigurationError(
                f"the checkpoint {self.folder} has {len(read)} sources that read topic {topic!r} and stand at "
                "different offsets: choose one of them, and set the position to its offsets"
            )
        return read[0]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a query's checkpoint. Raises `ConfigurationError` for a folder that is none, or has no committed batch."""
    begun, committed = _batches(folder / "offsets"), _batches(folder / "commits")
    if not begun:
        raise ConfigurationError(
            f"{folder} is no checkpoint of Structured Streaming on this machine: no batch lies in its folder offsets"
        )
    done = begun & committed
    if not done:
        raise ConfigurationError(f"the checkpoint {folder} has no batch that is committed, so nothing to begin after")
    batch = max(done)
    path = folder / "offsets" / str(batch)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if len(lines) <= _HEAD_LINES:
        raise ConfigurationError(f"{path} is cut off: it names no source")
    if lines[0] != _VERSION:
        raise ConfigurationError(f"{path} is of version {lines[0]!r}; only {_VERSION!r} is known here")
    later = max(begun)
    sources = tuple(_source(line, path) for line in lines[_HEAD_LINES:])
    return Checkpoint(folder, batch, later if later > batch else None, sources)


def _batches(folder: Path) -> set[int]:
    """Give the batches of which there is a file: beside them lie checksums and what was being written."""
    try:
        return {int(file.name) for file in folder.iterdir() if file.name.isascii() and file.name.isdigit()}
    except OSError:
        return set()


def _source(line: str, path: Path) -> SourceOffsets | None:
    """Read one source's line; None for one that is not Kafka's. Raises `ConfigurationError`."""
    try:
        topics = json.loads(line)
    except ValueError:
        return None
    if not isinstance(topics, dict) or not all(map(_is_of_kafka, topics.values())):
        return None
    source = {topic: {int(number): at for number, at in offsets.items()} for topic, offsets in topics.items()}
    negative = [f"{topic}/{number}" for topic, offsets in source.items() for number, at in offsets.items() if at < 0]
    if negative:
        raise ConfigurationError(f"{path} has no offset for {', '.join(negative)}, but a word for the start or the end")
    return source


def _is_of_kafka(partitions: object) -> bool:
    return (
        isinstance(partitions, dict)
        and all(isinstance(number, str) and number.isascii() and number.isdigit() for number in partitions)
        and all(type(offset) is int for offset in partitions.values())
    )
