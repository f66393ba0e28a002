"""Check the sink in memory with the conformance kit."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.conformance import Case, Target
from marshal_dagster.sinks.conformance.target import LocalFrame, part
from marshal_dagster.testing.memory_sink import MemorySink, rows_of_frame
from tests.sink_kit import SHORT_CASES


class MemoryTarget(Target):
    """An output in memory, whose one sink all writers share."""

    def __init__(self) -> None:
        self.made = MemorySink()

    def sink(self) -> MemorySink:
        """Return the sink."""
        return self.made

    def shared_sink(self) -> MemorySink:
        """Return a sink for several groups over the same rows."""
        shared = MemorySink(shared_by_groups=True)
        shared._stored, shared._lock = self.made._stored, self.made._lock
        return shared

    def rows(self) -> Iterable[tuple[int, int | None, str]]:
        """Return the rows of the output."""
        return [(row["partition"], row.get("offset"), row["value"]) for row in self.made.rows()]


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_the_sink_conforms(case: Case) -> None:
    """Each case that needs no other process passes."""
    case.check(MemoryTarget())


class PandasFrame:
    """A stand-in for a frame of pandas."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.columns = tuple(rows[0])

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        """Return the rows."""
        assert orient == "records"
        return list(self.rows)


@pytest.mark.parametrize("kind", [list, PandasFrame])
def test_rows_of_any_kind(kind: type) -> None:
    """Lists of dicts and frames of pandas are written like Spark's frames."""
    rows = [{"partition": 0, "shop": "north"}, {"partition": 0, "shop": "south"}]
    sink = MemorySink()
    wrote = sink.write(kind(rows), [part(0, 0, 2)], dict)
    assert sink.rows() == rows
    assert wrote.rows == {0: 2}
    assert sink.ranges() == [part(0, 0, 2)]
    with pytest.raises(ConfigurationError, match="no column 'partition'"):
        rows_of_frame(kind([{"shop": "north"}]))


@pytest.mark.parametrize("kind", [list, PandasFrame])
@pytest.mark.parametrize("name", ["partition", "offset"])
@pytest.mark.parametrize("value", [0.0, True, "0", float("nan")])
def test_what_is_no_integer_of_a_message_is_refused(kind: type, name: str, value: object) -> None:
    """Other sinks refuse a column of such a type. A column of pandas has floats if one of its integers is null."""
    with pytest.raises(ConfigurationError, match=f"{value!r} in column '{name}'"):
        MemorySink().write(kind([{"partition": 0, "offset": 0, name: value}]), [part(0, 0, 2)], dict)


@pytest.mark.parametrize("kind", [list, PandasFrame])
def test_columns_that_other_sinks_confuse_are_refused(kind: type) -> None:
    """Spark does not distinguish names that differ only in case."""
    for names, found in (
        (("partition", "Offset"), "treats 'Offset' as 'offset'"),
        (("partition", "shop", "Shop"), "same name"),
    ):
        with pytest.raises(ConfigurationError, match=found):
            rows_of_frame(kind([dict.fromkeys(names, 0)]))
    repeated = PandasFrame([{"partition": 0, "shop": 1}])
    repeated.columns = ("partition", "shop", "shop")
    with pytest.raises(ConfigurationError, match="same name"):
        rows_of_frame(repeated)


def test_rows_of_spark() -> None:
    """A frame with `collect` is read once."""
    frame = LocalFrame(["partition", "value"], ((0, "a"),))
    assert rows_of_frame(frame) == [{"partition": 0, "value": "a"}]
    assert frame.reads == ["rows"]
