"""Invalid outbox options and records are rejected before anything reaches the database."""

import math
from collections.abc import Callable
from typing import Any, Self, cast

import pytest

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.outbox.events import OutgoingEvents
from marshal_dagster.outbox.options import HarvesterOptions
from marshal_dagster.outbox.writer import Outbox, OutboxRecord

Make = Callable[..., object]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_bytes": 0}, "max_bytes is 0; it must be from 1 to 100000000"),
        ({"max_bytes": 100_000_001}, "max_bytes is 100000001; it must be from 1 to"),
        ({"name": "marshal_outboxes"}, "lists the outboxes"),
        ({"name": ""}, "name: ''; give a name of 1 to"),
        ({"name": "o" * 60}, "give a name of 1 to"),
        ({"schema": "s\0"}, "schema: "),
        ({"name": "half \ud83d"}, r"name: 'half \\ud83d'; give a name of 1 to"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda name="outbox", **fields: Outbox(name, **fields),
        lambda name="outbox", **fields: OutgoingEvents("topic", outbox=name, **fields),
    ],
    ids=["stash", "events"],
)
def test_what_cannot_be_an_outbox_is_refused(make: Make, fields: dict[str, object], said: str) -> None:
    """Both ways to write reject an invalid option, in one line."""
    with pytest.raises(ConfigurationError, match=said):
        make(**fields)


def test_the_largest_record_there_may_be() -> None:
    """The largest and the smallest record limit are accepted."""
    assert "outbox" in repr(Outbox(max_bytes=100_000_000))
    assert "topic" in repr(OutgoingEvents("topic", max_bytes=1))


class Cursor:
    """A cursor that accepts rows as psycopg's does, and stores nothing."""

    rowcount = -1

    def __enter__(self) -> Self:
        return self

    def nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""

    cursor = __enter__
    __exit__ = execute = executemany = nothing


def by_psycopg(records: Any) -> int:  # noqa: ANN401 - anything
    """Write with psycopg."""
    return Outbox().stash(cast("Any", Cursor()), records)


def by_sqlalchemy(records: Any) -> int:  # noqa: ANN401 - anything
    """Write with SQLAlchemy."""
    return Outbox().stash_sqlalchemy(cast("Any", Cursor()), records)


HALF = "half \ud83d"


@pytest.mark.parametrize("way", [by_psycopg, by_sqlalchemy])
@pytest.mark.parametrize(
    ("record", "said"),
    [
        (OutboxRecord("t", HALF), "value: character 5 is half of a surrogate pair.*give bytes, or text without it"),
        (OutboxRecord("t", "v", HALF), "key: character 5 is half"),
        (OutboxRecord("t", "v", headers={HALF: "v"}), "headers: the name: character 5 is half"),
        (OutboxRecord("t", "v", headers={"h": HALF}), "header 'h': character 5 is half"),
        (OutboxRecord(HALF, "v"), "topic: .*is not a name that Kafka allows"),
        (OutboxRecord(cast("Any", None), "v"), "topic is of type NoneType; it must be text"),
        (OutboxRecord("t", cast("Any", 7)), "value is of type int; it must be bytes, text or None"),
        (OutboxRecord("t", "v", headers=cast("Any", 7)), "headers is of type int; it must be a mapping, or pairs"),
        (
            OutboxRecord("t", "v", headers=cast("Any", None)),
            "headers is of type NoneType; it must be a mapping, or pairs",
        ),
        (OutboxRecord("t", "v", headers=cast("Any", "ab")), "headers is of type str; it must be a mapping, or pairs"),
        (
            OutboxRecord("t", "v", headers=cast("Any", ["ab"])),
            "headers has an entry of type str; each must be a pair of name and content",
        ),
        (
            OutboxRecord("t", "v", headers=cast("Any", [("a", "b", "c")])),
            "headers has an entry of type tuple; each must be a pair",
        ),
        (OutboxRecord("t", "v", headers=cast("Any", {7: "v"})), "headers has a name of type int; it must be text"),
        (OutboxRecord("t", "v", headers={"a\0": "v"}), "headers: the name .* has a NUL"),
        ({"topic": "t", "value": "v"}, "records has an entry of type dict; each must be an OutboxRecord"),
        (None, "records has an entry of type NoneType; each must be an OutboxRecord"),
    ],
)
def test_an_invalid_record_is_refused(way: Callable[[Any], int], record: object, said: str) -> None:
    """Both ways to write reject an invalid record, in one line, before anything reaches the database."""
    with pytest.raises(ConfigurationError, match=f"^{said}"):
        way([record])


@pytest.mark.parametrize("way", [by_psycopg, by_sqlalchemy])
def test_a_single_record_is_refused(way: Callable[[Any], int]) -> None:
    """The error for a single record advises to pass a sequence."""
    with pytest.raises(
        ConfigurationError, match=r"records is a single OutboxRecord; it must be a sequence of them, such as \[record\]"
    ):
        way(OutboxRecord("t", "v"))


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["poll_interval_s", "transaction_timeout_s"])
def test_an_invalid_time_of_a_harvester_is_refused(name: str, seconds: float) -> None:
    """An invalid time is rejected, because the harvester's thread would fail with another error, or never wait."""
    with pytest.raises(ConfigurationError, match=f"{name} is .*; it must be above 0"):
        HarvesterOptions(**{name: seconds})  # type: ignore[arg-type]
