"""The positions that an operator requests, and the offsets that they mean."""

from collections.abc import Sequence

import pytest

from marshal_dagster.admin.position_spec import (
    LogEnd,
    PartitionPosition,
    ShiftBy,
    Target,
    ToDatetime,
    ToOffsets,
    choose_partitions,
    offsets_of,
    outside_text,
    partition_numbers,
    partitions_of,
    partitions_text,
    resolve,
)
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import INT64_MAX
from marshal_dagster.protocol.state import OffsetBounds

EXTENT = OffsetBounds(20, 100)
HERE = PartitionPosition(50, EXTENT)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("5", ToOffsets(each=5)),
        ("0", ToOffsets(each=0)),
        ("0=5,1=7", ToOffsets(by_partition=((0, 5), (1, 7)))),
        ("3=0, 1=9223372036854775807", ToOffsets(by_partition=((1, 2**63 - 1), (3, 0)))),
        ("1=2,1=2", ToOffsets(by_partition=((1, 2),))),
    ],
)
def test_offsets_are_read(text: str, target: Target) -> None:
    """Offsets are one number for all partitions, or one for each partition named."""
    assert offsets_of(text, "--offsets") == target


@pytest.mark.parametrize(
    "text", ["", "-1", "a", "0=", "=1", "0=1,", "0=1;1=2", "1=2,1=3", "01=2", "5,6", "9223372036854775808"]
)
def test_what_are_no_offsets_is_an_error_that_names_them(text: str) -> None:
    """Malformed offsets, a partition with two offsets, and offsets too large for a record are errors."""
    with pytest.raises(ConfigurationError, match="--offsets: "):
        offsets_of(text, "--offsets")


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0,2-4", [0, 2, 3, 4]), ("3-3, 1", [1, 3]), ("1,0-2", [0, 1, 2])]
)
def test_partitions_are_read(text: str, numbers: list[int]) -> None:
    """Partitions are numbers and ranges of numbers in any order; duplicates count once."""
    assert choose_partitions("t", LogEnd.EARLIEST, partitions_of(text, "--partitions"), range(5)) == numbers


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([3, 1, 2], "1-3"), ([0, 2, 3, 7], "0,2-3,7"), (range(100), "0-99"), ([], "")]
)
def test_partitions_are_written_as_they_are_read(numbers: Sequence[int], text: str) -> None:
    """A sensor names partitions in the form that an operator types."""
    assert partitions_text(numbers) == text
    if text:
        assert partition_numbers(text, "partitions") == tuple(sorted(numbers))


def test_a_slip_in_a_range_does_not_fill_the_memory() -> None:
    """A range of more partitions than any cluster has is an error, before its numbers are made."""
    with pytest.raises(ConfigurationError, match="'0-2147483647' names more than 1000000 partitions"):
        partition_numbers("0-2147483647", "partitions")


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "0,,1", "99999999999", "2147483648", "٣"])
def test_what_are_no_partitions_is_an_error_that_names_them(text: str) -> None:
    """Malformed partitions, ranges that end before they start, and numbers too large for a partition are errors."""
    with pytest.raises(ConfigurationError, match="--partitions: "):
        partitions_of(text, "--partitions")


def test_all_partitions_are_meant_unless_some_are_named() -> None:
    """Partitions are named by themselves or with their offsets, but not both."""
    assert choose_partitions("t", ToOffsets(each=3), None, (1, 0)) == [0, 1]
    some = ToOffsets(by_partition=((1, 5),))
    assert choose_partitions("t", some, None, (0, 1)) == [1]
    with pytest.raises(ConfigurationError, match="already name partitions"):
        choose_partitions("t", some, [range(1, 2)], (0, 1))


@pytest.mark.parametrize(
    ("target", "named", "number"),
    [
        (LogEnd.LATEST, [range(1, 3)], 2),
        (LogEnd.LATEST, [range(2_000_000_000)], 1_999_999_999),
        (ToOffsets(None, ((7, 0),)), None, 7),
    ],
)
def test_a_partition_that_there_is_not_is_named(target: Target, named: list[range] | None, number: int) -> None:
    """The first partition that does not exist is named, even in a very long range."""
    with pytest.raises(ConfigurationError, match=f"topic 't' has no partition {number}; it has 2"):
        choose_partitions("t", target, named, (0, 1))


@pytest.mark.parametrize(
    ("target", "offset"),
    [
        (ToOffsets(each=7), 7),
        (ToOffsets(by_partition=((0, 9), (1, 8))), 9),
        (LogEnd.EARLIEST, 20),
        (LogEnd.LATEST, 100),
        (ShiftBy(-1), 49),
        (ShiftBy(-50), 0),
        (ShiftBy(10), 60),
        (ToDatetime(0), 100),
    ],
    ids=repr,
)
def test_a_target_means_an_offset(target: Target, offset: int) -> None:
    """Each kind of target resolves to an offset. A time later than all records resolves to the end."""
    assert resolve("t", target, {0: HERE}) == {0: offset}


def test_a_time_means_the_first_record_of_it() -> None:
    """A time resolves to the offset that was looked up for it."""
    assert resolve(
        "t",
        ToDatetime(5),
        {0: PartitionPosition(50, EXTENT, at_time=33), 1: PartitionPosition(None, EXTENT, at_time=34)},
    ) == {
        0: 33,
        1: 34,
    }


@pytest.mark.parametrize(
    ("at", "why"),
    [
        (PartitionPosition(None, EXTENT), "it has none"),
        (PartitionPosition(50, EXTENT, is_other=True), "the topic was deleted and re-created"),
        (PartitionPosition(9, EXTENT), "is at offset 9 and cannot be shifted by -10"),
    ],
)
def test_a_position_that_is_not_known_cannot_be_shifted(at: PartitionPosition, why: str) -> None:
    """A position cannot be shifted if there is none, if the topic was re-created, or if the result is negative."""
    with pytest.raises(ConfigurationError, match=f"t/3 .*{why}"):
        resolve("t", ShiftBy(-10), {3: at})


def test_no_position_is_beyond_what_kafka_has() -> None:
    """No record could have such a position, whatever the operator allows."""
    assert resolve("t", ShiftBy(INT64_MAX - 50), {3: HERE}) == {3: INT64_MAX}
    with pytest.raises(ConfigurationError, match=f"t/3 .* the largest offset is {INT64_MAX}"):
        resolve("t", ShiftBy(INT64_MAX - 49), {3: HERE})


@pytest.mark.parametrize(
    ("offset", "text"),
    [(19, "offsets 19 to 20 (exclusive) are deleted"), (20, ""), (100, ""), (101, "beyond the end 100")],
)
def test_an_offset_lies_in_what_is_there_or_outside(offset: int, text: str) -> None:
    """The end of the partition is a valid position: it is the offset of the next record."""
    assert outside_text(offset, EXTENT) == text
