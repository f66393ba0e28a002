"""Checkpoints of Structured Streaming in the format that Spark 4.0 writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

HEAD = '{"batchWatermarkMs":0,"batchTimestampMs":1795337082790,"conf":{"spark.sql.shuffle.partitions":"4"}}'
COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'
Source = Mapping[str, Mapping[int, int]] | str


def write_batch(folder: Path, number: int, *sources: Source, is_committed: bool = True) -> Path:
    """Write one batch with the end offsets of its sources; return the folder of the checkpoint."""
    lines = [source if isinstance(source, str) else _line(source) for source in sources]
    _write(folder / "offsets", number, ["v1", HEAD, *lines])
    if is_committed:
        _write(folder / "commits", number, COMMIT.split("\n"))
    return folder


def _line(source: Mapping[str, Mapping[int, int]]) -> str:
    named = {topic: {str(number): offset for number, offset in each.items()} for topic, each in source.items()}
    return json.dumps(named, separators=(",", ":"))


def _write(folder: Path, number: int, lines: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(number)).write_text("\n".join(lines))
    (folder / f".{number}.crc").write_bytes(b"crc\x00\x00")
    (folder / f".{number}.5b1c0d3e.tmp").write_text("half a")
