"""The Iceberg sink with a REST catalog: that of Iceberg's own project, whose answers a proxy can lose."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from marshal_dagster.errors import SinkRejectedError, UnavailableError
from marshal_dagster.sinks import IcebergSink
from marshal_dagster.sinks.conformance.target import deliver, never, part, rows_of
from tests.iceberg_tables import NAME, IcebergTarget, catalog_name
from tests.real.iceberg_rest import Proxy, rest_catalog
from tests.real.spark_fixtures import iceberg_jars
from tests.vended_io import WITNESSES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = Schema(
    NestedField(1, "partition", IntegerType()),
    NestedField(2, "offset", LongType()),
    NestedField(3, "value", StringType()),
)
WRITERS, PARTITIONS, RANGES, WIDTH = 4, 2, 4, 3


class RestTarget(IcebergTarget):
    """The table in the REST catalog."""

    def __init__(self, folder: Path, proxy: Proxy, uri: str) -> None:
        super().__init__(folder)
        self.proxy = proxy
        self.uri = uri
        self.more: dict[str, str] = {}

    def properties(self, timeout_s: float = 30) -> dict[str, str]:  # noqa: ARG002 - as the base class's
        """Return the properties of the catalog."""
        return {"type": "rest", "uri": self.uri, **self.more}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Run the catalog and return its port."""
    with rest_catalog(tmp_path_factory.mktemp("rest")) as port:
        yield port


@pytest.fixture
def target(port: int, tmp_path: Path) -> Iterator[RestTarget]:
    """Return an empty table."""
    proxy = Proxy(port)
    with proxy.serve() as uri:
        target = RestTarget(tmp_path, proxy, uri)
        catalog = load_catalog(catalog_name(tmp_path), **target.properties())
        catalog.create_namespace_if_not_exists("shop")
        catalog.create_table(NAME, SCHEMA)
        proxy.commits.clear()
        yield target
        catalog.drop_table(NAME)


def test_a_commit_that_was_overtaken_is_judged_again(target: RestTarget) -> None:
    """The catalog refuses it, because the branch does not have the snapshot that the commit requires."""
    deliver(target, "a", part(0, 0, 3))
    first = target.table().current_snapshot()
    sink, others = target.sink(), [part(1, 0, 3), part(0, 3, 6)]

    def reached(step: str) -> None:
        if step == "judged" and others:
            deliver(target, "other", others.pop(0))

    sink._reached = reached  # type: ignore[method-assign]
    batch = [part(0, 3, 6), part(2, 0, 3)]
    result = sink.write(target.frame(rows_of("b", *batch)), batch, never)
    assert (result.taken, result.skipped) == ((batch[1],), (batch[0],))
    assert target.found() == rows_of("a", part(0, 0, 3)) + sorted(
        rows_of("other", part(0, 3, 6), part(1, 0, 3)) + rows_of("b", part(2, 0, 3))
    )
    assert len(target.proxy.commits) == 6, "the first one, two of the other, and three of this one"
    required = {each["type"]: each for each in target.proxy.commits[1]["requirements"]}
    assert required.keys() >= {"assert-table-uuid", "assert-current-schema-id", "assert-default-spec-id"}
    assert first is not None
    assert required["assert-ref-snapshot-id"] == {
        "type": "assert-ref-snapshot-id",
        "ref": "main",
        "snapshot-id": first.snapshot_id,
    }


@pytest.mark.parametrize("plan", ["lost", "cut"])
def test_a_lost_answer_of_a_commit_is_found_in_the_table(plan: str, target: RestTarget) -> None:
    """The catalog has made the commit, and the sink looks for it in the table before it raises an error."""
    deliver(target, "a", part(0, 0, 3))
    target.proxy.plans = [plan]
    assert deliver(target, "b", part(0, 3, 6)).taken == (part(0, 3, 6),)
    assert target.proxy.plans == []
    assert target.found() == rows_of("a", part(0, 0, 3)) + rows_of("b", part(0, 3, 6))


def test_a_failed_commit_is_an_error(target: RestTarget) -> None:
    """Its state is unknown to pyiceberg; the table does not have it, and the next batch writes the rows."""
    target.proxy.plans = ["failed"]
    with pytest.raises(UnavailableError, match="did not confirm the commit"):
        deliver(target, "a", part(0, 0, 3))
    assert deliver(target, "b", part(0, 0, 3)).taken
    assert target.found() == rows_of("b", part(0, 0, 3))


def test_each_range_of_racing_writers_is_there_once(target: RestTarget) -> None:
    """Whichever writer commits a range, its rows are there once; some answers are lost."""
    dice = Random(31)
    target.proxy.plans = [dice.choice(["pass", "pass", "lost", "cut"]) for _ in range(60)]

    def write_all(seed: int) -> None:
        order = Random(seed)
        for number in range(RANGES):
            for partition in order.sample(range(PARTITIONS), PARTITIONS):
                mine = part(partition, number * WIDTH, (number + 1) * WIDTH)
                try:
                    deliver(target, str(seed), mine)
                except SinkRejectedError as error:
                    assert "which is neither" in str(error)  # noqa: PT017 - another writer is further ahead

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write_all, range(WRITERS)))
    found = target.found()
    offsets = [(partition, offset) for partition, offset, _ in found]
    assert offsets == [(partition, offset) for partition in range(PARTITIONS) for offset in range(RANGES * WIDTH)]
    by_range = [{value for _, _, value in found[start : start + WIDTH]} for start in range(0, len(found), WIDTH)]
    assert all(len(values) == 1 for values in by_range)


def test_credentials_of_the_catalog_reach_the_tasks(target: RestTarget, spark: "SparkSession", tmp_path: Path) -> None:
    """Spark's tasks write with them, and Spark reads the table by the same catalog."""
    witnesses = tmp_path / "witnesses"
    witnesses.mkdir()
    target.more = {"py-io-impl": "tests.vended_io.VendedFileIO", WITNESSES: str(witnesses)}
    target.sink_class = IcebergSink
    target.spark = spark
    mine = [part(0, 0, 3), part(1, 0, 3)]
    deliver(target, "a", *mine)
    assert target.found() == rows_of("a", *mine)
    processes = {path.name for path in witnesses.iterdir()}
    assert processes
    assert str(os.getpid()) not in processes
    if iceberg_jars():
        lake = f"spark.sql.catalog.{catalog_name(tmp_path)}"
        spark.conf.set(lake, "org.apache.iceberg.spark.SparkCatalog")
        spark.conf.set(f"{lake}.type", "rest")
        spark.conf.set(f"{lake}.uri", target.uri)
        rows = spark.table(f"{catalog_name(tmp_path)}.{NAME}").collect()
        assert sorted(map(tuple, rows)) == rows_of("a", *mine)
