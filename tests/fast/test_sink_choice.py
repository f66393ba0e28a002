"""The page on the choice of a sink has the rates of the kept results of benchmarks, and names each sink."""

import json
import re
from typing import Final

import pytest

from benchmarks import machine

PAGE: Final = (machine.TOP / "docs" / "how-to" / "choosing-a-sink.md").read_text()
MEASURED: Final = {
    "`FileSink`": "file_sink",
    "`DeltaSink`": "delta_sink",
    "`PostgresSink`": "postgres_sink",
    '`PostgresSink`, `mode="upsert"`': "postgres_upsert",
    "`MariaDBSink`": "mariadb_sink",
    "`IcebergSink`": "iceberg_sink",
    "`KafkaSink`": "kafka_sink",
}
NOT_CHOSEN: Final = {"`Sink`", "`RemoteSink`"}
"""The interface, and the sink of a process outside of the run."""
SIZES: Final = ("10,000 rows", "100,000 rows", "1,000,000 rows")


def cells_of(first: str, heading: str) -> list[str]:
    """Return the cells of the row below a heading that begins with `first`."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    [found] = [row[1:] for row in rows if row[0] == first]
    return found


@pytest.mark.parametrize(("sink", "benchmark"), MEASURED.items())
def test_the_page_has_the_kept_rates(sink: str, benchmark: str) -> None:
    """Each cell is the rate, and in brackets its ratio to Spark's own writer."""
    result = json.loads((machine.TOP / "benchmarks" / "results" / f"{benchmark}.json").read_text())
    cases = {case["name"]: case for case in result["cases"]}
    expected = [
        f"{cases[size]['ours']:,.0f} ({cases[size]['ratio']:.2f})" if size in cases else "not measured"
        for size in SIZES
    ]
    assert cells_of(sink, "What it costs") == expected


def test_the_page_names_each_sink_in_each_table() -> None:
    """A new sink must be added to each of them."""
    import marshal_dagster
    from marshal_dagster import sinks

    exported = {name for name in dir(marshal_dagster) if name.endswith("Sink") and hasattr(sinks, name)}
    named = {f"`{name}`" for name in exported if hasattr(getattr(sinks, name), "verdicts")} - NOT_CHOSEN
    assert named == set(re.findall(r"`\w+Sink`", PAGE.partition("\n| one step ")[0].rpartition("\n| | ")[2]))
    for heading in ("Limits", "What was tried"):
        for sink in named:
            assert cells_of(sink, heading)
