"""Processes that write the same ranges to an Iceberg table at the same time, also beside another writer."""

import multiprocessing
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks.conformance.target import never, part, rows_of
from tests.conditions import WITHIN_S
from tests.iceberg_tables import IcebergTarget, create_table

WRITERS = 4
PARTITIONS = 3
RANGES = 6
WIDTH = 5
TRIES = 200


def write_all(folder: Path, seed: int) -> None:
    """Write the ranges of all partitions in order. Some are refused, because another process is further ahead."""
    dice, target = Random(seed), IcebergTarget(folder)
    for number in range(RANGES):
        for partition in dice.sample(range(PARTITIONS), PARTITIONS):
            mine = part(partition, number * WIDTH, (number + 1) * WIDTH)
            try:
                target.sink().write(target.frame(rows_of(str(seed), mine)), [mine], never)
            except SinkRejectedError as error:
                assert "which is neither" in str(error)  # noqa: PT017 - another process is further ahead


def append_others(folder: Path) -> None:
    """Append rows as another engine does, which knows nothing of the sink."""
    for _ in range(RANGES):
        for _ in range(TRIES):
            try:
                table = IcebergTarget(folder).table()
                table.append(table.scan().to_arrow().slice(0, 0))
                break
            except CommitFailedException:
                continue


@pytest.mark.thorough
def test_each_range_of_racing_processes_is_there_once(tmp_path: Path) -> None:
    """Whichever process commits a range, its rows are there once, and those of no other process."""
    fields = [NestedField(1, "partition", IntegerType()), NestedField(2, "offset", LongType())]
    create_table(tmp_path, Schema(*fields, NestedField(3, "value", StringType())))
    forks = multiprocessing.get_context("fork")
    writers = [forks.Process(target=write_all, args=(tmp_path, seed)) for seed in range(WRITERS)]
    writers.append(forks.Process(target=append_others, args=(tmp_path,)))
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(WITHIN_S)
    assert [writer.exitcode for writer in writers] == [0] * len(writers)
    found = IcebergTarget(tmp_path).found()
    offsets = [(partition, offset) for partition, offset, _ in found]
    assert offsets == [(partition, offset) for partition in range(PARTITIONS) for offset in range(RANGES * WIDTH)]
    by_range = [{value for _, _, value in found[start : start + WIDTH]} for start in range(0, len(found), WIDTH)]
    assert all(len(values) == 1 for values in by_range)
