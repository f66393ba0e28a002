"""`tail`: which records it shows, in which order and with which verdicts, from an in-memory log."""

import heapq
import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest

from marshal_dagster.admin.record_sentences import JudgedRecord
from marshal_dagster.admin.texts import settings_text
from marshal_dagster.cli import output, tail
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.record_filter import EVERYTHING, RecordFilter
from marshal_dagster.cli.tail import Reader, explained_line, explained_lines, record_line, shown
from marshal_dagster.errors import CoordinationLogChangedError, TopicNotFoundError
from marshal_dagster.protocol.messages import (
    GroupMessage,
    GroupSettings,
    Heartbeat,
    Invalid,
    Mark,
    Message,
    RangeHeartbeat,
    ReleaseGroup,
    coordination_partition,
    parse,
    render,
)
from marshal_dagster.protocol.replay import StoredRecord, parse_lines, render_record
from marshal_dagster.protocol.world import ACCEPTED, Verdict, VerdictKind, World
from marshal_dagster.testing import MemoryBroker, MemoryLog
from tests.admin_fixtures import act
from tests.cli import call
from tests.log_generator import generate
from tests.members import raiser

RECORDS = 2_000


@pytest.fixture(scope="module")
def records() -> list[tuple[int, int, int, bytes | None]]:
    """A log with all kinds of records, whose offsets have no gap."""
    ends = dict.fromkeys(range(4), 0)
    dense = []
    for partition, _, at_ms, value in generate(5, RECORDS):
        dense.append((partition, ends[partition], at_ms, value))
        ends[partition] += 1
    return dense


@pytest.fixture
def broker(records: list[tuple[int, int, int, bytes | None]]) -> MemoryBroker:
    """A coordination topic with that log."""
    broker = MemoryBroker(4)
    for partition, _, at_ms, value in records:
        broker.append(partition, value, at_ms)
    return broker


def reader(broker: MemoryBroker, *, judge: bool = True) -> Reader:
    """Open a reader at the log's start."""
    return Reader(MemoryLog(broker), judge=judge, timeout_s=1)


def everything(records: list[tuple[int, int, int, bytes | None]]) -> list[JudgedRecord]:
    """Judge each record, and merge the coordination partitions by log time."""
    world = World(4)
    seen: dict[int, list[JudgedRecord]] = {}
    for number in range(4):
        world.start(number, 0)
    for partition, offset, at_ms, value in records:
        verdict = world.apply(partition, offset, at_ms, value)
        log_time_ms = world.partitions[partition].log_time_ms
        assert log_time_ms is not None
        seen.setdefault(partition, []).append(
            JudgedRecord(StoredRecord(partition, offset, at_ms, value), log_time_ms, verdict)
        )
    return list(heapq.merge(*(seen[number] for number in sorted(seen)), key=lambda each: each.log_time_ms))


@pytest.mark.slow
def test_all_records_are_shown_with_the_verdicts_that_the_rules_give(
    broker: MemoryBroker, records: list[tuple[int, int, int, bytes | None]]
) -> None:
    """From the start, each record appears once, by log time, with the verdict of the world state."""
    found = [seen for batch in shown(reader(broker), lines=None, follow=False) for seen in batch]
    assert [replace(seen, before=None) for seen in found] == everything(records)
    assert {seen.verdict.kind for seen in found if seen.verdict} == set(VerdictKind)


@pytest.mark.parametrize("lines", [0, 1, 10, 700, RECORDS + 5])
def test_the_last_records_are_those_at_the_end_of_all(
    broker: MemoryBroker, records: list[tuple[int, int, int, bytes | None]], lines: int
) -> None:
    """The last N records by log time are shown, with verdicts based on all earlier records."""
    (found,) = shown(reader(broker), lines=lines, follow=False)
    assert [replace(seen, before=None) for seen in found] == (everything(records)[-lines:] if lines else [])


def test_without_verdicts_the_same_records_come(
    broker: MemoryBroker, records: list[tuple[int, int, int, bytes | None]]
) -> None:
    """Without verdicts the lines are the log's own, and replaying them results in the same log."""
    batches = shown(reader(broker, judge=False), lines=None, follow=False)
    lines = [render_record(seen.record) for batch in batches for seen in batch]
    assert sorted((each.partition, each.offset) for each in parse_lines(lines)) == sorted(
        (partition, offset) for partition, offset, _, _ in records
    )
    assert {(each.partition, each.offset): (each.timestamp_ms, each.value) for each in parse_lines(lines)} == {
        (partition, offset): (at_ms, value) for partition, offset, at_ms, value in records
    }


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("wanted", "note"),
    [
        (RecordFilter(group="shop"), "the log has no group 'shop'; it has 'shops', 'audit'"),
        (RecordFilter(topic="order"), "no record is about topic 'order'; `marshal-dagster lag` lists the topics"),
        (RecordFilter(group="audit", topic="orders"), "no record of group 'audit' is about topic 'orders'"),
        (RecordFilter(group="shops", topic="orders"), ""),
    ],
)
def test_a_name_that_no_record_has_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: RecordFilter, note: str, follow: bool
) -> None:
    """It may be misspelt. With `--follow` the note is shown before the wait for new records."""
    broker = MemoryBroker(1)
    for value in (b"ClaimingPartition/1/1/run.1/c/shops/orders/0", b"ReleaseGroup/1/1/op.1/c/audit//0/9"):
        broker.append(0, value, 1)
    opened = Reader(MemoryLog(broker), judge=True, timeout_s=1, wanted=wanted)
    monkeypatch.setattr(output, "wait", lambda _: raiser(KeyboardInterrupt())())

    with pytest.raises(KeyboardInterrupt) if follow else nullcontext():
        list(shown(opened, lines=None, follow=follow))

    shown_note = capsys.readouterr().err
    assert shown_note.startswith(note)
    assert bool(shown_note) == bool(note)


@pytest.mark.parametrize(
    ("wanted", "until_ms"),
    [
        (RecordFilter(group="revoked"), None),
        (RecordFilter(topic="late"), None),
        (RecordFilter(group="shops", topic="late"), None),
        (RecordFilter(group="shops"), 5),
        (RecordFilter(topic="orders"), 5),
    ],
)
def test_a_name_that_a_record_has_is_not_reported(
    capsys: pytest.CaptureFixture[str], wanted: RecordFilter, until_ms: int | None
) -> None:
    """A refused record has it too, and a record after `--until`, which may not be read."""
    broker = MemoryBroker(1)
    for value in (
        b"ClaimingPartition/1/1/run.1/c/shops/orders/0",
        b"ReleaseGroup/1/1/op.1/c/shops//0/9",
        b"ClaimingPartition/1/1/run.1/c/shops/late/0",
        b"RevokingClaim/1/1/op.1/c/revoked/orders/0/7",
    ):
        broker.append(0, value, 10)
    opened = Reader(MemoryLog(broker), judge=True, timeout_s=1, wanted=wanted)
    opened.limit(None, until_ms)
    list(shown(opened, lines=None, follow=False))
    assert capsys.readouterr().err == ("no record to show\n" if until_ms is not None else "")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("wanted", "note", "code"),
    [
        (["--group", "shop"], "the log has no group 'shop'; it has 'shops'", ExitCode.PROBLEMS),
        (["--topic", "order"], "no record is about topic 'order'", ExitCode.PROBLEMS),
        (["--group", "shops", "--partition", "7"], "no record to show", ExitCode.OK),
        (["--group", "shops"], "", ExitCode.OK),
    ],
)
def test_a_misspelt_name_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wanted: list[str],
    note: str,
    *,
    code: ExitCode,
    as_json: bool,
) -> None:
    """A script would otherwise take an empty output for a quiet group."""
    broker = MemoryBroker(1)
    broker.append(0, b"ClaimingPartition/1/1/run.1/c/shops/orders/0", 1)
    monkeypatch.setattr(tail, "open_log", lambda *_: MemoryLog(broker))
    monkeypatch.setattr(tail, "require_rights", lambda *_: None)
    answer = act(capsys, "tail", *wanted, *(["--json"] if as_json else []))
    assert (answer.code, bool(answer.out)) == (code, not note)
    assert answer.err.startswith(note)


def test_a_group_that_has_other_topics_is_not_reported_as_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """With a topic, the coordination partitions of the group's other topics are not read."""
    names = ["orders", *(f"topic-{number}" for number in range(100))]
    other = next(name for name in names if coordination_partition(name, 2) != coordination_partition("orders", 2))
    broker = MemoryBroker(2)
    value = b"ClaimingPartition/1/1/run.1/c/shops/orders/0"
    broker.append(coordination_partition("orders", 2), value, 1)
    wanted = RecordFilter(group="shops", topic=other)
    list(shown(Reader(MemoryLog(broker), judge=True, timeout_s=1, wanted=wanted), lines=None, follow=False))
    assert capsys.readouterr().err.startswith(f"no record of group 'shops' is about topic {other!r};")


def test_the_last_lines_alone_are_not_read_from_the_start(broker: MemoryBroker) -> None:
    """Without verdicts the last N records are found at the log's end."""
    opened = reader(broker, judge=False)
    (found,) = shown(opened, lines=3, follow=False)
    assert [replace(seen, verdict=None, before=None) for seen in shown_last(broker, 3)] == found


def shown_last(broker: MemoryBroker, lines: int) -> list[JudgedRecord]:
    """Return the last records as a reader with verdicts shows them."""
    (found,) = shown(reader(broker), lines=lines, follow=False)
    return found


def test_following_goes_on_with_what_comes(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last lines, each record that is appended appears once, with its verdict."""
    waits = iter([None, b"junk", b"junk", None, b"Mark/1/1/i/c/g//0"])

    def wait(_: float) -> None:
        value = next(waits)
        if value is not None:
            broker.append(2, value)

    monkeypatch.setattr(output, "wait", wait)
    batches = shown(reader(broker), lines=0, follow=True)
    assert next(batches) == []
    values = [seen.record.value for _ in range(3) for seen in next(batches)]
    assert values == [b"junk", b"junk", b"Mark/1/1/i/c/g//0"]


def test_records_before_a_future_start_are_left_out(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the command follows the log, it shows records from that time on."""
    now_ms = itertools.count(2_000_000_000_000, 1_000)
    monkeypatch.setattr(output, "wait", lambda _: broker.append(2, b"junk", next(now_ms)))
    opened = reader(broker)
    opened.limit(2_000_000_002_000, None)
    batches = shown(opened, lines=None, follow=True)
    assert [seen.record.timestamp_ms for _ in range(2) for seen in next(batches)] == [
        2_000_000_002_000,
        2_000_000_003_000,
    ]


def test_a_log_that_is_only_observed_says_so(broker: MemoryBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """A coordination partition whose start is missing is named on stderr, and refuses nothing."""
    broker.retain_from(1, 5)
    found = [seen for batch in shown(reader(broker), lines=None, follow=False) for seen in batch]
    assert "coordination partition 1 begins at offset 5: it is only observed" in capsys.readouterr().err
    verdicts = {seen.verdict.kind for seen in found if seen.record.partition == 1 and seen.verdict}
    assert verdicts == {VerdictKind.ACCEPTED, VerdictKind.INVALID}


def test_retention_that_overtakes_is_reported_and_passed(
    broker: MemoryBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records deleted before they were read are missing, the others appear, and the gap is reported."""
    opened = reader(broker)
    end = broker.bounds(3).end
    broker.retain_from(3, end - 2)
    found = [seen for batch in opened.read() for seen in batch] + [seen for batch in opened.read() for seen in batch]
    assert [seen.record.offset for seen in found if seen.record.partition == 3] == [end - 2, end - 1]
    assert f"retention deleted the records before offset {end - 2} before they were read" in capsys.readouterr().err
    others = sum(len(broker.records(number)) for number in range(3))
    assert len(found) == others + 2


@pytest.mark.slow
def test_a_log_that_was_truncated_is_an_error(broker: MemoryBroker) -> None:
    """A log that is shorter than what was read of it is not the same log."""
    opened = reader(broker)
    assert list(opened.read())
    broker.truncate(0, 1)
    with pytest.raises(CoordinationLogChangedError, match="truncated"):
        list(opened.read())


def test_a_topic_that_was_re_created_or_is_gone_is_an_error(broker: MemoryBroker) -> None:
    """A new topic with the same name is not followed."""
    opened = reader(broker)
    broker.recreate()
    with pytest.raises(CoordinationLogChangedError, match="re-created"):
        list(opened.read())
    broker.delete()
    with pytest.raises(TopicNotFoundError):
        list(opened.read())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"ClaimingPartition/1/1/i/c/g/t/3", "ClaimingPartition g t/3 by i (c)"),
        (b"Heartbeat/1/1/i/c/g/t/3/17", "Heartbeat g t/3 at 17 by i (c)"),
        (b"ReleasingPartition/1/1/i/c/g/t/3/17", "ReleasingPartition g t/3 at 17 by i (c)"),
        (b"ClaimingMessages/1/1/i/c/g/t/3/20", "ClaimingMessages g t/3 up to 20 by i (c)"),
        (b"RevokingClaim/1/1/i/c/g/t/3/5", "RevokingClaim g t/3 of epoch 5 by i (c)"),
        (b"DataTopic/1/1/i/c/g/t/3/" + b"A" * 22, f"DataTopic g t/3 is {'A' * 22} by i (c)"),
        (b"ReleaseGroup/0/1/i/c/g//0/60", "ReleaseGroup g until 1970-01-01 00:01:00.000Z by i (c)"),
        (b"Mark/1/1/i/c/g//0", "Mark g by i (c)"),
        (
            b"GroupSettings/1/1/i/c/g//0/5000/native/at_most_once/-",
            "GroupSettings g: heartbeat interval 5 s, rule set native, delivery at_most_once, features none, by i (c)",
        ),
        (None, "null"),
        (b"junk\x1b[31m\xff", r"junk\x1b[31m\xff"),
        ("Mark/1/1/\u202ei/c/g//0".encode(), r"Mark g by \u202ei (c)"),
        (b"x" * 4_000, "x" * 512),
    ],
)
def test_a_record_is_one_line_for_a_person(value: bytes | None, said: str) -> None:
    """Each type has its own text.

    An invalid record is shown as it is, without characters a terminal would interpret.
    """
    seen = JudgedRecord(StoredRecord(2, 5, 1_000, value), 1_000, ACCEPTED)
    assert str(record_line(seen)) == f"1970-01-01 00:00:01.000Z 2:5 {said}  accepted"


def test_a_verdict_says_why() -> None:
    """The verdict is followed by the reason for a refused or invalid record, or by a note."""
    seen = JudgedRecord(StoredRecord(2, 5, 0, b"x"), 0, Verdict(VerdictKind.INVALID, Invalid.UNKNOWN_TYPE))
    assert str(record_line(seen)).endswith("  invalid: unknown type")
    assert str(record_line(replace(seen, verdict=None))).endswith("2:5 x")


def test_settings_are_reported_like_everywhere() -> None:
    """The text of the settings has all their fields."""
    assert settings_text(GroupSettings(7_500, features=("ranges", "a"))) == (
        "heartbeat interval 7.5 s, rule set native, delivery at_least_once, features ranges, a"
    )


def test_explain_shows_the_same_records_as_sentences() -> None:
    """A sentence follows the log time; a refused record has the colour of its verdict."""
    seen = JudgedRecord(StoredRecord(2, 5, 0, b"x"), 0, Verdict(VerdictKind.INVALID, Invalid.UNKNOWN_TYPE))
    line = explained_line(seen)
    assert (
        str(line)
        == "1970-01-01 00:00:00.000Z A record that is not valid was skipped: unknown type. It begins with 'x'."
    )
    assert [style for _, style in line.parts] == ["dim", "red"]
    assert [style for _, style in explained_line(replace(seen, verdict=ACCEPTED)).parts] == ["dim", ""]


def test_explain_and_json_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """A stored log has the records, not sentences about them."""
    answer = call(capsys, "tail", "--explain", "--json", "-b", "localhost:1")
    assert answer.code == ExitCode.USAGE
    assert "--explain and --json contradict each other" in answer.err


def judged_with(broker: MemoryBroker, wanted: RecordFilter = EVERYTHING, *, judge: bool = True) -> list[JudgedRecord]:
    """Return the records that a reader with this filter shows."""
    opened = Reader(MemoryLog(broker), judge=judge, timeout_s=1, wanted=wanted)
    return [seen for batch in shown(opened, lines=None, follow=False) for seen in batch]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [
        RecordFilter(group="etl"),
        RecordFilter(topic="events10"),
        RecordFilter(partitions=(range(1), range(3, 4))),
        RecordFilter(group="etl", topic="events10", partitions=(range(1),)),
    ],
)
@pytest.mark.parametrize("judge", [True, False])
def test_a_filter_shows_a_part_of_all_with_the_same_verdicts(
    broker: MemoryBroker, wanted: RecordFilter, *, judge: bool
) -> None:
    """Records that are left out still count for the verdicts of the others."""
    expected = []
    for seen in judged_with(broker, judge=judge):
        message = parse(seen.record.value)
        if not isinstance(message, Message) or wanted.group not in {None, message.group}:
            continue
        is_home = wanted.topic is None or seen.record.partition == coordination_partition(wanted.topic, 4)
        has_place = wanted.topic in {None, message.topic} and (
            wanted.partitions is None or any(message.partition in run for run in wanted.partitions)
        )
        if is_home and (has_place or isinstance(message, GroupMessage)):
            expected.append(seen)
    assert expected
    assert judged_with(broker, wanted, judge=judge) == expected


@pytest.mark.slow
def test_without_heartbeats_those_that_moved_a_position_stay(broker: MemoryBroker) -> None:
    """A heartbeat that commits, is refused or has a note is shown; marks are not."""
    everything = judged_with(broker)
    kept = judged_with(broker, RecordFilter(without_heartbeats=True))
    left_out = [seen for seen in everything if seen not in kept]
    beats = [seen for seen in kept if isinstance(parse(seen.record.value), Heartbeat | RangeHeartbeat)]
    assert left_out
    assert beats
    for seen in left_out:
        message = parse(seen.record.value)
        offset = None if seen.before is None else seen.before.key.offset
        is_beat = isinstance(message, Heartbeat) and message.offset == offset
        assert is_beat or isinstance(message, Mark | RangeHeartbeat)


@pytest.mark.parametrize("judge", [True, False])
def test_since_and_until_limit_by_log_time(broker: MemoryBroker, *, judge: bool) -> None:
    """All records whose log time lies between the two are shown, though timestamps are out of order."""
    everything = judged_with(broker)
    since_ms, until_ms = everything[300].log_time_ms, everything[1_500].log_time_ms
    opened = reader(broker, judge=judge)
    opened.limit(since_ms, until_ms)
    found = [seen for batch in shown(opened, lines=None, follow=False) for seen in batch]
    expected = [seen.record for seen in everything if since_ms <= seen.log_time_ms < until_ms]
    assert 0 < len(expected) < len(everything)
    assert sorted(seen.record.offset for seen in found) == sorted(record.offset for record in expected)
    assert {seen.record for seen in found} == set(expected)


def test_the_last_of_the_chosen_records_are_shown(broker: MemoryBroker) -> None:
    """With a filter the last N are counted among those that it shows."""
    wanted = RecordFilter(group="etl")
    opened = Reader(MemoryLog(broker), judge=True, timeout_s=1, wanted=wanted)
    (found,) = shown(opened, lines=7, follow=False)
    assert found == judged_with(broker, wanted)[-7:]


def test_a_record_about_a_group_is_explained_once() -> None:
    """A pause is in every coordination partition; its sentence is shown once, with their number."""
    broker = MemoryBroker(4)
    pause = render(ReleaseGroup(instance="operator.0", client="jane", group="etl", time_s=1, expiry_s=9_000))
    for partition in range(4):
        broker.append(partition, pause, 1_000)
    broker.append(0, b"ClaimingPartition/1/1/i/c/etl/t/3", 1_001)
    lines = [str(line) for line in explained_lines(judged_with(broker))]
    assert len(lines) == 2
    assert lines[0].endswith(" until 1970-01-01 02:30:00Z (for 2 h 29 min) (in 4 coordination partitions).")


def test_a_refusal_names_the_reason_of_a_pause_that_is_not_shown() -> None:
    """The pause was before `--since`, and its reason explains why a claim was refused after it."""
    broker = MemoryBroker(1)
    pause = ReleaseGroup(instance="operator.0", client="jane", group="etl", time_s=1, expiry_s=9_000)
    broker.append(0, render(pause), 1_000, reason="the database moves")
    broker.append(0, b"ClaimingPartition/1/1/i/c/etl/t/0", 2_000)
    opened = reader(broker)
    opened.limit(2_000, None)
    (batch,) = shown(opened, lines=None, follow=False)
    (line,) = explained_lines(batch)
    assert "by jane (reason: the database moves)" in str(line)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--follow", "--until", "2h"), "--follow and --until contradict each other"),
        (("--from-start", "--since", "2h"), "--from-start and --since contradict each other"),
        (("--since", "1h", "--until", "2h"), "--until is not later than --since"),
        (("--since", "noon"), "--since: 'noon' is neither a duration"),
        (("--partition", "x"), "--partition: 'x' names no partitions"),
        (("--topic", "a b"), "--topic"),
        (("--group", "a/b"), "--group: 'a/b' cannot be a name"),
    ],
)
def test_wrong_filters_are_usage_errors(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    """They are found before Kafka is contacted."""
    answer = call(capsys, "tail", "-b", "localhost:1", *arguments)
    assert answer.code == ExitCode.USAGE
    assert problem in answer.err
