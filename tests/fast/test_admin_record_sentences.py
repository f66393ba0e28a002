"""The sentence for each type of record, accepted and refused, with the state that explains it."""

import pytest

from marshal_dagster.admin.record_sentences import JudgedRecord, judge, sentence
from marshal_dagster.admin.texts import member_text, short_instance
from marshal_dagster.protocol.messages import FORMS, Invalid, RuleSet, coordination_partition
from marshal_dagster.protocol.replay import StoredRecord
from marshal_dagster.protocol.rules import RecordNote, Refusal
from marshal_dagster.protocol.world import PartitionWorld, VerdictKind, World
from tests.log_generator import generate

RUN, OTHER = "5b1c0d3e-8f6a-4e62-9d2c-1f0a7b3c4d5e.0f1e2d3c4b5a", "77aa01bc-0000-4e62-9d2c-1f0a7b3c4d5e.0f1e2d3c4b5a"
OPERATOR = "operator.0f1e2d3c4b5a"
TOPIC_ID = "A" * 22
START_MS = 1_769_882_400_000
"""2026-01-31 18:00:00Z."""


class Story:
    """A coordination log of one group, to which records are added one after another."""

    def __init__(self, settings: str | None = "10000/native/at_least_once/-") -> None:
        """Begin with the group's settings."""
        self.world: PartitionWorld = World(1).start(0, 0)
        self.at_ms = START_MS
        if settings is not None:
            self.write("GroupSettings", tail=settings)

    def judge(self, value: str) -> JudgedRecord:
        """Append a record, one second after the last one."""
        self.at_ms += 1_000
        return judge(self.world, StoredRecord(0, self.world.next_offset, self.at_ms, value.encode()))

    def write(self, kind: str, tail: object = None, *, by: str = RUN, client: str = "flights") -> str:
        """Append a record of one type, and return its sentence."""
        place = "/0" if kind in {"ReleaseGroup", "GroupSettings", "Mark"} else "flights/3"
        end = "" if tail is None else f"/{tail}"
        return sentence(self.judge(f"{kind}/1/{self.at_ms // 1_000}/{by}/{client}/etl/{place}{end}"))

    def own(self, *, by: str = RUN) -> None:
        """Let a member claim the partition, at offset 100."""
        self.write("ClaimingPartition", by=by)
        self.write("DataTopic", TOPIC_ID, by=by)
        self.write("Heartbeat", 100, by=by)

    def pause(self, *, by: str = OPERATOR) -> str:
        """Pause the group for ten minutes."""
        return self.write("ReleaseGroup", self.at_ms // 1_000 + 601, by=by, client="jane@host")

    def wait(self, seconds: int) -> None:
        """Let log time pass."""
        self.at_ms += seconds * 1_000


def test_the_life_of_a_claim() -> None:
    """Claim, first position, plan, commit and release name the place and the offsets."""
    story = Story()
    assert story.write("ClaimingPartition") == "Run 5b1c0d3e (flights) claimed flights/3 in group etl."
    assert story.write("DataTopic", TOPIC_ID) == (
        f"Run 5b1c0d3e (flights) recorded that flights/3 in group etl belongs to the Kafka topic with id {TOPIC_ID}."
    )
    assert story.write("Heartbeat", 100) == (
        "Run 5b1c0d3e (flights) gave flights/3 in group etl its first position, offset 100."
    )
    assert story.write("ClaimingMessages", 200) == (
        "Run 5b1c0d3e (flights) planned offsets [100, 200) of flights/3 in group etl as one batch (100 offsets)."
    )
    assert story.write("Heartbeat", 100) == (
        "Run 5b1c0d3e (flights) confirmed its claim of flights/3 in group etl at offset 100."
    )
    assert (
        story.write("Heartbeat", 200)
        == "Run 5b1c0d3e (flights) committed offsets [100, 200) of flights/3 in group etl."
    )
    assert story.write("ReleasingPartition", 200) == (
        "Run 5b1c0d3e (flights) released flights/3 in group etl at offset 200."
    )
    assert story.write("ClaimingPartition", by=OTHER) == (
        "Run 77aa01bc (flights) claimed flights/3 in group etl; its position is 200."
    )


def test_a_takeover_names_the_silent_owner_and_the_plan_that_is_repeated() -> None:
    """The next try of a plan is counted, and so is how long the owner was silent."""
    story = Story()
    story.own()
    story.write("ClaimingMessages", 200)
    story.wait(123)
    assert story.write("ClaimingPartition", by=OTHER) == (
        "Run 77aa01bc (flights) claimed flights/3 in group etl, taking it over from run 5b1c0d3e (flights), which was "
        "silent for 2 min 5 s; it repeats the planned offsets [100, 200), try 2."
    )
    story.wait(60)
    assert story.write("ClaimingPartition", by=OTHER).startswith(
        "Run 77aa01bc (flights) claimed flights/3 in group etl again, after it was silent for 1 min 1 s"
    )


def test_an_operator_that_ends_a_plan_does_not_repeat_it() -> None:
    """`retry` claims the partition to set its position, and processes nothing."""
    story = Story()
    story.own()
    story.write("ClaimingMessages", 200)
    story.wait(123)
    reported = story.write("ClaimingPartition", by="setting-positions.0f1e2d3c4b5a", client="jane@host")
    assert reported.startswith("jane@host claimed flights/3 in group etl, taking it over from run 5b1c0d3e (flights)")
    assert "repeats" not in reported


def test_each_refusal_has_its_reason_and_what_caused_it() -> None:
    """The owner, the pause, the offset, the plan and the silence are named."""
    story = Story()
    story.own()
    assert story.write("ClaimingPartition", by=OTHER) == (
        "Run 77aa01bc (flights) could not claim flights/3 in group etl: the partition has a live owner (run 5b1c0d3e "
        "(flights), last heartbeat 1 s before)."
    )
    assert story.write("ClaimingMessages", 50).endswith("the plan ends at or before the offset (offset 100).")
    story.write("ClaimingMessages", 200)
    assert story.write("ClaimingMessages", 300).endswith("another plan is open ([100, 200)).")
    assert story.write("RevokingClaim", 77, by=OPERATOR, client="jane@host") == (
        "jane@host could not revoke the claim of epoch 77 on flights/3 in group etl: the claim of that epoch is over "
        "(the owner is run 5b1c0d3e (flights), epoch 1)."
    )
    story.wait(60)
    assert story.write("ClaimingMessages", 200).endswith(
        "the sender's claim is stale (it was silent for 1 min 6 s, more than 20 s)."
    )
    story.write("RevokingClaim", 1, by=OPERATOR)
    assert story.write("Heartbeat", 200) == (
        "Run 5b1c0d3e (flights) could not commit offsets [100, 200) of flights/3 in group etl: the sender does not own "
        "the partition (no member does)."
    )
    story.pause()
    assert story.write("ClaimingPartition", by=OTHER).endswith(
        "the group is paused (until 2026-01-31 18:11:13Z, by jane@host)."
    )


def test_a_pause_its_change_and_its_end() -> None:
    """A person is shown by name, with the end of the pause and its length."""
    story = Story()
    assert story.pause() == "jane@host paused group etl until 2026-01-31 18:10:02Z (for 10 min 0 s)."
    assert story.pause() == (
        "jane@host changed the end of the pause of group etl to 2026-01-31 18:10:03Z (in 10 min 0 s); it was "
        "2026-01-31 18:10:02Z."
    )
    assert story.write("ReleaseGroup", 0, by=OPERATOR, client="jane@host") == "jane@host resumed group etl."


def test_the_reason_of_a_pause_is_shown_with_it_and_with_what_it_refuses() -> None:
    """A reason comes from the header of the pause; the next record about the pause has none."""
    story = Story()
    value = f"ReleaseGroup/0/1/{OPERATOR}/jane@host/etl//0/{START_MS // 1_000 + 600}".encode()
    record = StoredRecord(0, story.world.next_offset, story.at_ms, value, "the database moves")
    assert sentence(judge(story.world, record)) == (
        "jane@host paused group etl until 2026-01-31 18:10:00Z (for 9 min 59 s), because: the database moves."
    )
    assert story.write("ClaimingPartition").endswith("by jane@host (reason: the database moves)).")
    story.pause()
    assert story.write("ClaimingPartition").endswith("by jane@host).")


def test_an_operator_sets_a_position_and_another_topic() -> None:
    """A release by the instance that paused the group sets the position; another topic id forgets it."""
    story = Story()
    story.own()
    story.write("ReleasingPartition", 100)
    story.pause()
    assert story.write("ClaimingPartition", by=OPERATOR, client="jane@host").startswith("jane@host claimed flights/3")
    assert story.write("DataTopic", "B" * 22, by=OPERATOR, client="jane@host").endswith(
        f"; it was {TOPIC_ID}, so the position is unknown now."
    )
    assert story.write("ReleasingPartition", 7, by=OPERATOR, client="jane@host") == (
        "jane@host set the position of flights/3 in group etl to 7."
    )
    story.write("ClaimingPartition", by=OPERATOR)
    assert story.write("ReleasingPartition", 3, by=OPERATOR).endswith("to 3; it was 7.")


def test_a_revocation_names_the_owner_that_lost() -> None:
    """The claim of the named epoch is the owner's."""
    story = Story()
    story.own()
    assert story.write("RevokingClaim", 1, by=OPERATOR, client="jane@host") == (
        "jane@host revoked the claim of run 5b1c0d3e (flights) on flights/3 in group etl."
    )


def test_ranges_of_a_partition() -> None:
    """Records that name a range by its epoch show its offsets."""
    story = Story("10000/native/at_least_once/ranges")
    story.own()
    story.write("ReleasingPartition", 100)
    assert story.write("ClaimingRange", "100/200") == (
        "Run 5b1c0d3e (flights) claimed offsets [100, 200) of flights/3 in group etl."
    )
    epoch = story.world.next_offset - 1
    assert story.write("ClaimingRange", "150/160", by=OTHER).endswith(
        "the range is held, planned or done, in part or whole ([100, 200) claimed)."
    )
    assert story.write("PlanningRange", f"{epoch}/150") == (
        "Run 5b1c0d3e (flights) planned [100, 150) of flights/3 in group etl as one batch."
    )
    assert story.write("RangeHeartbeat", epoch) == (
        "Run 5b1c0d3e (flights) confirmed its claim of [100, 150) of flights/3 in group etl."
    )
    assert story.write("RangeDone", epoch, by=OTHER).endswith(
        "could not commit [100, 150) of flights/3 in group etl: the sender does not own the partition (run 5b1c0d3e "
        "(flights))."
    )
    assert story.write("RevokingRange", epoch, by=OPERATOR, client="jane@host") == (
        "jane@host revoked the claim on [100, 150) of flights/3 in group etl, held by run 5b1c0d3e (flights)."
    )
    assert story.write("ClaimingRange", "100/150", by=OTHER).endswith("; it takes over this unfinished plan.")
    epoch = story.world.next_offset - 1
    assert story.write("RangeDone", epoch, by=OTHER) == (
        "Run 77aa01bc (flights) committed [100, 150) of flights/3 in group etl."
    )
    assert story.write("ReleasingRange", 999).startswith(
        "Run 5b1c0d3e (flights) could not release the range of epoch 999"
    )


def test_settings_and_marks() -> None:
    """The settings have all their fields; a mark does nothing."""
    story = Story(None)
    assert story.write("GroupSettings", "10000/native/at_most_once/-") == (
        "Run 5b1c0d3e (flights) set the settings of group etl: heartbeat interval 10 s, rule set native, delivery "
        "at_most_once, features none."
    )
    assert story.write("Mark") == "Run 5b1c0d3e (flights) wrote a mark, which only moves log time."


def test_go_consumers_move_offsets_without_a_plan() -> None:
    """The notes of an accepted record are part of its sentence."""
    story = Story(f"60000/{RuleSet.GO}/at_least_once/-")
    story.own()
    assert story.write("Heartbeat", 90, by="go-1", client="go").endswith(
        "moved the position of flights/3 in group etl from 100 to 90; this displaced run 5b1c0d3e (flights); this "
        "lowered the position."
    )


def test_an_invalid_record_is_quoted() -> None:
    """The reason comes first, and the value is cut."""
    assert sentence(Story().judge("Later/1/" + "x" * 200)) == (
        f"A record that is not valid was skipped: unknown type. It begins with '{'Later/1/' + 'x' * 72}'...."
    )
    judged = JudgedRecord(StoredRecord(0, 0, START_MS, None), START_MS, None)
    assert sentence(judged) == "A record that is not valid was skipped: no value."


def test_without_a_verdict_and_a_state_the_sentence_only_says_what_was_written() -> None:
    """A reader that does not judge has no verdict."""
    record = StoredRecord(0, 5, START_MS, f"ClaimingMessages/1/1/{RUN}/flights/etl/flights/3/200".encode())
    assert sentence(JudgedRecord(record, START_MS, None)) == (
        "Run 5b1c0d3e (flights) wrote a record to plan offsets up to 200 of flights/3 in group etl as one batch; it "
        "was not judged."
    )


@pytest.mark.parametrize(
    ("instance", "shown"),
    [
        (RUN, "run 5b1c0d3e"),
        (RUN.partition(".")[0], "run 5b1c0d3e"),
        ("harvester.0f1e2d3c4b5a", "harvester"),
        ("host.example-41", "host.example-41"),
    ],
)
def test_a_run_id_is_short(instance: str, shown: str) -> None:
    """Only a Dagster run's id is cut; any other instance keeps its name without the suffix."""
    assert short_instance(instance) == shown


@pytest.mark.parametrize(
    ("client", "shown"),
    [
        ("flights", "run 5b1c0d3e (flights)"),
        (RUN.partition(".")[0], "run 5b1c0d3e"),
        (OTHER.partition(".")[0], "run 5b1c0d3e (run 77aa01bc)"),
    ],
)
def test_a_client_id_that_is_the_run_id_is_not_shown_twice(client: str, shown: str) -> None:
    """It is the run id by default."""
    assert member_text(RUN, client) == shown


@pytest.mark.thorough
def test_every_type_verdict_and_note_has_a_sentence() -> None:
    """No record of a generated log, whatever its verdict, is without a sentence that ends as one."""
    types, reasons, notes = set(), set(), set()
    world = World(4)
    for number in range(4):
        world.start(number, 0)
    for partition, offset, at_ms, value in generate(5, 20_000):
        judged = judge(world.partitions[partition], StoredRecord(partition, offset, at_ms, value))
        verdict = judged.verdict
        assert sentence(judged).endswith(".")
        assert verdict is not None
        notes |= set(verdict.notes)
        reasons.add(verdict.reason)
        if verdict.kind is VerdictKind.ACCEPTED:
            types.add((value or b"").decode().partition("/")[0])
    assert types == set(FORMS)
    assert notes == set(RecordNote)
    assert reasons >= {None, Refusal.OTHER_PLAN, Refusal.NOT_PLANNED, Invalid.MISPLACED}


def test_the_partition_of_the_story_is_the_topics() -> None:
    """Otherwise every record of the story would be misplaced."""
    assert coordination_partition("flights", 1) == 0
