"""The reason of a pause: the text that a header may have, and the readers that keep it."""

import pytest

from marshal_dagster.coordination.log import Append
from marshal_dagster.coordination.pause_text import origin_text
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.protocol.messages import ClaimingPartition, ReleaseGroup, render
from marshal_dagster.protocol.pause_reason import MOST_CHARACTERS, decode_reason, encode_reason
from marshal_dagster.protocol.replay import StoredRecord, parse_lines, render_record
from marshal_dagster.protocol.state import PauseOrigin
from marshal_dagster.testing import MemoryLog
from tests.members import GROUP, TOPIC, Site, about


@pytest.mark.parametrize("reason", ["x", "the database moves", "größe: 𝄞", "x" * MOST_CHARACTERS])
def test_a_reason_is_read_as_it_was_written(reason: str) -> None:
    """The longest one has 200 code points, whatever they are."""
    assert decode_reason(encode_reason(reason)) == reason


@pytest.mark.parametrize(
    "reason", ["", " x", "x ", "a\nb", "a\x1b[31m", "\u202ex", "\ud800", "x" * (MOST_CHARACTERS + 1)]
)
def test_what_is_no_reason_is_not_written(reason: str) -> None:
    """A text of several lines, or with invisible characters, would change what a terminal shows."""
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the text
        encode_reason(reason)


@pytest.mark.parametrize("value", [None, b"", b"\xff", b"a\nb", b"x" * 201, b"x" * 1_000_000, "𝄞".encode() * 201])
def test_a_header_that_is_no_reason_is_ignored(value: bytes | None) -> None:
    """No header may stop or grow a reader."""
    assert decode_reason(value) is None


def pause(instance: str, expiry_s: int = 9_000_000_000) -> bytes:
    """Return a pause of the group."""
    return render(ReleaseGroup(instance=instance, client=f"{instance}@host", group=GROUP, time_s=0, expiry_s=expiry_s))


def origin(site: Site) -> PauseOrigin | None:
    """Read the log, and return who paused the group."""
    return Rationalizer(MemoryLog(site.broker), clock=site.clock).catch_up().group_of(GROUP, TOPIC).pause_origin


def test_a_reader_keeps_the_reason_of_the_last_pause_only() -> None:
    """The next pause has its own sender, and no reason if it gives none."""
    site = Site()
    assert origin(site) is None
    site.log().append([Append(site.home, pause("jane"), "moving")])
    site.say(about(ClaimingPartition, "run1.0"))
    assert origin(site) == PauseOrigin("jane", "jane@host", "moving")
    site.log().append([Append(site.home, pause("bob"))])
    assert origin(site) == PauseOrigin("bob", "bob@host", None)


def test_a_reason_decides_nothing() -> None:
    """The state, and what is refused, is the same with and without reasons, also on a record that is no pause."""
    plain, reasoned = Site(), Site()
    for site, reason in ((plain, None), (reasoned, "moving")):
        claim = render(about(ClaimingPartition, "run1.0"))
        site.log().append([Append(site.home, value, reason) for value in (pause("jane"), claim, b"x", pause("bob", 0))])
    first, second = (site.world().partitions[site.home] for site in (plain, reasoned))
    assert (first.groups, first.refused, first.invalid) == (second.groups, second.refused, second.invalid)


def test_a_stored_log_keeps_reasons() -> None:
    """A line of `tail --json` has the reason only if the record has one; another text is ignored."""
    record = StoredRecord(0, 5, 7, pause("jane"), "moving")
    assert list(parse_lines([render_record(record)])) == [record]
    assert "reason" not in render_record(StoredRecord(0, 5, 7, b"x"))
    (read,) = parse_lines(['{"partition": 0, "offset": 1, "timestamp": 2, "value": null, "reason": ["x"]}'])
    assert read.reason is None


@pytest.mark.parametrize(
    ("by", "text"),
    [
        (PauseOrigin("operator.1", "jane@host", "moving"), "jane@host (reason: moving)"),
        (PauseOrigin("operator.1", "jane@host"), "jane@host"),
        (PauseOrigin("operator.1"), "operator.1"),
        (PauseOrigin("setting-positions.1", "jane@host"), "jane@host, for the time of a change"),
        (PauseOrigin(None), "an unknown member"),
    ],
)
def test_a_pause_names_its_sender_and_its_reason(by: PauseOrigin, text: str) -> None:
    """A state that was read from an older snapshot has the instance only."""
    assert origin_text(by) == text
