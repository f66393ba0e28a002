"""Sinks of files and of Delta tables on S3: moto's server, whose conditional requests are real, and Hadoop's S3A."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks import DeltaSink, FileSink
from marshal_dagster.sinks.conformance import Case
from tests.object_outputs import ObjectOutput, S3Objects
from tests.real.moto_server import BUCKET, running_moto
from tests.session_settings import QUICK_PLANS, WITHOUT_STATISTICS, session_settings
from tests.sink_conformance import deliver, never, part, rows_of
from tests.sink_kit import SHORT_CASES, OutputTarget
from tests.sink_process import EACH, KILLED, write_and_die

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPTIONS = {"access_key_id": "writer", "secret_access_key": "made-up", "region": "us-east-1"}
S3A = {
    "fs.s3a.impl.disable.cache": "true",  # a cached file system keeps its settings
    "fs.s3a.path.style.access": "true",
    "fs.s3a.access.key": OPTIONS["access_key_id"],
    "fs.s3a.secret.key": OPTIONS["secret_access_key"],
    "fs.s3a.endpoint.region": OPTIONS["region"],
    "fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
}
ON_S3 = ("subset_replayed_by_others", "foreign_rows", "judged_when_written", "some_rows_without_offsets")
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The URL of an S3 with one bucket."""
    with running_moto() as url:
        yield url


def uri() -> str:
    """Return the URI of a new folder, whose name has special characters."""
    return f"s3://{BUCKET}/out-{next(_numbers)}/a b%20[1],c"


@pytest.fixture
def output(moto: str) -> ObjectOutput:
    """An empty output."""
    return ObjectOutput(S3Objects(moto), uri())


@pytest.mark.parametrize("case", [case for case in SHORT_CASES if str(case) in ON_S3], ids=str)
def test_the_sink_conforms(case: Case, output: ObjectOutput) -> None:
    """The cases in which files are recognised, replaced and rejected pass."""
    case.check(OutputTarget(output))


def test_a_process_killed_at_each_step(output: ObjectOutput) -> None:
    """After a repetition each row exists once, and the files of the dead writer are deleted."""
    for number, step in enumerate(output.steps):
        mine = part(number, 0, 3)
        assert write_and_die(output, step, "dead", [mine]) == KILLED
        outcome = deliver(output, "new", part(number, 0, 3, epoch=20))
        assert bool(outcome.skipped) == (step in {"linked", "cleared"})
        value = "dead" if outcome.skipped else "new"
        assert [row for row in output.rows() if row[0] == number] == rows_of(value, mine)
    output.sweep()
    assert len(output.left()) == len(output.steps)
    assert output.sink().check() == []


def test_four_processes_at_once(output: ObjectOutput) -> None:
    """Each writes every range; of each range one of them has written the rows."""
    ranges = [part(number % 2, number // 2, number // 2 + 1) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda value: write_and_die(output, EACH, value, ranges), "abcd"))
    assert ended == [0, 0, 0, 0]
    rows = output.rows()
    assert [row[:2] for row in rows] == sorted(row[:2] for row in rows_of("a", *ranges))
    assert output.sink().check() == []


def test_through_spark(spark: "SparkSession", moto: str) -> None:
    """Spark's files are written by S3A, counted, replaced and read; an empty result leaves only a mark of a folder."""
    place = uri()
    options = {**OPTIONS, "endpoint": moto}
    with session_settings(spark, {**S3A, **QUICK_PLANS, "fs.s3a.endpoint": moto}):
        sink = FileSink(place, storage_options=options)
        ranges = [part(0, 0, 2), part(1, 0, 2)]
        assert set(sink.verdicts(ranges).values()) == {Verdict.REPLACE}
        frame = spark.createDataFrame(
            [(0, 0, "a"), (0, 1, "a"), (1, None, "b")], "partition int, offset long, value string"
        )
        assert sink.write(frame, ranges, never).rows == {0: 2, 1: 1}
        newer = part(0, 1, 2, generation=20, epoch=21)
        rows = frame.where("offset = 1").replace("a", "new")
        assert FileSink(place, storage_options=options).write(rows, [newer], lambda: {0: [(1, 2)]}).taken == (newer,)
        nothing = part(1, 2, 4)
        assert sink.write(frame.where("offset = 9"), [nothing], never).taken == (nothing,)
        reader = FileSink(place, storage_options=options)
        found = sorted(map(tuple, reader.read(spark).collect()), key=str)
        assert found == [(0, 0, "a"), (0, 1, "new"), (1, None, "b")]
        assert reader.check() == []
        assert reader.sweep() == 0
        assert {each.startswith(f"{place}/_marshal/attempts/") for each in reader.committed_uris()} == {True}


def test_spark_that_reaches_another_store(spark: "SparkSession", moto: str) -> None:
    """If Spark's endpoint is another one, the sink finds it before rows are written."""
    with running_moto() as other, session_settings(spark, {**S3A, "fs.s3a.endpoint": other}):
        sink = FileSink(uri(), storage_options={**OPTIONS, "endpoint": moto})
        frame = spark.createDataFrame([(0, 0, "a")], "partition int, offset long, value string")
        with pytest.raises(ConfigurationError, match=r"Spark does not find s3a://.*the same endpoint"):
            sink.write(frame, [part(0, 0, 1)], never)


def test_a_delta_table(spark: "SparkSession", moto: str) -> None:
    """It is refused without a log store. With Delta's store for one driver, one process writes, repeats and replaces.

    Delta uses that store for S3 by default, and a second process could overwrite its commit.
    """
    place = uri().replace("s3:", "s3a:").partition("%")[0]
    frame = spark.createDataFrame([(0, 0, "a"), (0, 1, "a"), (1, 5, "b")], "partition int, offset long, value string")
    ranges = [part(0, 0, 2), part(1, 0, 6)]
    with session_settings(spark, {**S3A, **QUICK_PLANS, **WITHOUT_STATISTICS, "fs.s3a.endpoint": moto}):
        with pytest.raises(ConfigurationError, match=r"Set spark.delta.logStore.s3a.impl"):
            DeltaSink(place).verdicts(ranges)
        with session_settings(spark, {"spark.delta.logStore.s3a.impl": "io.delta.storage.S3SingleDriverLogStore"}):
            assert DeltaSink(place).write(frame, ranges, never).rows == {0: 2, 1: 1}
            following = part(0, 2, 4)
            rows = spark.createDataFrame([(0, 3, "c")], frame.schema)
            assert DeltaSink(place).write(rows, [following], never).taken == (following,)
            assert DeltaSink(place).write(rows, [following], never).skipped == (following,)
            newer = part(0, 1, 4, generation=20, epoch=21)
            replacing = spark.createDataFrame([(0, 1, "new"), (0, 3, "new")], frame.schema)
            assert DeltaSink(place).write(replacing, [newer], lambda: {0: [(1, 4)]}).taken == (newer,)
            with pytest.raises(SinkRejectedError, match="fencing token"):
                DeltaSink(place).verdicts([part(0, 4, 6, generation=20, epoch=20)])
            found = spark.read.format("delta").load(place).select("partition", "offset", "value").collect()
    assert sorted(map(tuple, found)) == [(0, 0, "a"), (0, 1, "new"), (0, 3, "new"), (1, 5, "b")]
