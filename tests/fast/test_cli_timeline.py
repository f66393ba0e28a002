"""`timeline`: which records it reads and draws, what it writes, and its errors."""

from pathlib import Path

import pytest

from marshal_dagster._internal import extras
from marshal_dagster._internal.extras import Extra
from marshal_dagster.cli.timeline import live_timeline
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import coordination_partition
from marshal_dagster.protocol.replay import StoredRecord, render_record
from marshal_dagster.testing import MemoryBroker, MemoryLog
from marshal_dagster.timeline.builder import Wanted
from tests.cli import REPOSITORY, call
from tests.fast.test_timeline_builder import BEAT, CLAIM, RELEASE, SETTINGS, T0, seconds, spelled
from tests.timeline_logs import incident, lines

VECTOR = REPOSITORY / "tests" / "vectors" / "marshal-log.jsonl"
CLAIMS = 78
"""How many claims the stored log has."""


@pytest.fixture
def broker() -> MemoryBroker:
    """A log of 8 coordination partitions: run a released its claim, run b has held the partition since."""
    broker, home = MemoryBroker(8), coordination_partition("ev", 8)
    broker.append(home, SETTINGS.encode(), T0)
    for second, text in enumerate([f"{CLAIM} a", f"{BEAT} a 0", f"{RELEASE} a 0", f"{CLAIM} b", f"{BEAT} b 0"], 1):
        broker.append(home, spelled(text).encode(), T0 + second * 1_000)
    return broker


def drawn_claims(broker: MemoryBroker, wanted: Wanted, now_s: int = 60) -> list[str]:
    """Return the instances whose claims are drawn."""
    found = live_timeline(MemoryLog(broker), wanted, T0 + now_s * 1_000, 1)
    return [bar.owner.instance for bar in found.bars]


def test_a_live_log_is_read_from_its_beginning_and_drawn_until_now(broker: MemoryBroker) -> None:
    """The picture ends at the present, so an owner that went silent is stale in it."""
    found = live_timeline(MemoryLog(broker), Wanted(), T0 + 60_000, 1)
    assert seconds(found.span) == (0, 60)
    assert [seconds(span) for span in found.bars[-1].stale] == [(25, 60)]
    assert (found.records, found.notes) == (6, [])


def test_only_claims_after_the_beginning_of_the_picture_are_drawn(broker: MemoryBroker) -> None:
    """A claim that is still held is drawn, whenever it began."""
    assert drawn_claims(broker, Wanted(start_ms=T0 + 2_500)) == ["a.1", "b.1"]
    assert drawn_claims(broker, Wanted(start_ms=T0 + 20_000)) == ["b.1"]


def test_nothing_after_the_end_of_the_picture_is_drawn(broker: MemoryBroker) -> None:
    """Records after it are not read."""
    found = live_timeline(MemoryLog(broker), Wanted(end_ms=T0 + 2_500), T0 + 60_000, 1)
    assert [(bar.owner.instance, bar.end_ms) for bar in found.bars] == [("a.1", None)]
    assert seconds(found.span) == (0, 2.5)


def test_a_group_that_the_log_does_not_have_is_an_error(broker: MemoryBroker) -> None:
    """The error names those that it has."""
    with pytest.raises(ConfigurationError, match="the log has no group 'h'; it has 'g'"):
        drawn_claims(broker, Wanted(group="h"))


def test_a_log_without_its_first_records_is_only_observed(broker: MemoryBroker) -> None:
    """Retention has deleted them."""
    home = coordination_partition("ev", 8)
    broker.retain_from(home, 3)
    found = live_timeline(MemoryLog(broker), Wanted(), T0 + 60_000, 1)
    assert f"coordination partition {home} begins at offset 3" in found.notes[0]


@pytest.mark.slow
def test_a_stored_log_becomes_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The line on stdout shows where it is, what it has and how large it is."""
    page = tmp_path / "log.html"
    answer = call(capsys, "timeline", VECTOR, "-o", page)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"{page}: 74 partitions and {CLAIMS} claims from 365 records, 1.")
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_json_has_the_page_and_what_it_shows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The size is in bytes, the times in unix ms."""
    page = tmp_path / "log.html"
    found = call(capsys, "timeline", VECTOR, "-o", page, "--group", "takeover", "--json").json
    assert (found["page"], found["bytes"]) == (str(page), page.stat().st_size)
    assert (found["partitions"], found["claims"], found["records"]) == (4, 8, 365)
    assert found["start"] < found["end"]


@pytest.mark.slow
def test_since_is_counted_back_from_the_last_record_of_a_stored_log(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first group of the log was gone by then."""
    page = tmp_path / "log.html"
    found = call(capsys, "timeline", VECTOR, "-o", page, "--since", "10m", "--json").json
    assert (found["claims"], found["end"] - found["start"]) == (72, 600_000)


@pytest.mark.slow
def test_a_log_of_one_coordination_partition_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The number of coordination partitions follows from the topics, not only from the largest number in the log."""
    log, page = tmp_path / "log.jsonl", tmp_path / "log.html"
    log.write_text("".join(lines(incident())))
    found = call(capsys, "timeline", log, "-o", page, "--json").json
    assert (found["partitions"], found["claims"]) == (3, 10)
    assert call(capsys, "timeline", log, "-o", page, "--coordination-partitions", "3", "--json").json["claims"] == 0


def test_an_empty_log_says_so_in_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """So does a picture of a time without claims."""
    log, page = tmp_path / "log.jsonl", tmp_path / "log.html"
    log.write_text("")
    assert call(capsys, "timeline", log, "-o", page).code == 0
    assert "The log has no records" in page.read_text()
    log.write_text(render_record_text(f"{CLAIM} a", 0) + render_record_text(f"{RELEASE} a 0", 1))
    window = ("--since", "2026-12-01T00:00:00Z", "--until", "2026-12-02T00:00:00Z")
    assert call(capsys, "timeline", log, "-o", page, *window).code == 0
    assert "No claim was held and no record was written from 2026-12-01" in page.read_text()


def render_record_text(text: str, offset: int) -> str:
    """Return a line of a stored log."""
    return render_record(StoredRecord(0, offset, T0, spelled(text).encode())) + "\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a FILE that `tail --json` wrote, or --since"),
        ([VECTOR, "--since", "soon"], "--since: 'soon' is neither a duration"),
        (
            [VECTOR, "--until", "2020-01-01T00:00:00Z", "--since", "2021-01-01T00:00:00Z"],
            "--since is not before the end",
        ),
        ([VECTOR, "--group", "a/b"], "--group: 'a/b' cannot be a name"),
        ([VECTOR, "--group", "shops"], "the log has no group 'shops'"),
        ([VECTOR, "--topic", "shops"], "the log has no topic 'shops'; it has '"),
        ([VECTOR, "--topic", "a b"], "--topic: 'a b' is not a name that Kafka allows for a topic"),
        ([VECTOR, "-o", "/nowhere/page.html"], "the page /nowhere/page.html cannot be written: No such file"),
        (["nowhere.jsonl"], "file nowhere.jsonl cannot be read"),
    ],
)
def test_what_is_wrong_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], says: str
) -> None:
    """A mistake is wrong usage, and no page is written."""
    monkeypatch.chdir(tmp_path)
    answer = call(capsys, "timeline", *arguments)
    assert answer.code == 2
    assert says in answer.err
    assert not list(tmp_path.iterdir())


def test_without_its_extra_the_command_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before anything is read."""
    monkeypatch.setitem(extras.MODULES, Extra.TIMELINE, "no_such_module")
    answer = call(capsys, "timeline", "nowhere.jsonl")
    assert answer.code == 2
    assert answer.error.endswith("which is not installed: pip install 'marshal-dagster[timeline]'")
