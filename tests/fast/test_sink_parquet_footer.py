"""Row counts from Parquet footers."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from marshal_dagster.sinks.files.parquet_footer import NotParquetError, parquet_rows


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 8191, 8192, 100_003])
@pytest.mark.parametrize("columns", [1, 14, 15, 40])
def test_the_footer_reports_the_rows(tmp_path: Path, rows: int, columns: int) -> None:
    """The counts are correct for varints of every size, after short and long lists of columns of every type."""
    flat = pa.array(range(rows), pa.int64())
    kinds = [
        flat,
        flat.cast(pa.string()),
        flat.cast(pa.decimal128(30, 3)),
        flat.cast(pa.timestamp("us", tz="UTC")),
        pa.StructArray.from_arrays([flat, flat], ["a", "b"]),
        pa.array([[1, None]] * rows, pa.list_(pa.int8())),
        pa.array([[("k", True)]] * rows, pa.map_(pa.string(), pa.bool_())),
    ]
    table = pa.table({f"column_{number}": kinds[number % len(kinds)] for number in range(columns)})
    table = table.replace_schema_metadata({"key": "value" * 100})
    path = tmp_path / "rows.parquet"
    parquet.write_table(table, path, row_group_size=50_000, compression="zstd")
    assert parquet_rows(path) == rows


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PAR1",
        b"PAR1PAR1PAR1",
        b"not a parquet file at all",
        b"PAR1" + (1000).to_bytes(4, "little") + b"PAR1",
        b"PAR1\x15\x02\x19" + (3).to_bytes(4, "little") + b"PAR1",
        b"PAR1\x15\x02\x00" + (3).to_bytes(4, "little") + b"PAR1",
        b"PAR1\x1e\x02\x00" + (3).to_bytes(4, "little") + b"PAR1",
    ],
)
def test_what_is_no_whole_parquet_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    """A truncated file, or one of another format, raises an error."""
    path = tmp_path / "cut.parquet"
    path.write_bytes(content)
    with pytest.raises(NotParquetError):
        parquet_rows(path)


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    """A truncated file never returns a count, wherever it is cut."""
    path = tmp_path / "whole.parquet"
    parquet.write_table(pa.table({"n": [1, 2, 3]}), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(NotParquetError):
            parquet_rows(path)
