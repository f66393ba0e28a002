"""The page of supported versions, `docs/reference/platforms.md`, written from the rows of the results."""

from collections.abc import Iterator, Mapping
from typing import Final

from tests.platforms.environments import TOP
from tests.platforms.results import PlatformRow, newest_rows
from tests.platforms.targets import TARGETS, Kind, Target, targets_of

PAGE: Final = TOP / "docs" / "reference" / "platforms.md"
_COMMANDS: Final = {
    Kind.SPARK: "make test-platforms",
    Kind.TUTORIAL: "make test-platforms",
    Kind.PYTHON: "make test-pythons",
    Kind.DAGSTER: "make test-dagsters",
    Kind.BROKER: "make test-brokers",
}
_INTRODUCTIONS: Final = {
    Kind.SPARK: """## Spark

On each version the tests claim and read batches, decode records, and write through the sinks. These are the sinks for
files, PostgreSQL and Kafka, for Delta Lake on 3.5 and 4.0, and in the long list for MariaDB. The tests also kill
sessions, repeat their batches, and run at most once. `spark_settings` and `delta_settings` choose the jars
that fit.""",
    Kind.TUTORIAL: """## The tutorial

The files of the [tutorial](docs/tutorials/first-batch.md): a run, a failed run that the sensor repeats, and the
totals; and the [script without Dagster](docs/how-to/plain-python.md). Both run on the oldest Spark and Python,
and on newer ones.""",
    Kind.PYTHON: """## Python

The fast tests, which need neither Java nor a service.""",
    Kind.DAGSTER: """## Dagster

The fast tests, with the lowest Dagster that is allowed and the newest.""",
    Kind.BROKER: """## Kafka brokers

Claims of partitions and of ranges, transactions, a batch that Spark reads, pause, positions and the outbox. Kafka 2.8
runs with ZooKeeper.""",
}
_TITLE: Final = """# Supported versions

Each row is a run of the tests with that version. The rows are in `tests/results/platforms.jsonl`, and
`make docs-platforms` writes this page from them. A version that was not run may work."""


def render(rows: Mapping[tuple[str, str], PlatformRow]) -> str:
    """Return the page for the newest row of each version."""
    parts = [_TITLE]
    for kind in Kind:
        parts += [_INTRODUCTIONS[kind], "\n".join(_table(kind, rows)), f"Run by `{_COMMANDS[kind]}`."]
        notes = list(_notes(kind, rows))
        if notes:
            parts.append("\n".join(notes))
    return "\n\n".join(parts).replace("](docs/", "](../") + "\n"


def write_page() -> None:
    """Write the page."""
    PAGE.write_text(render(newest_rows()), encoding="utf-8")


def _table(kind: Kind, rows: Mapping[tuple[str, str], PlatformRow]) -> Iterator[str]:
    yield "| version | result | tests | seconds | ran with | commit |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for target in targets_of(kind):
        row = rows.get((kind, target.version))
        yield _line(target, row) if row else f"| {target.version} | not run | | | | |"


def _line(target: Target, row: PlatformRow) -> str:
    result = f"{row.failed} failed" if row.failed else "passed"
    tests = f"{row.passed + row.failed}{', the short list' if row.is_short else ''}"
    with_ = {
        Kind.SPARK: f"Spark {row.installed}, Scala {row.scala}, Python {row.python}",
        Kind.TUTORIAL: f"Spark {row.installed}, Scala {row.scala}, Python {row.python}",
        Kind.PYTHON: f"Python {row.installed}",
        Kind.DAGSTER: f"Dagster {row.installed}, Python {row.python}",
        Kind.BROKER: f"Kafka {row.installed}",
    }[target.kind]
    return f"| {target.version} | {result} | {tests} | {row.seconds:.0f} | {with_} | `{row.commit}` |"


def _notes(kind: Kind, rows: Mapping[tuple[str, str], PlatformRow]) -> Iterator[str]:
    for target in TARGETS:
        if target.kind is not kind:
            continue
        row = rows.get((kind, target.version))
        for what, why in (row.left_out if row else target.not_tested).items():
            yield f"- {target.version}: without {what}, because {why}."
        for name in row.failures if row else ():
            yield f"- {target.version}: `{name}` failed."
