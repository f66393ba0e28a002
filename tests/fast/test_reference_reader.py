"""The reference reader, tested with the sentences of docs/reference/protocol.md on short logs written by hand."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.reference_reader import PlainReader, coordination_partition, records_of

VECTOR = Path(__file__).parent.parent / "vectors" / "marshal-log.jsonl"
INTERVAL_MS = 10_000
LEASE_MS = 2 * INTERVAL_MS
START_MS = 1_000_000
FAR_S = 10**9
ID_A, ID_B = "A" * 22, "B" * 22


class Log:
    """A log of one coordination partition with its reference reader. Times are in ms since the start of the log."""

    def __init__(self, rules: str = "native", *, first_offset: int = 0) -> None:
        self.reader = PlainReader(1, INTERVAL_MS, rules)
        self.offset = first_offset - 1
        self.now_ms = START_MS

    def at(self, ms: int) -> "Log":
        """Set the timestamp of the next records."""
        self.now_ms = START_MS + ms
        return self

    def write(
        self, kind: str, instance: str, where: Sequence[str], tail: Sequence[object], *, client: str = "c"
    ) -> str:
        """Append a record and return its verdict.

        Check that a refused record changes only the count of refused records.
        """
        self.offset += 1
        value = "/".join([kind, "1", "5", instance, client, *where, *map(str, tail)])
        before = copy.deepcopy(self.reader.summary())
        verdict = self.reader.read(0, self.offset, self.now_ms, value.encode())
        if verdict == "refused":
            assert self.reader.summary() == {**before, "refused": before["refused"] + 1}
        return verdict

    def claim(self, instance: str, key: str = "g/t/0", client: str = "c") -> str:
        """Append a `ClaimingPartition`."""
        return self.write("ClaimingPartition", instance, [key], [], client=client)

    def beat(self, instance: str, offset: int, key: str = "g/t/0", client: str = "c") -> str:
        """Append a `Heartbeat`."""
        return self.write("Heartbeat", instance, [key], [offset], client=client)

    def release(self, instance: str, offset: int, key: str = "g/t/0") -> str:
        """Append a `ReleasingPartition`."""
        return self.write("ReleasingPartition", instance, [key], [offset])

    def plan(self, instance: str, end: int, key: str = "g/t/0") -> str:
        """Append a `ClaimingMessages`."""
        return self.write("ClaimingMessages", instance, [key], [end])

    def revoke(self, epoch: int, key: str = "g/t/0", instance: str = "any") -> str:
        """Append a `RevokingClaim`."""
        return self.write("RevokingClaim", instance, [key], [epoch])

    def data_topic(self, instance: str, data_topic_id: str, key: str = "g/t/0") -> str:
        """Append a `DataTopic`."""
        return self.write("DataTopic", instance, [key], [data_topic_id])

    def pause(self, instance: str, expiry_s: int = FAR_S, group: str = "g") -> str:
        """Append a `ReleaseGroup`."""
        return self.write("ReleaseGroup", instance, [group, "", "0"], [expiry_s])

    def resume(self, instance: str) -> str:
        """Append a `ReleaseGroup` that has expired."""
        return self.pause(instance, 0)

    def settings(
        self,
        instance: str,
        interval_ms: int = INTERVAL_MS,
        rules: str = "native",
        delivery: str = "at_least_once",
        *,
        features: str = "-",
        group: str = "g",
    ) -> str:
        """Append a `GroupSettings`."""
        return self.write("GroupSettings", instance, [group, "", "0"], [interval_ms, rules, delivery, features])

    def mark(self, instance: str = "any", group: str = "g") -> str:
        """Append a `Mark`."""
        return self.write("Mark", instance, [group, "", "0"], [])

    def raw(self, value: bytes | None) -> str:
        """Append any value."""
        self.offset += 1
        return self.reader.read(0, self.offset, self.now_ms, value)

    def key(self, key: str = "g/t/0") -> dict[str, Any]:
        """Return the fields of a key in the summary, without its topic and partition."""
        group, topic, partition = key.split("/")
        rows = self.reader.summary()["groups"][group]["partitions"]
        [row] = [row for row in rows if row["topic"] == topic and row["partition"] == int(partition)]
        return {name: value for name, value in row.items() if name not in {"topic", "partition"}}


def free(**fields: object) -> dict[str, object]:
    """Return the fields of a key without an owner."""
    shown: dict[str, object] = {
        "owner_instance": None,
        "owner_client": None,
        "epoch": None,
        "offset": None,
        "plan_end": None,
        "plan_attempts": 0,
        "generation": 0,
        "data_topic_id": None,
        "last_beat_ms": None,
        "provisional": False,
    }
    assert set(fields) <= set(shown)
    return {**shown, **fields}


def owned(instance: str, epoch: int | None, beat_ms: int, **fields: object) -> dict[str, object]:
    """Return the fields of a key with this owner, whose last heartbeat was `beat_ms` after the start of the log."""
    owner = {"owner_instance": instance, "epoch": epoch, "last_beat_ms": START_MS + beat_ms}
    return free(**{"owner_client": "c", **owner, **fields})


def held(offset: int = 5, rules: str = "native") -> Log:
    """Return a log in which `a` owns the key (epoch 0, since time 0) at this offset."""
    log = Log(rules)
    assert log.claim("a") == "accepted"
    assert log.beat("a", offset) == "accepted"
    return log


def planned(rules: str = "native") -> Log:
    """Return a log in which `a` owns the key and has planned the messages from 5 to 9."""
    log = held(5, rules)
    assert log.plan("a", 9) == "accepted"
    return log


# 1. Wire format. test_log_generator.py lists which values are valid; these tests show the effect of an invalid one.


def test_an_invalid_message_is_counted_and_skipped() -> None:
    """An invalid message changes only its count."""
    log = planned()
    before = log.key()
    for value in [None, b"", b"hello", b"\xff", b"RangeClaim/1/1/b/c/g/t/0", b"Heartbeat/1/1/a/c/g/t/0/07"]:
        assert log.raw(value) == "invalid"
    assert log.key() == before
    assert log.reader.summary()["invalid"] == 6
    assert log.reader.summary()["refused"] == 0


def test_an_invalid_message_moves_log_time() -> None:
    """An invalid message advances log time, which the next claim shows."""
    log = held()
    assert log.at(LEASE_MS + 1).raw(None) == "invalid"
    assert log.at(0).claim("b") == "accepted"
    assert log.key() == owned("b", 3, LEASE_MS + 1, offset=5)


def test_a_refused_record_moves_log_time() -> None:
    """A refused record advances log time, which the next claim shows."""
    log = held()
    assert log.at(LEASE_MS + 1).beat("stranger", 9) == "refused"
    assert log.at(0).claim("b") == "accepted"


def test_names_are_listed_once_an_accepted_record_named_them() -> None:
    """Invalid records, refused records and marks create no group and no key. The first accepted record creates both."""
    log = Log()
    log.raw(b"Heartbeat/1/1/a/c/g/t/0/-1")
    log.beat("a", 1)
    log.release("a", 1)
    log.plan("a", 1)
    log.revoke(0)
    log.data_topic("a", ID_A)
    log.mark()
    assert log.reader.summary() == {"invalid": 1, "refused": 5, "groups": {}}
    log.pause("a", 7)
    assert log.reader.summary()["groups"] == {"g": {"paused_until": 7, "partitions": []}}
    log.settings("a", group="h")
    assert log.reader.summary()["groups"]["h"] == {"paused_until": None, "partitions": []}
    log.claim("a", "k/t/3")
    [row] = log.reader.summary()["groups"]["k"]["partitions"]
    assert (row["topic"], row["partition"]) == ("t", 3)


def test_a_topic_lies_in_the_coordination_partition_that_its_md5_names() -> None:
    """Only the topic decides: the first 8 bytes of its md5 as little-endian uint64.

    Elsewhere its records are invalid.
    """
    assert [coordination_partition(topic, 8) for topic in ("ev", "ev2", "wide")] == [4, 5, 7]
    reader = PlainReader(8)
    for partition in range(8):
        verdict = reader.read(partition, 0, 0, b"ClaimingPartition/1/1/a/c/g/ev/0")
        assert verdict == ("accepted" if partition == 4 else "invalid")


def test_partitions_are_sorted_by_topic_and_number() -> None:
    """The summary sorts a group's keys by topic and then by number, across all coordination partitions."""
    reader = PlainReader(8)
    for topic, number in [("wide", 10), ("wide", 9), ("ev2", 1), ("ev", 0)]:
        value = f"ClaimingPartition/1/1/a/c/g/{topic}/{number}"
        offset = 1 if number == 9 else 0
        assert reader.read(coordination_partition(topic, 8), offset, 0, value.encode()) == "accepted"
    rows = reader.summary()["groups"]["g"]["partitions"]
    assert [(row["topic"], row["partition"]) for row in rows] == [("ev", 0), ("ev2", 1), ("wide", 9), ("wide", 10)]


def test_text_that_cannot_be_utf8_is_invalid() -> None:
    """A line of a file may contain a lone surrogate, which makes the value invalid.

    A pair of surrogates is a character.
    """
    line = '{"partition": 0, "offset": %d, "timestamp": 1, "value": "ClaimingPartition/1/1/%s/c/g/t/0"}'
    records = records_of([line % (0, r"\ud83d"), line % (1, r"\ud83d\ude00")])
    reader = PlainReader(1)
    assert [reader.read(*record) for record in records] == ["invalid", "accepted"]
    assert reader.summary()["groups"]["g"]["partitions"][0]["owner_instance"] == "\U0001f600"


def test_offsets_must_rise() -> None:
    """An offset that is not higher than the one before it, or an unknown coordination partition, raises an error."""
    reader = PlainReader(2)
    reader.read(0, 4, 0, None)
    reader.read(1, 4, 0, None)
    reader.read(0, 9, 0, None)
    with pytest.raises(ValueError, match="Offset 9"):
        reader.read(0, 9, 0, None)
    with pytest.raises(ValueError, match="partition 2"):
        reader.read(2, 0, 0, None)


# 2. Time.


def test_log_time_never_goes_back() -> None:
    """Log time is the larger of a record's timestamp and the log time before it."""
    log = Log()
    log.at(500).claim("a")
    log.at(-500).beat("a", 1)
    assert log.key() == owned("a", 0, 500, offset=1)
    log.at(501).beat("a", 1)
    assert log.key() == owned("a", 0, 501, offset=1)


def test_each_coordination_partition_has_its_own_time() -> None:
    """A record of one coordination partition does not advance the time of another."""
    reader = PlainReader(8, INTERVAL_MS)
    assert reader.read(4, 0, 0, b"ClaimingPartition/1/1/a/c/g/ev/0") == "accepted"
    assert reader.read(5, 0, 10 * LEASE_MS, b"ClaimingPartition/1/1/a/c/g/ev2/0") == "accepted"
    assert reader.read(4, 1, LEASE_MS, b"ClaimingPartition/1/1/b/c/g/ev/0") == "refused"


def test_the_time_in_a_value_decides_nothing() -> None:
    """No rule uses the sender's time or the version of a record."""
    log = Log()
    assert log.raw(b"ClaimingPartition/9/9223372036854775807/a/c/g/t/0") == "accepted"
    assert log.raw(b"Heartbeat/0/0/a/c/g/t/0/5") == "accepted"
    assert log.key() == owned("a", 0, 0, offset=5)


# 3. State.


@pytest.mark.parametrize(
    ("ms", "verdict"), [(LEASE_MS - 1, "refused"), (LEASE_MS, "refused"), (LEASE_MS + 1, "accepted")]
)
def test_an_owner_is_live_up_to_twice_the_interval(ms: int, verdict: str) -> None:
    """An owner is live while t - last beat <= 2 HI, to the millisecond."""
    assert held().at(ms).claim("b") == verdict


def test_the_interval_given_holds_until_a_group_has_settings() -> None:
    """A group without settings has the interval that was passed to the reader. A group with settings has its own."""
    log = Log()
    assert log.settings("s", 50) == "accepted"
    log.claim("a")
    assert log.at(100).claim("b") == "refused"
    assert log.at(101).claim("b") == "accepted"
    log.claim("a", "h/t/0")
    assert log.at(101 + LEASE_MS).claim("b", "h/t/0") == "refused"
    assert log.at(102 + LEASE_MS).claim("b", "h/t/0") == "accepted"


def test_the_default_interval_is_a_minute() -> None:
    """Without settings a group has HI 60 s."""
    for ms, verdict in [(120_000, "refused"), (120_001, "accepted")]:
        reader = PlainReader(1)
        reader.read(0, 0, 0, b"ClaimingPartition/1/1/a/c/g/t/0")
        assert reader.read(0, 1, ms, b"ClaimingPartition/1/1/b/c/g/t/0") == verdict


def test_the_delivery_at_first_is_at_least_once() -> None:
    """The default is at least once, so first settings with that delivery change nothing, and others do."""
    for delivery, generation in [("at_least_once", 0), ("at_most_once", 3), ("effectively_once", 3)]:
        log = held()
        assert log.release("a", 5) == "accepted"
        assert log.settings("s", delivery=delivery) == "accepted"
        assert log.key() == free(offset=5, generation=generation)


def test_an_epoch_is_the_log_offset_of_the_winning_record() -> None:
    """The epoch is the offset in the log, including gaps, and a heartbeat does not change it."""
    log = Log()
    log.mark()
    log.offset = 41
    log.claim("a")
    log.beat("a", 3)
    assert log.key() == owned("a", 42, 0, offset=3)


def test_a_moved_offset_ends_the_plan() -> None:
    """A commit inside a plan, at its end or after it ends the plan. One at the offset or before it does not."""
    for offset, still_open in [(4, True), (5, True), (6, False), (9, False), (10, False)]:
        log = planned()
        assert log.beat("a", offset) == "accepted"
        assert log.key()["plan_end"] == (9 if still_open else None)
        assert log.key()["offset"] == max(5, offset)


def test_plan_attempts_count_the_claims_while_a_plan_is_open() -> None:
    """Attempts are 0 when a plan is opened, increase with each accepted claim, and are 0 again without a plan."""
    log = planned()
    assert log.key()["plan_attempts"] == 0
    assert log.claim("b") == "refused"
    assert log.key()["plan_attempts"] == 0
    log.revoke(0)
    log.claim("b")
    assert log.key() == owned("b", 5, 0, offset=5, plan_end=9, plan_attempts=1)
    log.at(LEASE_MS + 1).claim("d")
    assert log.key() == owned("d", 6, LEASE_MS + 1, offset=5, plan_end=9, plan_attempts=2)
    log.beat("d", 9)
    assert log.key() == owned("d", 6, LEASE_MS + 1, offset=9)
    log.plan("d", 12)
    assert log.key()["plan_attempts"] == 0


def test_claims_without_a_plan_are_no_attempts() -> None:
    """Without an open plan a claim leaves the attempts at 0."""
    log = held()
    log.revoke(0)
    log.claim("b")
    assert log.key() == owned("b", 3, 0, offset=5)


# 4. Transitions: ClaimingPartition.


def test_claim_of_a_free_key() -> None:
    """The first claim of a key sets owner, client, epoch and last beat, and changes nothing else."""
    log = Log()
    assert log.at(3).claim("a", client="me") == "accepted"
    assert log.key() == owned("a", 0, 3, owner_client="me")


def test_claim_from_another_while_the_owner_is_live() -> None:
    """A claim is refused while another owner is live."""
    log = held()
    assert log.claim("b") == "refused"
    assert log.key() == owned("a", 0, 0, offset=5)


def test_claim_from_the_live_owner_itself() -> None:
    """A duplicate claim is refused and does not change the last beat."""
    log = held()
    assert log.at(7).claim("a") == "refused"
    assert log.key() == owned("a", 0, 0, offset=5)


def test_claim_from_the_stale_owner_itself() -> None:
    """A stale owner may claim again and gets a new epoch."""
    log = planned()
    assert log.at(LEASE_MS + 1).claim("a") == "accepted"
    assert log.key() == owned("a", 3, LEASE_MS + 1, offset=5, plan_end=9, plan_attempts=1)


def test_claim_leaves_offset_plan_generation_and_data_topic() -> None:
    """A claim after a release changes only the owner and the attempts."""
    log = Log()
    log.pause("op")
    log.claim("op")
    log.release("op", 5)
    log.resume("op")
    log.claim("a")
    log.data_topic("a", ID_A)
    log.plan("a", 9)
    log.release("a", 5)
    kept: dict[str, Any] = {"offset": 5, "plan_end": 9, "generation": 2, "data_topic_id": ID_A}
    assert log.key() == free(**kept)
    assert log.at(1).claim("b") == "accepted"
    assert log.key() == owned("b", 8, 1, plan_attempts=1, **kept)


def test_claim_while_paused() -> None:
    """While the group is paused, only the instance that paused it can claim."""
    log = Log()
    log.pause("op")
    assert log.claim("a") == "refused"
    assert log.claim("op") == "accepted"
    assert log.key() == owned("op", 1 + 1, 0)


def test_claim_by_the_pauser_from_a_live_owner() -> None:
    """The instance that paused the group cannot claim from a live owner either."""
    log = held()
    log.pause("op")
    assert log.claim("op") == "refused"
    assert log.at(LEASE_MS + 1).claim("op") == "accepted"


def test_only_the_instance_counts_never_the_client() -> None:
    """An equal client id gives no rights, a different one removes none, and the summary keeps the claim's client id."""
    log = Log()
    log.claim("a", client="x")
    assert log.beat("b", 1, client="x") == "refused"
    assert log.beat("a", 1, client="y") == "accepted"
    assert log.key() == owned("a", 0, 0, offset=1, owner_client="x")


# 4. Heartbeat.


def test_heartbeat_from_the_live_owner() -> None:
    """A heartbeat sets the last beat. It also sets the offset if that is unknown."""
    log = Log()
    log.claim("a")
    assert log.at(4).beat("a", 0) == "accepted"
    assert log.key() == owned("a", 0, 4, offset=0)


def test_heartbeat_with_a_higher_offset_commits() -> None:
    """A heartbeat with a higher offset commits it."""
    log = held()
    assert log.at(4).beat("a", 6) == "accepted"
    assert log.key() == owned("a", 0, 4, offset=6)


def test_heartbeat_with_a_lower_offset_moves_nothing() -> None:
    """A heartbeat with a lower offset renews the last beat, and changes neither offset nor plan."""
    log = planned()
    assert log.at(4).beat("a", 1) == "accepted"
    assert log.key() == owned("a", 0, 4, offset=5, plan_end=9)


def test_heartbeat_from_the_stale_owner() -> None:
    """A stale owner that was not replaced becomes live again by its heartbeat, with the same epoch."""
    log = held()
    assert log.at(9 * LEASE_MS).beat("a", 6) == "accepted"
    assert log.key() == owned("a", 0, 9 * LEASE_MS, offset=6)
    assert log.at(10 * LEASE_MS).claim("b") == "refused"


def test_heartbeat_never_takes_a_claim() -> None:
    """A heartbeat of an instance that is not the owner is refused, for a free key and for a live or stale owner."""
    log = Log()
    log.claim("a")
    assert log.beat("b", 1) == "refused"
    assert log.at(LEASE_MS + 1).beat("b", 1) == "refused"
    log.release("a", 0)
    assert log.beat("a", 1) == "refused"
    assert log.key() == free()


def test_heartbeat_of_the_displaced_owner() -> None:
    """An owner that was silent for longer than its lease is fenced by the instance that claimed since then."""
    log = planned()
    log.at(LEASE_MS + 1).claim("b")
    assert log.beat("a", 9) == "refused"
    assert log.key() == owned("b", 3, LEASE_MS + 1, offset=5, plan_end=9, plan_attempts=1)


def test_heartbeat_while_paused() -> None:
    """During a pause owners keep their keys and can commit."""
    log = planned()
    log.pause("op")
    assert log.at(1).beat("a", 9) == "accepted"
    assert log.key() == owned("a", 0, 1, offset=9)


# 4. ReleasingPartition.


@pytest.mark.parametrize("offset", [0, 5, 7])
@pytest.mark.parametrize("ms", [0, 5 * LEASE_MS])
def test_release_moves_no_offset(offset: int, ms: int) -> None:
    """A release by the owner, live or stale, frees the key. Offset and plan stay, whatever offset the record has."""
    log = planned()
    assert log.at(ms).release("a", offset) == "accepted"
    assert log.key() == free(offset=5, plan_end=9)


def test_release_sets_no_first_offset() -> None:
    """A release does not set an unknown offset."""
    log = Log()
    log.claim("a")
    assert log.release("a", 3) == "accepted"
    assert log.key() == free()


def test_release_from_another() -> None:
    """A release by an instance that is not the owner is refused, and so is a second release."""
    log = held()
    assert log.release("b", 5) == "refused"
    assert log.release("a", 5) == "accepted"
    assert log.release("a", 5) == "refused"


@pytest.mark.parametrize("offset", [0, 5, 7, 9, 12])
@pytest.mark.parametrize("ms", [0, 5 * LEASE_MS])
def test_release_by_the_pauser_sets_the_position(offset: int, ms: int) -> None:
    """During its pause the pausing instance sets any offset by a release.

    This ends the plan and starts a generation.
    """
    log = planned()
    log.pause("op")
    log.revoke(0)
    log.claim("op")
    assert log.at(ms).release("op", offset) == "accepted"
    assert log.key() == free(offset=offset, generation=6)


def test_release_by_the_pauser_of_what_it_does_not_own() -> None:
    """The pausing instance sets no position of a key that it does not own."""
    log = planned()
    log.pause("op")
    assert log.release("op", 1) == "refused"
    log.revoke(0)
    assert log.release("op", 1) == "refused"


def test_release_after_the_pause_sets_nothing() -> None:
    """A release after the end of the pause is an ordinary release."""
    log = planned()
    log.pause("op", START_MS // 1000 + 1)
    log.revoke(0)
    log.claim("op")
    assert log.at(1000).release("op", 1) == "accepted"
    assert log.key() == free(offset=5, plan_end=9, plan_attempts=1)


def test_release_in_anothers_pause_sets_nothing() -> None:
    """Only the instance that paused the group last can set positions."""
    log = planned()
    log.pause("op")
    log.revoke(0)
    log.claim("op")
    log.pause("op2")
    assert log.release("op", 1) == "accepted"
    assert log.key() == free(offset=5, plan_end=9, plan_attempts=1)


def test_release_by_an_owner_in_its_own_pause_sets_the_position() -> None:
    """An owner that paused the group itself sets the position by its release."""
    log = planned()
    log.pause("a")
    assert log.release("a", 2) == "accepted"
    assert log.key() == free(offset=2, generation=4)


# 4. RevokingClaim.


@pytest.mark.parametrize("ms", [0, 5 * LEASE_MS])
def test_revocation_takes_the_claim_of_its_epoch(ms: int) -> None:
    """A revocation with the owner's epoch frees the key, whether the owner is live or stale. Offset and plan stay."""
    log = planned()
    assert log.at(ms).revoke(0) == "accepted"
    assert log.key() == free(offset=5, plan_end=9)


def test_revocation_of_another_epoch() -> None:
    """A revocation is refused if its epoch differs, or if the key is free or unknown."""
    log = Log()
    log.mark()
    log.claim("a")
    assert log.revoke(0) == "refused"
    assert log.revoke(2) == "refused"
    assert log.revoke(1, "g/t/1") == "refused"
    assert log.revoke(1) == "accepted"
    assert log.revoke(1) == "refused"


def test_revocation_reaches_no_later_claim() -> None:
    """A late revocation has the epoch of an earlier claim and does not affect the new owner."""
    log = held()
    log.revoke(0)
    log.claim("a")
    assert log.revoke(0) == "refused"
    assert log.key() == owned("a", 3, 0, offset=5)


# 4. ClaimingMessages.


def test_plan_of_the_live_owner() -> None:
    """A plan that ends after the offset is opened, and nothing else changes, including the last beat."""
    log = held()
    assert log.at(LEASE_MS).plan("a", 6) == "accepted"
    assert log.key() == owned("a", 0, 0, offset=5, plan_end=6)


def test_plan_of_a_stale_owner_or_a_stranger() -> None:
    """Only a live owner can plan."""
    log = held()
    assert log.plan("b", 9) == "refused"
    assert log.at(LEASE_MS + 1).plan("a", 9) == "refused"
    log.release("a", 5)
    assert log.plan("a", 9) == "refused"


@pytest.mark.parametrize("instance", ["a", "op"])
def test_plan_while_paused(instance: str) -> None:
    """While the group is paused no instance can plan, including the one that paused it."""
    log = held()
    log.pause(instance)
    assert log.plan("a", 9) == "refused"
    log.resume("op")
    assert log.plan("a", 9) == "accepted"


def test_plan_without_an_offset() -> None:
    """Without a known offset a plan is refused."""
    log = Log()
    log.claim("a")
    assert log.plan("a", 9) == "refused"


@pytest.mark.parametrize(("end", "verdict"), [(4, "refused"), (5, "refused"), (6, "accepted")])
def test_plan_must_reach_past_the_offset(end: int, verdict: str) -> None:
    """An empty plan is refused."""
    assert held().plan("a", end) == verdict


def test_an_open_plan_cannot_be_replaced() -> None:
    """While a plan is open only a plan with the same end is accepted, and it keeps its attempts."""
    log = planned()
    log.revoke(0)
    log.claim("b")
    for end in (6, 8, 10):
        assert log.plan("b", end) == "refused"
    assert log.plan("b", 9) == "accepted"
    assert log.key() == owned("b", 4, 0, offset=5, plan_end=9, plan_attempts=1)


# 4. ReleaseGroup.


@pytest.mark.parametrize(("ms", "verdict"), [(999, "refused"), (1000, "accepted"), (1001, "accepted")])
def test_a_group_is_paused_below_its_expiry(ms: int, verdict: str) -> None:
    """A group is paused while t < e * 1000, to the millisecond."""
    log = Log()
    log.pause("op", START_MS // 1000 + 1)
    assert log.at(ms).claim("a") == verdict


def test_the_last_pause_wins() -> None:
    """A shorter pause of any instance replaces a longer one. An expired one resumes the group."""
    log = Log()
    log.pause("op")
    log.pause("other", START_MS // 1000 + 1)
    assert log.claim("op") == "refused"
    assert log.reader.summary()["groups"]["g"]["paused_until"] == START_MS // 1000 + 1
    log.pause("third", 3)
    assert log.claim("a") == "accepted"
    assert log.reader.summary()["groups"]["g"]["paused_until"] == 3


def test_a_pause_leaves_owners_and_plans() -> None:
    """A pause changes no key."""
    log = planned()
    before = log.key()
    assert log.pause("op") == "accepted"
    assert log.key() == before


def test_a_pause_is_its_groups_alone() -> None:
    """Another group of the same topic is not paused."""
    log = Log()
    log.pause("op")
    assert log.claim("a", "h/t/0") == "accepted"


def test_a_pause_is_its_coordination_partitions_alone() -> None:
    """A pause that was written to some coordination partitions holds only there.

    The summary shows the latest expiry.
    """
    reader = PlainReader(8)
    assert reader.read(4, 0, 0, b"ReleaseGroup/0/1/op/c/g//0/99") == "accepted"
    assert reader.read(4, 1, 0, b"ClaimingPartition/1/1/a/c/g/ev/0") == "refused"
    assert reader.read(5, 0, 0, b"ClaimingPartition/1/1/a/c/g/ev2/0") == "accepted"
    assert reader.summary()["groups"]["g"]["paused_until"] == 99
    assert reader.read(5, 1, 0, b"ReleaseGroup/0/1/op/c/g//0/98") == "accepted"
    assert reader.summary()["groups"]["g"]["paused_until"] == 99
    assert reader.read(7, 0, 0, b"ReleaseGroup/0/1/op/c/g//0/100") == "accepted"
    assert reader.summary()["groups"]["g"]["paused_until"] == 100


# 4. DataTopic.


def test_first_data_topic() -> None:
    """The live owner sets a key's first data topic. Offset, plan and generation stay."""
    log = planned()
    assert log.data_topic("a", ID_A) == "accepted"
    assert log.key() == owned("a", 0, 0, offset=5, plan_end=9, data_topic_id=ID_A)


def test_data_topic_of_a_stale_owner_or_a_stranger() -> None:
    """Only a live owner can set a data topic, even during its own pause."""
    log = held()
    assert log.data_topic("b", ID_A) == "refused"
    log.pause("b")
    assert log.data_topic("b", ID_A) == "refused"
    log.pause("a")
    assert log.at(LEASE_MS + 1).data_topic("a", ID_A) == "refused"


def test_first_data_topic_in_anothers_pause() -> None:
    """The first data topic needs no pause of the owner."""
    log = held()
    log.pause("op")
    assert log.data_topic("a", ID_A) == "accepted"


@pytest.mark.parametrize("data_topic_id", [ID_A, ID_B])
def test_data_topic_in_place_of_one_needs_the_own_pause(data_topic_id: str) -> None:
    """If a data topic is set, only the owner that paused the group can set one, even the same one."""
    log = held()
    log.data_topic("a", ID_A)
    assert log.data_topic("a", data_topic_id) == "refused"
    log.pause("op")
    assert log.data_topic("a", data_topic_id) == "refused"
    log.pause("a", START_MS // 1000 + 1)
    assert log.at(1000).data_topic("a", data_topic_id) == "refused"
    log.pause("a")
    assert log.data_topic("a", data_topic_id) == "accepted"


def test_another_data_topic() -> None:
    """The id of another data topic removes offset and plan and starts a generation. The owner stays."""
    log = planned()
    log.data_topic("a", ID_A)
    log.pause("a")
    assert log.data_topic("a", ID_B) == "accepted"
    assert log.key() == owned("a", 0, 0, data_topic_id=ID_B, generation=5)


def test_the_same_data_topic_again() -> None:
    """The id of the same data topic changes nothing."""
    log = planned()
    log.data_topic("a", ID_A)
    log.pause("a")
    before = log.key()
    assert log.data_topic("a", ID_A) == "accepted"
    assert log.key() == before


# 4. GroupSettings.


def test_first_settings_of_a_new_group() -> None:
    """Any instance can write the first settings of a new group, once."""
    log = Log()
    assert log.settings("s") == "accepted"
    assert log.settings("s") == "refused"


def test_settings_while_an_owner_is_live() -> None:
    """While a key of the group has a live owner, by the interval still in force, settings are refused."""
    log = held()
    log.pause("op")
    assert log.at(LEASE_MS).settings("op", 1) == "refused"
    assert log.at(LEASE_MS + 1).settings("op", 1) == "accepted"


def test_settings_clear_stale_owners() -> None:
    """Accepted settings remove the owners of all keys of the group. Another group keeps its owners."""
    log = held()
    log.claim("a", "g/t/1")
    log.claim("a", "h/t/0")
    log.at(LEASE_MS + 1).settings("s")
    assert log.key() == free(offset=5)
    assert log.key("g/t/1") == free()
    assert log.key("h/t/0") == owned("a", 3, 0)
    assert log.beat("a", 6) == "refused"


def test_first_settings_over_an_open_plan() -> None:
    """First settings of a group with an open plan are accepted only from the instance that paused the group."""
    log = planned()
    log.release("a", 5)
    assert log.settings("s") == "refused"
    log.pause("op")
    assert log.settings("s") == "refused"
    assert log.settings("op") == "accepted"
    assert log.key() == free(offset=5, plan_end=9)


def test_first_settings_in_anothers_pause() -> None:
    """First settings of a group without an open plan need no pause."""
    log = Log()
    log.pause("op")
    assert log.settings("s") == "accepted"


def test_later_settings_need_the_own_pause() -> None:
    """Only the instance that paused the group can change settings, as long as its pause lasts."""
    log = Log()
    log.settings("s")
    log.pause("op", START_MS // 1000 + 1)
    assert log.settings("s", 5) == "refused"
    assert log.settings("op", 5) == "accepted"
    assert log.at(1000).settings("op", 7) == "refused"


def test_settings_with_another_delivery() -> None:
    """Another delivery ends the plan of each key with an offset and starts a generation.

    Keys without one are unchanged.
    """
    log = planned()
    log.claim("a", "g/t/1")
    log.claim("a", "h/t/0")
    log.beat("a", 1, "h/t/0")
    log.pause("op")
    log.at(LEASE_MS + 1).settings("op", delivery="effectively_once")
    assert log.key() == free(offset=5, generation=7)
    assert log.key("g/t/1") == free()
    assert log.key("h/t/0") == owned("a", 4, 0, offset=1)
    assert log.claim("op", "g/t/2") == "accepted"
    assert log.key("g/t/2") == owned("op", 8, LEASE_MS + 1)


def test_settings_with_the_same_delivery() -> None:
    """Another interval, rule set or feature changes neither plans nor generations."""
    log = planned()
    log.pause("op")
    log.at(LEASE_MS + 1)
    assert log.settings("op", 60_000, "go", features="a,b") == "accepted"
    assert log.settings("op", 60_000, "go", "effectively_once") == "accepted"
    assert log.key() == free(offset=5, generation=5)
    assert log.settings("op", 1, "native", "effectively_once") == "accepted"
    assert log.key() == free(offset=5, generation=5)


def test_settings_are_their_coordination_partitions_alone() -> None:
    """Settings are in force only in the coordination partition in which they were accepted."""
    reader = PlainReader(8)
    reader.read(4, 0, 0, b"GroupSettings/1/1/s/c/g//0/5/native/at_least_once/-")
    for partition, topic, verdict in [(4, "ev", "accepted"), (5, "ev2", "refused")]:
        assert reader.read(partition, 1 if partition == 4 else 0, 0, claim_of("a", topic)) == "accepted"
        assert reader.read(partition, 2, 11, claim_of("b", topic)) == verdict


def claim_of(instance: str, topic: str) -> bytes:
    """Return the value of a claim of the topic's partition 0."""
    return f"ClaimingPartition/1/1/{instance}/c/g/{topic}/0".encode()


# 4. Mark.


def test_mark_moves_time_and_nothing_else() -> None:
    """A mark is always accepted. It creates no group and advances log time."""
    log = Log()
    assert log.mark(group="other") == "accepted"
    log.claim("a")
    before = log.key()
    assert log.at(LEASE_MS + 1).mark() == "accepted"
    assert log.key() == before
    assert set(log.reader.summary()["groups"]) == {"g"}
    assert log.at(0).claim("b") == "accepted"


# 5. Where a reader may start.


def observed() -> Log:
    """Return a log whose start was deleted."""
    return Log(first_offset=100)


def test_a_log_cut_off_is_only_observed() -> None:
    """Keys of a coordination partition that does not start at 0 are provisional: no epoch, no plan, generation 0."""
    log = observed()
    assert log.at(1).claim("a") == "accepted"
    assert log.at(2).beat("a", 5) == "accepted"
    assert log.plan("a", 9) == "accepted"
    assert log.key() == owned("a", None, 2, offset=5, provisional=True)


def test_the_first_record_decides_whatever_it_is() -> None:
    """The first record's offset decides, even if that record is invalid: 0 makes a certain log, 1 an observed one."""
    for offset in (0, 1):
        log = Log(first_offset=offset)
        log.raw(None)
        log.claim("a")
        assert log.key()["provisional"] is (offset == 1)


def test_each_coordination_partition_is_certain_or_not_by_itself() -> None:
    """A coordination partition without its start makes no other partition provisional."""
    reader = PlainReader(8)
    reader.read(4, 7, 0, b"ClaimingPartition/1/1/a/c/g/ev/0")
    reader.read(5, 0, 0, b"ClaimingPartition/1/1/a/c/g/ev2/0")
    assert [row["provisional"] for row in reader.summary()["groups"]["g"]["partitions"]] == [True, False]


def test_an_observer_refuses_nothing() -> None:
    """An observer accepts each valid record, and each except a mark creates its key or group.

    Invalid ones are counted.
    """
    log = observed()
    verdicts = [
        log.mark(),
        log.beat("a", 1, "g/t/1"),
        log.release("a", 2, "g/t/2"),
        log.plan("a", 3, "g/t/3"),
        log.revoke(4, "g/t/4"),
        log.data_topic("a", ID_A, "g/t/5"),
        log.pause("a", 7),
        log.settings("a", 5),
        log.settings("b", 6),
        log.claim("b", "g/t/1"),
    ]
    assert set(verdicts) == {"accepted"}
    assert log.raw(b"x") == "invalid"
    summary = log.reader.summary()
    assert (summary["invalid"], summary["refused"]) == (1, 0)
    assert summary["groups"]["g"]["paused_until"] == 7
    assert log.key("g/t/1") == owned("b", None, 0, offset=1, provisional=True)
    assert log.key("g/t/2") == free(offset=2, provisional=True)
    assert log.key("g/t/3") == free(provisional=True)
    assert log.key("g/t/4") == free(provisional=True)
    assert log.key("g/t/5") == free(data_topic_id=ID_A, provisional=True)


def test_an_observer_shows_the_last_sender() -> None:
    """The owner shown is the sender of the last heartbeat or claim."""
    log = observed()
    log.claim("a")
    log.at(1).beat("b", 5, client="x")
    assert log.key() == owned("b", None, 1, owner_client="x", offset=5, provisional=True)
    log.at(2).claim("a")
    assert log.key() == owned("a", None, 2, offset=5, provisional=True)
    log.at(3).beat("a", 4, client="y")
    assert log.key() == owned("a", None, 3, owner_client="y", offset=4, provisional=True)


def test_an_observer_and_releases() -> None:
    """A release by the shown owner frees the key, and one by another instance does not. Both set the shown offset."""
    log = observed()
    log.beat("a", 5)
    log.release("b", 3)
    assert log.key() == owned("a", None, 0, offset=3, provisional=True)
    log.release("a", 7)
    assert log.key() == free(offset=7, provisional=True)


def test_an_observer_and_revocations() -> None:
    """Any revocation frees the key, because its epoch is unknown."""
    log = observed()
    log.beat("a", 5)
    log.revoke(12345)
    assert log.key() == free(offset=5, provisional=True)


def test_an_observer_and_settings_or_another_data_topic() -> None:
    """Settings and data topics are accepted as they are. They change neither the owner nor the shown offset."""
    log = observed()
    log.beat("a", 5)
    log.data_topic("b", ID_A)
    log.data_topic("c", ID_B)
    log.settings("d", delivery="at_most_once")
    assert log.key() == owned("a", None, 0, offset=5, data_topic_id=ID_B, provisional=True)


# 7. Rule set go.


def test_go_heartbeat_from_anyone_takes_the_claim() -> None:
    """A heartbeat of another instance makes it the owner, even if the old one is live. Its log offset is the epoch."""
    log = held(rules="go")
    assert log.at(3).beat("b", 5, client="me") == "accepted"
    assert log.key() == owned("b", 2, 3, owner_client="me", offset=5)
    assert log.at(4).beat("a", 6) == "accepted"
    assert log.key() == owned("a", 3, 4, offset=6)


def test_go_heartbeat_of_a_key_without_an_owner() -> None:
    """A heartbeat of a key without an owner, or of an unknown key, is a claim."""
    log = Log("go")
    assert log.beat("a", 5) == "accepted"
    assert log.key() == owned("a", 0, 0, offset=5)
    log.release("a", 5)
    assert log.beat("a", 6) == "accepted"
    assert log.key() == owned("a", 2, 0, offset=6)


def test_go_heartbeat_of_the_owner_keeps_the_epoch() -> None:
    """A heartbeat of the owner, live or stale, is no new claim."""
    log = held(rules="go")
    assert log.at(9 * LEASE_MS).beat("a", 7, client="new") == "accepted"
    assert log.key() == owned("a", 0, 9 * LEASE_MS, offset=7)


def test_go_heartbeat_lowers_the_offset() -> None:
    """A heartbeat with a lower offset commits it and ends the plan.

    The same offset keeps the plan, whichever instance sends it.
    """
    log = planned("go")
    log.beat("b", 5)
    assert log.key() == owned("b", 3, 0, offset=5, plan_end=9)
    log.beat("b", 4)
    assert log.key() == owned("b", 3, 0, offset=4)


def test_go_heartbeat_is_no_attempt() -> None:
    """Only a ClaimingPartition counts as an attempt, even if a heartbeat takes over the claim."""
    log = planned("go")
    log.beat("b", 5)
    assert log.key()["plan_attempts"] == 0


def test_go_heartbeat_while_paused() -> None:
    """During a pause a heartbeat can still take over a claim."""
    log = held(rules="go")
    log.pause("op")
    assert log.beat("b", 5) == "accepted"
    assert log.key()["owner_instance"] == "b"


@pytest.mark.parametrize(("offset", "after", "plan_end"), [(4, 5, 9), (5, 5, 9), (6, 6, None), (9, 9, None)])
def test_go_release_moves_forwards(offset: int, after: int, plan_end: int | None) -> None:
    """A release that sets no position commits a higher offset, which ends the plan, and ignores a lower one."""
    log = planned("go")
    assert log.release("a", offset) == "accepted"
    assert log.key() == free(offset=after, plan_end=plan_end)


def test_go_release_sets_a_first_offset() -> None:
    """A release sets an unknown offset."""
    log = Log("go")
    log.claim("a")
    log.release("a", 3)
    assert log.key() == free(offset=3)


def test_go_release_from_another() -> None:
    """Under go, too, only the owner can release."""
    assert held(rules="go").release("b", 9) == "refused"


@pytest.mark.parametrize("offset", [1, 5, 8])
def test_go_release_by_the_pauser_sets_the_position(offset: int) -> None:
    """Under go, positions are set as under native."""
    log = planned("go")
    log.pause("a")
    assert log.release("a", offset) == "accepted"
    assert log.key() == free(offset=offset, generation=4)


def test_go_claims_plans_and_revocations_are_those_of_native() -> None:
    """Under go, all other rules are those of section 4."""
    log = planned("go")
    assert log.claim("b") == "refused"
    assert log.plan("b", 9) == "refused"
    assert log.plan("a", 8) == "refused"
    assert log.revoke(1) == "refused"
    assert log.at(LEASE_MS).claim("b") == "refused"
    assert log.at(LEASE_MS + 1).claim("b") == "accepted"
    assert log.key() == owned("b", log.offset, LEASE_MS + 1, offset=5, plan_end=9, plan_attempts=1)


def test_go_comes_and_goes_with_settings() -> None:
    """The rule set in the settings replaces the one that was passed to the reader."""
    log = Log()
    log.settings("s", 60_000, "go")
    assert log.beat("a", 5) == "accepted"
    log = Log("go")
    log.settings("s", 60_000, "native")
    assert log.beat("a", 5) == "refused"


# A log that the Go library wrote.


def test_the_go_librarys_log_replays_to_what_its_readme_reports() -> None:
    """No record is invalid or refused, each takeover waited until the owner was stale, and all keys are released.

    The final offsets are 250, 500 and 100.
    """
    records = records_of(VECTOR.read_text(encoding="utf-8").splitlines())
    for rules in ("native", "go"):
        reader = PlainReader(8, 60_000, rules)
        takeovers = 0
        for partition, offset, timestamp_ms, value in records:
            if value is not None and b"ClaimingPartition" in value and b"/tkB/" in value:
                number = int(value.split(b"/")[-1])
                before = reader.summary()["groups"]["takeover"]["partitions"][number]
                assert before["owner_client"] == "tkA"
                assert timestamp_ms - before["last_beat_ms"] > 120_000
                takeovers += 1
            assert reader.read(partition, offset, timestamp_ms, value) == "accepted"
        assert takeovers == 4
        summary = reader.summary()
        assert (summary["invalid"], summary["refused"]) == (0, 0)
        shown = {
            (name, row["topic"], row["partition"], row["offset"], row["owner_instance"], row["plan_end"])
            for name, group in summary["groups"].items()
            for row in group["partitions"]
        }
        assert shown == {
            *(("groupG", "ev", number, 250, None, None) for number in range(4)),
            *(("groupG", "ev2", number, 500, None, None) for number in range(2)),
            *(("takeover", "ev", number, 250, None, None) for number in range(4)),
            *(("wideG", "wide", number, 100, None, None) for number in range(64)),
        }
        assert {group["paused_until"] for group in summary["groups"].values()} == {None}
