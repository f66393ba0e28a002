"""The Iceberg sink with a table on S3: moto's server. Rows are plain Python, and the catalog is SQLite."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, StringType

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks.conformance.target import deliver, never, part, rows_of
from tests.iceberg_tables import MESSAGES_SCHEMA, NAME, IcebergTarget, catalog_name, catalog_properties
from tests.real.moto_server import BUCKET, running_moto


class ObjectTarget(IcebergTarget):
    """A table whose files are objects."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        super().__init__(folder, source_column="marshal_source")
        self.endpoint = endpoint

    def properties(self, timeout_s: float = 30) -> dict[str, str]:
        """Return the properties of the catalog."""
        return {
            **catalog_properties(self.folder, timeout_s),
            "warehouse": f"s3://{BUCKET}/{self.folder.name}",
            "s3.endpoint": self.endpoint,
            "s3.access-key-id": "key",
            "s3.secret-access-key": "secret",
            "s3.region": "us-east-1",
        }


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Run the server and return its address."""
    with running_moto() as url:
        yield url


@pytest.fixture
def target(endpoint: str, tmp_path: Path) -> ObjectTarget:
    """Return an empty table."""
    target = ObjectTarget(tmp_path, endpoint)
    catalog = load_catalog(catalog_name(tmp_path), **target.properties())
    catalog.create_namespace(NAME.split(".", maxsplit=1)[0])
    catalog.create_table(NAME, Schema(*MESSAGES_SCHEMA.fields, NestedField(4, "marshal_source", StringType())))
    return target


def test_rows_are_written_once_and_replaced(target: ObjectTarget) -> None:
    """Batches, a repeated one, a commit that was overtaken, and a new generation."""
    deliver(target, "a", part(0, 0, 4), part(1, 0, 4))
    assert deliver(target, "b", part(0, 0, 4, epoch=20)).skipped
    sink, others = target.sink(), [part(1, 4, 6)]

    def reached(step: str) -> None:
        if step == "judged" and others:
            deliver(target, "other", others.pop())

    sink._reached = reached  # type: ignore[method-assign]
    mine = [part(0, 4, 6, epoch=20), part(1, 4, 6)]
    assert sink.write(target.frame(rows_of("c", *mine)), mine, never).taken == (mine[0],)
    deliver(target, "new", part(0, 3, 5, generation=20, epoch=21))
    expected = rows_of("a", part(0, 0, 3), part(1, 0, 4)) + rows_of("other", part(1, 4, 6))
    assert target.found() == sorted(expected + rows_of("c", part(0, 5, 6)) + rows_of("new", part(0, 3, 5)))


def test_files_of_a_refused_batch_are_removed(target: ObjectTarget) -> None:
    """The storage has only the files of the table."""
    foreign = rows_of("b", part(0, 0, 2), part(7, 0, 2))
    with pytest.raises(SinkRejectedError, match="rows of partition 7"):
        deliver(target, "b", part(0, 0, 2), rows=foreign)
    deliver(target, "a", part(0, 0, 4))
    table = target.table()
    system, path = table.io.fs_by_scheme("s3", None), f"{BUCKET}/{target.folder.name}"  # type: ignore[attr-defined]
    from pyarrow.fs import FileSelector

    found = {file.path for file in system.get_file_info(FileSelector(path, recursive=True))}
    there = {file for file in found if file.endswith(".parquet")}
    assert there == {row["file_path"].removeprefix("s3://") for row in table.inspect.files().to_pylist()}
