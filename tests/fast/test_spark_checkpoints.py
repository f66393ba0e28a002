"""Checkpoints of Structured Streaming in Spark 4.0's format; tests/real reads one that Spark wrote."""

from pathlib import Path

import pytest

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.checkpoints import read_checkpoint
from tests.checkpoints import Source, write_batch


def test_the_newest_committed_batch_counts(tmp_path: Path) -> None:
    """The newest batch is found by number and not by name. A batch that was only started is reported."""
    for number in (8, 9, 10):
        write_batch(tmp_path, number, {"orders": {0: number, 1: 7}})
    found = read_checkpoint(tmp_path)
    assert (found.batch, found.started, found.offsets("orders")) == (10, None, {0: 10, 1: 7})
    write_batch(tmp_path, 11, {"orders": {0: 11, 1: 7}}, is_committed=False)
    found = read_checkpoint(tmp_path)
    assert (found.batch, found.started, found.offsets("orders")) == (10, 11, {0: 10, 1: 7})


def test_a_commit_without_its_offsets_is_passed_over(tmp_path: Path) -> None:
    """A commit without offsets is skipped, because Spark deletes old offsets before their commits."""
    write_batch(tmp_path, 3, {"orders": {0: 3}})
    write_batch(tmp_path, 4, {"orders": {0: 4}})
    (tmp_path / "offsets" / "4").unlink()
    assert read_checkpoint(tmp_path).offsets("orders") == {0: 3}


def test_of_several_sources_the_one_of_the_topic_counts(tmp_path: Path) -> None:
    """The source of the topic is found among several.

    Sources may be of other kinds, or read several topics. A source that has read nothing has a dash.
    """
    write_batch(tmp_path, 0, '{"logOffset":4}', "-", "17", {"orders": {0: 3}, "refunds": {0: 9}}, {"other": {0: 5}})
    found = read_checkpoint(tmp_path)
    assert [found.offsets(topic)[0] for topic in ("orders", "refunds", "other")] == [3, 9, 5]
    with pytest.raises(ConfigurationError, match=r"'none'; it reads \['orders', 'other', 'refunds'\]"):
        found.offsets("none")


def test_two_sources_of_one_topic_must_stand_alike(tmp_path: Path) -> None:
    """Two sources of one topic, as in a self-join, must have the same offsets."""
    write_batch(tmp_path, 0, {"orders": {0: 3}}, {"orders": {0: 3}})
    assert read_checkpoint(tmp_path).offsets("orders") == {0: 3}
    write_batch(tmp_path, 1, {"orders": {0: 4}}, {"orders": {0: 5}})
    with pytest.raises(ConfigurationError, match="2 sources that read topic 'orders' and are at different offsets"):
        read_checkpoint(tmp_path).offsets("orders")


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        (['{"logOffset":4}'], "it reads no Kafka topic"),
        (['{"orders":4}'], "it reads no Kafka topic"),
        (['{"orders":{"a":4}}'], "it reads no Kafka topic"),
        (['{"orders":{"0":true}}'], "it reads no Kafka topic"),
        (['{"orders":{"0":-2}}'], "has no offset for orders/0"),
        ([], "is truncated"),
    ],
)
def test_what_is_no_offset_is_not_taken_for_one(tmp_path: Path, sources: list[Source], says: str) -> None:
    """An invalid offset raises an error that names the file or the folder."""
    write_batch(tmp_path, 0, *sources)
    with pytest.raises(ConfigurationError, match=says):
        read_checkpoint(tmp_path).offsets("orders")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """Another folder, a query without a committed batch and a newer format are each rejected."""
    with pytest.raises(ConfigurationError, match="is not a checkpoint of Structured Streaming"):
        read_checkpoint(tmp_path / "nowhere")
    write_batch(tmp_path, 0, {"orders": {0: 3}}, is_committed=False)
    with pytest.raises(ConfigurationError, match="has no committed batch"):
        read_checkpoint(tmp_path)
    write_batch(tmp_path, 1, {"orders": {0: 3}})
    path = tmp_path / "offsets" / "1"
    path.write_text(path.read_text().replace("v1", "v2", 1))
    with pytest.raises(ConfigurationError, match="has version 'v2'"):
        read_checkpoint(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_checkpoint(tmp_path)
