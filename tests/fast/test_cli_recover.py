"""The offsets that `recover` proposes for each key, and what it refuses."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import pytest

from marshal_dagster.admin.recovery import ConfirmedOffset, LastOffsets, ObservedPartition, Whose
from marshal_dagster.cli.recover import (
    OffsetProposal,
    _require_unknown,
    _show,
    offsets_of,
    propose,
    settings_of,
    warn_of_ranges,
)
from marshal_dagster.errors import AuthorizationError, ConfigurationError, TopicNotFoundError
from marshal_dagster.kafka.admin_client import TopicDescription, Topics
from marshal_dagster.protocol.messages import (
    WITHOUT_SETTINGS,
    ClaimingPartition,
    DataTopic,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    Message,
    ReleasingPartition,
    render,
)
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import World
from tests.cli import call
from tests.members import GROUP, OTHER_TOPIC_ID, RANGES, SETTINGS, TOPIC, TOPIC_ID, about, settings_record


@dataclass
class FakeTopics:
    """A data topic of three partitions, each with the offsets 2 to 10."""

    committed: dict[int, int] | None = field(default_factory=lambda: {1: 4})
    is_there: bool = True

    def describe(self, topic: str) -> TopicDescription:
        """Return its description, or raise an error if it does not exist."""
        if not self.is_there:
            raise TopicNotFoundError(topic)
        return TopicDescription(topic, TOPIC_ID, (0, 1, 2), 1)

    def offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, OffsetBounds]:
        """Return the bounds."""
        assert topic
        return {partition: OffsetBounds(2, 10) for partition in partitions}

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return the committed offsets."""
        assert group
        assert topic
        if self.committed is None:
            raise AuthorizationError("DESCRIBE on the group")
        return self.committed


def observed(*messages: Message) -> dict[int, ObservedPartition]:
    """Return the state after these records, which are the last of a log that was cut."""
    seen = ObservedPartition(World(1).start(0, 5))
    for offset, message in enumerate(messages, start=5):
        seen.take(offset, 1_000, render(message), is_quiet=False)
    return {0: seen}


def proposed(
    seen: dict[int, ObservedPartition], topics: FakeTopics | None = None, given: dict[Whose, int] | None = None
) -> list[OffsetProposal]:
    """Return the proposals."""
    return list(propose(seen, 1, cast("Topics", topics or FakeTopics()), given or {}))


BEAT, RELEASE = about(Heartbeat, "i", 0, offset=9), about(ReleasingPartition, "i", 0, offset=7)


def test_each_partition_of_a_groups_topic_gets_an_offset() -> None:
    """It is the last one in the log, else Kafka's committed offset, else 0; a note reports deleted records."""
    first, second, third = proposed(observed(BEAT, RELEASE))
    assert (first.last_offsets, first.confirmed.offset, first.note) == (LastOffsets(9, 7), 7, "")
    assert (second.committed, second.confirmed.offset, second.note) == (4, 4, "")
    assert (third.last_offsets, third.confirmed.offset, third.note) == (
        LastOffsets(),
        0,
        "nothing known, deleted up to 2",
    )
    assert {each.confirmed.data_topic_id for each in (first, second, third)} == {TOPIC_ID}
    assert proposed(observed(RELEASE, BEAT))[0].confirmed.offset == 9


def test_a_person_names_others() -> None:
    """An offset named by the operator is used, even for a topic that the log no longer names."""
    (_, second, _) = proposed(observed(BEAT), given={(GROUP, (TOPIC, 1)): 10})
    assert (second.confirmed.offset, second.note) == (10, "as given")
    named = proposed(observed(), given={("g", ("forgotten", 2)): 3})
    assert [each.confirmed.offset for each in named] == [0, 4, 3]


def test_a_topic_re_created_starts_at_its_beginning() -> None:
    """An offset of the deleted topic has no meaning for the new one."""
    seen = observed(about(DataTopic, "i", topic_id=OTHER_TOPIC_ID), BEAT)
    first = proposed(seen, FakeTopics({}))[0]
    assert (first.confirmed.offset, first.note) == (0, "topic re-created, deleted up to 2")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({(GROUP, (TOPIC, 0)): 11}, "beyond the topic's end 10"),
        ({(GROUP, (TOPIC, 3)): 1}, "has no partition 3"),
    ],
)
def test_an_offset_that_cannot_be_is_refused(given: dict[Whose, int], what: str) -> None:
    """An offset beyond the end, or for a partition that does not exist, is an error."""
    with pytest.raises(ConfigurationError, match=what):
        proposed(observed(BEAT), given=given)


def test_a_last_offset_beyond_the_end_must_be_named_anew() -> None:
    """If the log's own last offset is beyond the end, the operator must name one."""
    with pytest.raises(ConfigurationError, match="--offset"):
        proposed(observed(about(Heartbeat, "i", 0, offset=11)))


def test_an_offset_of_what_is_certain_is_refused() -> None:
    """Positions in a log that is complete are set with another command."""
    with pytest.raises(ConfigurationError, match="is certain"):
        proposed({}, given={(GROUP, (TOPIC, 0)): 1})


def test_of_a_topic_that_is_not_found_what_is_known_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """The topic may be looked up in the wrong cluster, so no offset and no topic id is dropped."""
    seen = observed(about(DataTopic, "i", 0, topic_id=OTHER_TOPIC_ID), BEAT, about(ClaimingPartition, "i", 1))
    (kept,) = proposed(seen, FakeTopics(is_there=False))
    assert (kept.whose, kept.confirmed) == ((GROUP, (TOPIC, 0)), ConfirmedOffset(9, OTHER_TOPIC_ID))
    assert (kept.last_offsets.heartbeat, kept.note) == (9, "topic not found")
    assert "--data-connection" in capsys.readouterr().err
    (named,) = proposed(observed(BEAT), FakeTopics(is_there=False), {(GROUP, (TOPIC, 0)): 3})
    assert named.confirmed == ConfirmedOffset(3, None)
    with pytest.raises(ConfigurationError, match="no partition 7"):
        proposed(observed(BEAT), FakeTopics(is_there=False), {(GROUP, (TOPIC, 7)): 3})


def test_what_cannot_be_looked_up_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the right to read Kafka's group offsets, they are not used."""
    assert [each.confirmed.offset for each in proposed(observed(BEAT), FakeTopics(None))] == [9, 0, 0]
    assert "cannot be read" in capsys.readouterr().err


def test_a_group_that_claims_ranges_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """An observing reader ignores ranges, so the offsets shown may be lower than what is done."""
    warn_of_ranges(observed(settings_record(SETTINGS), BEAT))
    assert capsys.readouterr().err == ""
    warn_of_ranges(observed(settings_record(RANGES), BEAT))
    (reported,) = capsys.readouterr().err.splitlines()
    assert f"the members of group {GROUP!r} claim ranges" in reported
    assert "true offsets may be higher" in reported


def test_offsets_are_read() -> None:
    """The form is GROUP/TOPIC/PARTITION=OFFSET, and a group's name may contain a =."""
    assert offsets_of(["a=b/t/0=5", "g/t/1=0"]) == {("a=b", ("t", 0)): 5, ("g", ("t", 1)): 0}


@pytest.mark.parametrize("text", ["", "g/t/0", "g/t=5", "g/t/0=x", "g/t/-1=5", "g/t/0=-5", "/t/0=5", "g//0=5", "g/t/2147483648=1"])  # fmt: skip  # noqa: E501
def test_a_malformed_offset_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the option and the form."""
    answer = call(capsys, "recover", "-b", "a:1", "--offset", text)
    assert (answer.code, "GROUP/TOPIC/PARTITION=OFFSET" in answer.error) == (2, True)


def test_json_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json there is no prompt, so `--yes` is needed."""
    answer = call(capsys, "recover", "-b", "a:1", "--json")
    assert (answer.code, "--yes" in answer.error) == (2, True)


def test_keys_of_go_consumers_get_no_data_topic_id() -> None:
    """Members of such a group do not use the id."""
    found = list(propose(observed(BEAT), 1, cast("Topics", FakeTopics()), {}, {GROUP}))
    assert {each.confirmed.data_topic_id for each in found} == {None}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("flights=go", WITHOUT_SETTINGS),
        ("flights=native", GroupSettings(10_000)),
        ("flights=30s,at_most_once", GroupSettings(30_000, delivery=DeliveryMode.AT_MOST_ONCE)),
        ("flights=native,ranges", GroupSettings(10_000, features=("ranges",))),
    ],
)
def test_settings_are_named_for_a_group(text: str, settings: GroupSettings) -> None:
    """The parts may be in any order; what is not named has the default of a member."""
    assert settings_of([text]) == {"flights": settings}


@pytest.mark.parametrize("text", ["flights", "=go", "flights=soon", "flights=go,ranges", "flights=go,30s"])
def test_settings_that_cannot_be_are_refused(text: str) -> None:
    """They are refused before anything is read."""
    with pytest.raises(ConfigurationError):
        settings_of([text])


def test_a_setting_that_is_unknown_is_not_taken_for_a_duration() -> None:
    """The message lists what may be given."""
    with pytest.raises(ConfigurationError, match="'nativ' is no rule set, delivery mode, interval or feature"):
        settings_of(["flights=nativ,10s"])


def test_settings_that_are_left_are_not_named_otherwise() -> None:
    """The settings in the log are shown, and can be changed after the recovery."""
    seen = observed(settings_record(SETTINGS), BEAT)
    _require_unknown(seen, {GROUP: SETTINGS})
    with pytest.raises(ConfigurationError, match=f"settings set {GROUP}"):
        _require_unknown(seen, {GROUP: WITHOUT_SETTINGS})


def test_where_settings_come_from_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The log has no settings record of the group."""
    seen = observed(BEAT)
    _show(seen, proposed(seen), {}, {GROUP})
    assert "taken for a group of Go consumers" in capsys.readouterr().out.replace("\n", " ")
    _show(seen, proposed(seen), {GROUP: SETTINGS}, ())
    assert "rule set native" in (shown := capsys.readouterr().out)
    assert "(as given)" in shown
    _show(seen, proposed(seen), {}, ())
    assert "its first member writes its own" in capsys.readouterr().out
