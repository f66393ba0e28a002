"""`lag`, and how old unread records are, on an in-memory log and a fake data topic."""

from collections.abc import Iterable

import pytest

from marshal_dagster._internal.texts import nearest_first
from marshal_dagster.cli import lag, output, world_reader
from marshal_dagster.cli.watching import problem_line
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka.admin_client import TopicDescription
from marshal_dagster.kafka.record_times import record_ages
from marshal_dagster.protocol.messages import coordination_partition, render
from marshal_dagster.protocol.state import OffsetBounds
from tests.admin_fixtures import END, START, FakeTopics, act, at_work_on, site_now
from tests.members import GROUP, SETTINGS, TOPIC, Site, settings_record

MINUTE_MS = 60_000


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """A group with two owned partitions, one of which is at its end."""
    site = site_now()
    site.owner_of(0, at=30)
    site.owner_of(1, at=END)
    at_work_on(site, monkeypatch, world_reader, topics=FakeTopics())
    monkeypatch.setattr(world_reader, "SystemClock", lambda: site.clock)
    return site


@pytest.mark.usefixtures("site")
def test_the_lag_is_shown_in_offsets_and_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A group has a line of its own; the partition with the largest lag comes first."""
    answer = act(capsys, "lag")
    assert (answer.code, answer.err) == (0, "")
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert lines[0].startswith(f"Group {GROUP}: {END - 30} unread in 1 of 2 partitions, the oldest for ")
    assert lines[3].startswith(f"{GROUP} {TOPIC}/0 30 {END} {END - 30} ")
    assert lines[3].endswith(" run1.0 (client1)")
    assert lines[4].startswith(f"{GROUP} {TOPIC}/1 {END} {END} 0 - run2.0 (client2)")


def test_a_group_without_a_partition_of_the_topic_has_no_lag(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is not the same as a group that has read everything."""
    settings = render(settings_record(SETTINGS))
    for number in range(site.partitions):
        site.broker.append(number, settings.replace(f"/{GROUP}/".encode(), b"/new/"))
    monkeypatch.setattr(FakeTopics, "describe", lambda *_: TopicDescription("other", "B" * 22, (0,), 1))
    answer = act(capsys, "lag", "--group", "new")
    assert (answer.code, answer.out) == (0, "Group new: no member has claimed a partition yet\n")
    answer = act(capsys, "lag", "--group", GROUP, "--topic", "other")
    assert answer.out == f"Group {GROUP}: no member has claimed a partition of topic 'other' yet\n"


@pytest.mark.usefixtures("site")
def test_the_lag_as_json_has_a_row_for_each_partition(capsys: pytest.CaptureFixture[str]) -> None:
    """The age of the first unread record is in milliseconds; it is 0 where nothing is unread."""
    first, second = act(capsys, "lag", "--json").json["partitions"]
    assert (first["position"], first["end"], first["lag"], first["owner_instance"]) == (30, END, END - 30, "run1.0")
    assert first["lag_ms"] > 0
    assert (second["lag"], second["lag_ms"], second["lag_unknown"]) == (0, 0, None)


def test_the_owners_of_ranges_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A partition whose ranges have owners is not shown as one without an owner."""
    site = site_now()
    site.begin(0, at=30)
    holders = [site.holder_of({0: (start, start + 10)}) for start in (30, 40, 50)]
    at_work_on(site, monkeypatch, world_reader, topics=FakeTopics())
    monkeypatch.setattr(world_reader, "SystemClock", lambda: site.clock)
    row = act(capsys, "lag").out.splitlines()[-1]
    names = [holder.member.instance for holder in holders]
    assert (names[0] in row, names[1] in row, names[2] in row, row.endswith("and 1 more")) == (True, True, False, True)


class MinuteOld(FakeTopics):
    """A data topic whose records are all a minute old."""

    def offsets_at(self, _: str, partitions: Iterable[int], at_ms: int) -> dict[int, int]:
        """Return the first offset with that timestamp or a later one."""
        is_late = at_ms > site_now().clock.wall_ms() - MINUTE_MS
        return {} if is_late else dict.fromkeys(partitions, START)


def test_the_lag_in_time_is_right_after_retention_deleted_unread_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the age of the first record that is left, not the largest age that is distinguished."""
    site = site_now()
    site.owner_of(0, at=START - 5)
    at_work_on(site, monkeypatch, world_reader, topics=MinuteOld())
    monkeypatch.setattr(world_reader, "SystemClock", lambda: site.clock)
    (row,) = act(capsys, "lag", "--json").json["partitions"]
    assert row["lag"] == END - START
    assert MINUTE_MS / 1.2 <= row["lag_ms"] <= 1.5 * MINUTE_MS


@pytest.mark.usefixtures("site")
def test_a_cluster_that_does_not_answer_is_no_group_without_lag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and `status --check` fails too, because it cannot see whether a topic was re-created."""

    def away(*_: object, **__: object) -> None:
        raise UnavailableError("the brokers do not answer")

    monkeypatch.setattr(FakeTopics, "describe", away)
    answer = act(capsys, "lag")
    assert (answer.code, answer.out.splitlines()[0]) == (
        1,
        f"Group {GROUP}: the lag of 2 of 2 partitions is not known",
    )
    assert answer.error == "not every lag is known: the cluster of data topics does not answer"
    assert act(capsys, "lag", "--json").code == 1
    answer = act(capsys, "status", "--check", "--json")
    assert answer.code == 1
    assert any(
        need.startswith(f"unknown lag: brokers do not answer for the data topics {TOPIC}; check them")
        for need in answer.json["needs_operator"]
    )


@pytest.mark.usefixtures("site")
def test_a_position_that_is_not_one_of_the_topic_is_no_group_without_lag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that adds up the known lags would miss these partitions."""
    monkeypatch.setattr(FakeTopics, "offsets", lambda *_, **__: {0: OffsetBounds(0, END), 1: OffsetBounds(0, 1)})
    answer = act(capsys, "lag", "--json")
    assert {row["lag_unknown"] for row in answer.json["partitions"]} == {None, "beyond the end"}
    assert (answer.code, answer.error.split(", ")[0]) == (
        1,
        "not every lag is known: a position is after the end of its topic",
    )


@pytest.mark.usefixtures("site")
def test_an_unknown_group_or_topic_is_reported_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """The most similar name comes first."""
    unknown = act(capsys, "lag", "--group", "elt")
    assert (unknown.code, unknown.err) == (1, "")
    assert f"The log has no group 'elt'; it has '{GROUP}'." in unknown.out
    answer = act(capsys, "lag", "--group", "elt", "--json")
    assert (answer.code, f"the log has no group 'elt'; it has '{GROUP}'" in answer.err) == (1, True)
    answer = act(capsys, "lag", "--topic", "ordres")
    assert (answer.code, f"the log has the topics '{TOPIC}'" in answer.error) == (5, True)


@pytest.mark.parametrize("command", ["lag", "status"])
def test_with_a_topic_only_its_coordination_partition_is_known(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The group has partitions of another topic, so the log has it. Go consumers write no settings elsewhere."""
    names = [f"topic-{number}" for number in range(100)]
    other = next(name for name in names if coordination_partition(name, site.partitions) != site.home)
    monkeypatch.setattr(world_reader, "open_reader", lambda _, __, topics: site.reader(site.log(), topics))
    monkeypatch.setattr(FakeTopics, "describe", lambda *_: TopicDescription(other, "id", (0,), 1))
    site.broker.append(site.home, f"ClaimingPartition/1/1/consumer/c/go/{TOPIC}/0".encode())
    text = f"he coordination partition of topic {other!r} has no group 'go'; it has {GROUP!r}"
    assert f"t{text}" in act(capsys, command, "--group", "go", "--topic", other, "--json").err
    assert f"T{text}." in act(capsys, command, "--group", "go", "--topic", other).out


@pytest.mark.usefixtures("site")
def test_a_small_screen_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --watch the largest lags are shown, as many as fit."""
    pages: list[list[str]] = []
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setattr(
        lag, "watch_on_screen", lambda view, _, page, __: pages.append(list(map(str, page(view, "gone", 5))))
    )
    from marshal_dagster.cli.main import run

    assert run(["lag", "--watch", "-b", "somewhere:1"]) == 0
    (page,) = pages
    assert page[0] == str(problem_line("gone")[0]) == "This is an older state: gone"
    assert [TOPIC in part for part in page].count(True) >= 1


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("command", ["lag", "lag --json", "status", "status --check", "status --json"])
def test_a_watch_without_a_terminal_is_shown_once_with_a_note(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a pipe, or with an option that is for scripts, the command ends as it does without --watch."""
    once, watched = act(capsys, *command.split()), act(capsys, *command.split(), "--watch")
    note = "This is shown once: --watch needs a terminal, and neither --json nor --check.\n"
    assert (watched.code, watched.err) == (once.code, note + once.err)
    assert watched.out.count("\n") == once.out.count("\n") > 0


class Timed:
    """A topic whose records have these timestamps, by partition."""

    def __init__(self, **timestamps_ms: list[int]) -> None:
        """Set the timestamps of partition p0, p1, and so on."""
        self.timestamps_ms = {int(name[1:]): times for name, times in timestamps_ms.items()}
        self.calls = 0

    def offsets_at(self, _: str, partitions: Iterable[int], at_ms: int) -> dict[int, int]:
        """Return the first offset with that timestamp or a later one."""
        self.calls += 1
        found = {}
        for number in partitions:
            later = [offset for offset, time_ms in enumerate(self.timestamps_ms[number]) if time_ms >= at_ms]
            if later:
                found[number] = later[0]
        return found


@pytest.mark.parametrize("age_ms", [1_000, 45_000, 10 * MINUTE_MS, 26 * 60 * MINUTE_MS, 90 * 24 * 60 * MINUTE_MS])
def test_the_age_of_a_record_is_found_without_reading_it(age_ms: int) -> None:
    """It is at most a sixth too small, and takes a few look-ups."""
    now_ms = 10**13
    topics = Timed(p0=[now_ms - 2 * age_ms, now_ms - age_ms, now_ms - 1], p1=[now_ms - 3])
    found = record_ages(topics, "t", {(0, 1), (1, 0)}, now_ms)  # type: ignore[arg-type]
    assert age_ms / 1.16 <= found[0, 1] <= age_ms
    assert found[1, 0] == 0
    assert topics.calls < 20


def test_the_nearest_name_comes_first() -> None:
    """A typing error, a swapped letter and another case all find the right one."""
    names = ["orders", "flights", "flight-delays", "payments"]
    assert [nearest_first(wanted, names)[0] for wanted in ("ordres", "FLIGHTS", "fligt-delay")] == [
        "orders",
        "flights",
        "flight-delays",
    ]
