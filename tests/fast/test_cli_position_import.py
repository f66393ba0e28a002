"""Test `position import` as a user calls it, on an in-memory log."""

from pathlib import Path

import pytest

from marshal_dagster.cli import position
from marshal_dagster.protocol.messages import render
from tests.admin_fixtures import END, START, FakeTopics, act, at_work_on, site_now, write_first_settings
from tests.checkpoints import write_batch
from tests.members import GROUP, SETTINGS, TOPIC, Site, settings_record

ADOPT = ("position", "import", GROUP, TOPIC)
LOADER = ("--consumer-group", "loader")
BEFORE = [render(settings_record(SETTINGS)).decode()]


@pytest.fixture
def topics() -> FakeTopics:
    """A data topic with committed offsets of a consumer group."""
    return FakeTopics(committed={0: 30, 1: 40, 2: 50})


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, topics: FakeTopics) -> Site:
    """A coordination topic that has only the group's settings."""
    site = site_now()
    write_first_settings(site)
    at_work_on(site, monkeypatch, position, topics=topics)
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    return site


def standing(site: Site) -> list[int | None]:
    """Return the group's offset in each partition."""
    return [site.key(number).offset for number in range(3)]


def test_the_offsets_of_a_consumer_group_are_adopted(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The group is not paused afterwards, and its first member starts at the imported offsets."""
    answer = act(capsys, *ADOPT, *LOADER, "--yes")
    assert (answer.code, answer.err) == (0, "")
    assert [line.split() for line in answer.out.splitlines()[2:5]] == [
        [str(n), "20", "100", "-", str(at), "-", "-"] for n, at in enumerate((30, 40, 50))
    ]
    assert standing(site) == [30, 40, 50]
    owner = site.member()
    owner.claim([0])
    assert owner.key(0).offset == 30


def test_the_newest_committed_batch_of_a_checkpoint_is_adopted(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Other partitions start at the earliest offset, as Spark would; an uncommitted batch is reported."""
    write_batch(tmp_path, 7, {TOPIC: {0: 33, 1: 44}, "other": {0: 1}})
    write_batch(tmp_path, 8, {TOPIC: {0: 66, 1: 77}}, is_committed=False)
    answer = act(capsys, *ADOPT, "--checkpoint", tmp_path, "--yes")
    assert (answer.code, standing(site)) == (0, [33, 44, START])
    assert [line.partition(":")[0] for line in answer.err.splitlines()] == [
        f"the newest committed batch of {tmp_path} is 7",
        "batch 8 was started and not committed",
    ]


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        (["--others", "earliest"], [30, START, START]),
        (["--others", "latest"], [30, END, END]),
        (["--partitions", "0"], [30, None, None]),
    ],
)
def test_where_a_consumer_group_has_no_offset_it_is_requested(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    topics: FakeTopics,
    arguments: list[str],
    after: list[int | None],
) -> None:
    """It is unknown where its consumers would have started there."""
    topics.committed = {0: 30}
    refused = act(capsys, *ADOPT, *LOADER, "--yes")
    assert (refused.code, "no offset for partitions [1, 2] of topic 'orders'" in refused.error) == (2, True)
    assert (act(capsys, *ADOPT, *LOADER, "--yes", *arguments).code, standing(site)) == (0, after)


def test_a_partition_without_messages_needs_no_word(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start and end of such a partition are equal."""
    topics.committed = {0: 100, 1: 100}
    monkeypatch.setattr("tests.admin_fixtures.START", END)
    assert (act(capsys, *ADOPT, *LOADER, "--yes").code, standing(site)) == (0, [100, 100, 100])


def test_a_group_that_has_positions_is_left_alone(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Other partitions, if they are named, can still be imported."""
    site.owner_of(0, at=35).release()
    before = site.values()
    refused = act(capsys, *ADOPT, *LOADER, "--yes")
    assert (refused.code, "already has positions in topic 'orders', partitions [0]" in refused.error) == (2, True)
    assert "position reset" in refused.error
    assert site.values() == before
    assert act(capsys, *ADOPT, *LOADER, "--yes", "--partitions", "1-2").code == 0
    assert standing(site) == [35, 40, 50]


def test_members_that_begin_meanwhile_keep_their_positions(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members start while the operator is asked."""

    def agree(*_: object, **__: object) -> bool:
        site.owner_of(1, at=55).release()
        return True

    monkeypatch.setattr("typer.confirm", agree)
    answer = act(capsys, *ADOPT, *LOADER)
    assert (answer.code, standing(site)) == (1, [None, 55, None])
    assert "now has positions in topic 'orders', partitions [1]" in answer.err.splitlines()[-1]


@pytest.mark.parametrize(("at", "why"), [(START - 1, "are deleted"), (111, "beyond the end")])
def test_offsets_that_the_topic_does_not_hold_are_refused_unless_reported(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics, at: int, why: str
) -> None:
    """Retention was faster than the consumers, or the topic was re-created."""
    topics.committed[1] = at
    refused = act(capsys, *ADOPT, *LOADER, "--yes")
    assert (refused.code, f"partition 1: offset {at}: " in refused.error, why in refused.error) == (2, True, True)
    assert site.values() == BEFORE
    assert act(capsys, *ADOPT, *LOADER, "--yes", "--allow-out-of-range").code == 0
    assert standing(site) == [30, at, 50]


def test_a_source_at_work_is_refused(site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics) -> None:
    """Messages that it processes from now on would be processed twice; a dry run shows its offsets."""
    topics.has_consumers_of = {"loader"}
    refused = act(capsys, *ADOPT, *LOADER, "--yes")
    assert (refused.code, "'loader' has running consumers" in refused.error) == (2, True)
    shown = act(capsys, *ADOPT, *LOADER, "--dry-run", "--json")
    assert (shown.code, [row["after"] for row in shown.json["positions"]]) == (0, [30, 40, 50])
    assert "these offsets will soon be outdated" in shown.error
    assert site.values() == BEFORE


def test_a_dry_run_of_adoption_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run shows the result."""
    answer = act(capsys, *ADOPT, *LOADER, "--dry-run")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "A dry run: nothing was written.")
    assert site.values() == BEFORE


def test_a_person_is_requested_before_adoption(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without consent nothing changes; with --json there is no prompt."""
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    answer = act(capsys, *ADOPT, *LOADER)
    assert (answer.code, answer.error, site.values()) == (1, "nothing was written", BEFORE)
    assert "then add --yes" in act(capsys, *ADOPT, *LOADER, "--json").error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (LOADER, "Kafka has no committed offsets of a consumer group 'loader' for topic 'orders'"),
        (("--checkpoint", "/nowhere"), "/nowhere is not a checkpoint"),
        ((*LOADER, "--others", "first"), "--others: 'first'; give earliest or latest"),
    ],
)
def test_what_cannot_be_adopted_is_one_line(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics, arguments: tuple[str, ...], says: str
) -> None:
    """The error is one line, and nothing is written."""
    topics.committed = {}
    answer = act(capsys, *ADOPT, *arguments, "--yes")
    assert (answer.code, says in answer.error, site.values()) == (2, True, BEFORE)


def test_a_checkpoint_of_another_topic_of_that_name_is_refused(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The checkpoint names a partition that the topic does not have."""
    write_batch(tmp_path, 0, {TOPIC: {0: 33, 3: 44}})
    answer = act(capsys, *ADOPT, "--checkpoint", tmp_path, "--yes")
    assert "offsets for partitions [3], which topic 'orders' does not have" in answer.error
    assert (answer.code, site.values()) == (2, BEFORE)
