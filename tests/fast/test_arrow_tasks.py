"""The size of the Arrow batches that Spark passes to a task, and what a task leaves to the next one."""

import gc
import importlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from marshal_dagster.spark.arrow_tasks import limited_batches, sparing_next_tasks

ROWS, BYTES = "spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch"


class Session:
    """A session with settings only. Its Spark knows the settings that it begins with."""

    def __init__(self, **settings: str) -> None:
        self.settings = settings
        self.conf = self
        self._known = frozenset(settings)

    def get(self, name: str) -> str:
        """Return a setting."""
        return self.settings[name]

    def isModifiable(self, name: str) -> bool:  # noqa: N802 - Spark's name
        """Return whether a setting exists and can be changed."""
        return name in self._known

    def set(self, name: str, value: object) -> None:
        """Change a setting."""
        self.settings[name] = str(value)


@pytest.mark.parametrize(
    ("before", "is_size_known", "inside"),
    [
        ({ROWS: "10000", BYTES: "64b"}, True, {ROWS: "500", BYTES: "2147483647"}),
        ({ROWS: "10000", BYTES: "64b"}, False, {ROWS: "500", BYTES: "64b"}),
        ({ROWS: "100", BYTES: "64b"}, True, {ROWS: "100", BYTES: "2147483647"}),
        ({ROWS: "0"}, True, {ROWS: "500"}),
    ],
)
def test_limits_are_those_of_the_block(before: dict[str, str], is_size_known: bool, inside: dict[str, str]) -> None:
    """Spark measures a batch at each row, unless its number of rows limits its size. Spark 3.5 does not measure."""
    session: Any = Session(**before)
    with limited_batches(session, 500, is_size_known=is_size_known):
        assert session.settings == inside
    assert session.settings == before
    with pytest.raises(RuntimeError), limited_batches(session, 500, is_size_known=is_size_known):
        raise RuntimeError
    assert session.settings == before


@pytest.mark.slow
def test_garbage_collections_of_a_worker_leave_out_its_modules() -> None:
    """Objects that come later are still collected, also after the next task."""
    gc.unfreeze()
    try:
        with sparing_next_tasks():
            assert gc.get_freeze_count() > 0
        later = [object() for _ in range(10)]
        with sparing_next_tasks():
            assert any(later is tracked for tracked in gc.get_objects())
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("archive", "is_read_again"),
    [
        ("spark-core_2.13-4.0.5.jar", False),
        ("pyspark.zip", False),
        ("py4j-0.10.9.9-src.zip", False),
        ("ours.zip", True),
    ],
)
def test_a_worker_does_not_read_archives_of_spark_before_each_task(
    archive: str, is_read_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's archive can change between tasks. Modules of each archive can still be imported."""
    path, package = tmp_path / archive, f"archived_{archive.partition('.')[0].replace('-', '_')}"
    with zipfile.ZipFile(path, "w") as files:
        for name in ("__init__", "module", "later"):
            files.writestr(f"{package}/{name}.py", "")
    monkeypatch.syspath_prepend(path)
    gc.unfreeze()
    try:
        with sparing_next_tasks():
            importlib.import_module(f"{package}.module")
    finally:
        gc.unfreeze()
    assert [str(path) in sys.path_importer_cache, str(path / package) in sys.path_importer_cache] == [is_read_again] * 2
    importlib.invalidate_caches()
    importlib.import_module(f"{package}.later")
