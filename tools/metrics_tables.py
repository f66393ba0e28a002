"""Write the tables of docs/reference/metrics.md from the metrics' definitions: `python -m tools.metrics_tables`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from marshal_dagster.exporter.definitions import DEFINITIONS
from marshal_dagster.telemetry.metrics import CoordinatorMetrics, Metrics, OutboxMetrics

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
_TABLE: Final = re.compile(
    r"(<!-- begin: metrics of (\w+), written by `make dashboards` -->\n).*?(<!-- end -->\n)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Instrument:
    """An OpenTelemetry instrument."""

    name: str
    kind: str
    unit: str
    about: str

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus' text format; a histogram has this name with `_bucket`, `_count` and `_sum`."""
        base = self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")
        return f"{base}_total" if self.kind == "counter" else base


@dataclass(slots=True)
class _Recorder:
    """A meter that lists the instruments that are created."""

    instruments: list[Instrument] = field(default_factory=list)

    def create_counter(self, name: str, unit: str, about: str) -> None:
        """List a counter."""
        self.instruments.append(Instrument(name, "counter", unit, about))

    def create_gauge(self, name: str, unit: str, about: str) -> None:
        """List a gauge."""
        self.instruments.append(Instrument(name, "gauge", unit, about))

    def create_histogram(self, name: str, unit: str, about: str, **_: object) -> None:
        """List a histogram."""
        self.instruments.append(Instrument(name, "histogram", unit, about))


def instruments(kind: type[Metrics | OutboxMetrics | CoordinatorMetrics]) -> list[Instrument]:
    """Return the instruments of a class, in the order of their definitions."""
    recorder = _Recorder()
    kind(cast("Any", recorder))
    return recorder.instruments


def exposed_names() -> set[str]:
    """Return the names of all series that a scrape of the exporter, a harvester or a coordinator can have."""
    names = {definition.name for definition in DEFINITIONS}
    for kind in (Metrics, OutboxMetrics, CoordinatorMetrics):
        for found in instruments(kind):
            endings = ("_bucket", "_count", "_sum") if found.kind == "histogram" else ("",)
            names |= {found.prometheus_name + ending for ending in endings}
    return names


def tables() -> dict[str, list[str]]:
    """Return the lines of each table, by its name in the page."""
    return {
        "batches": list(_instrument_lines(instruments(Metrics))),
        "outbox": list(_instrument_lines(instruments(OutboxMetrics))),
        "coordinator": list(_instrument_lines(instruments(CoordinatorMetrics))),
        "exporter": list(_exporter_lines()),
    }


def _instrument_lines(found: Sequence[Instrument]) -> Iterator[str]:
    yield "| instrument | in Prometheus | type | unit | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for each in found:
        unit = each.unit.strip("{}")
        yield f"| `{each.name}` | `{each.prometheus_name}` | {each.kind} | {unit} | {_cell(each.about)} |"


def _exporter_lines() -> Iterator[str]:
    yield "| metric | type | labels | meaning |"
    yield "| --- | --- | --- | --- |"
    for found in DEFINITIONS:
        labels = ", ".join(f"`{label}`" for label in found.labels)
        yield f"| `{found.name}` | {found.kind} | {labels} | {_cell(found.about)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_tables(page: str) -> str:
    """Return the page with its tables as they should be."""
    known = tables()
    return _TABLE.sub(lambda found: found[1] + "\n" + "\n".join(known[found[2]]) + "\n\n" + found[3], page)


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
