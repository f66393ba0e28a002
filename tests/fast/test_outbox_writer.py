"""What cannot be an outbox is told when its writer is made."""

from collections.abc import Callable

import pytest

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.outbox.events import OutgoingEvents
from marshal_dagster.outbox.writer import Outbox

Make = Callable[..., object]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_bytes": 0}, "max_bytes: 0; give 1 to 100000000"),
        ({"max_bytes": 100_000_001}, "max_bytes: 100000001; give 1 to"),
        ({"name": "marshal_outboxes"}, "lists the outboxes"),
        ({"name": ""}, "name: ''; give a name of 1 to"),
        ({"name": "o" * 60}, "give a name of 1 to"),
        ({"schema": "s\0"}, "schema: "),
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
    """By both ways to write, in one line."""
    with pytest.raises(ConfigurationError, match=said):
        make(**fields)


def test_the_largest_record_there_may_be() -> None:
    """And the smallest."""
    assert "outbox" in repr(Outbox(max_bytes=100_000_000))
    assert "topic" in repr(OutgoingEvents("topic", max_bytes=1))
