"""A second reader of protocol.md, simple and slow, written from its text alone; it shares no code with the library.

It exists to be compared with the library's own reader, record by record. It follows sections 1 to 5 and 7, and section
8 (R; R3 is section 8.3), sentence by sentence. The number of a section is next to the code that carries out its
sentence. States are dicts and rules are if-statements. Do not make anything here faster or shorter if the code then
follows the text less obviously.
"""

# Sentences of the document stay one `if` each, however many there are.
# ruff: noqa: C901, PLR0912, SIM102

import hashlib
import json
import unicodedata
from collections.abc import Iterable
from typing import Any

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

# Section 1, the table: the number of fields after `partition`.
TAIL_FIELDS = {
    "ClaimingPartition": 0,
    "Heartbeat": 1,
    "ReleasingPartition": 1,
    "ClaimingMessages": 1,
    "ReleaseGroup": 1,
    "RevokingClaim": 1,
    "GroupSettings": 4,
    "DataTopic": 1,
    "Mark": 0,
    # R1, the table.
    "ClaimingRange": 2,
    "PlanningRange": 2,
    "RangeHeartbeat": 1,
    "RangeDone": 1,
    "ReleasingRange": 1,
    "RevokingRange": 1,
}
TYPES_WITHOUT_TOPIC = ["ReleaseGroup", "GroupSettings", "Mark"]
DELIVERIES = ["at_most_once", "at_least_once", "effectively_once"]

MOST_RANGES = 256  # R2

DIGITS = "0123456789"
LOWER = "abcdefghijklmnopqrstuvwxyz"
UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class PlainReader:
    """The world state that section 4 (and 7) computes from the records of a log; times are in milliseconds.

    `heartbeat_interval_ms` and `rules` ("native" or "go") apply until a group's first settings record.
    """

    def __init__(self, coordination_partitions: int, heartbeat_interval_ms: int = 60_000, rules: str = "go") -> None:
        self.coordination_partitions = coordination_partitions
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self.rules = rules
        self.invalid = 0
        self.refused = 0
        self.noted: dict[str, int] = {}
        self.logs: dict[int, dict[str, Any]] = {}

    def read(self, partition: int, offset: int, timestamp_ms: int, value: bytes | None) -> str:
        """Read the next record of a coordination partition: "accepted", "refused" or "invalid".

        Raises ValueError for a coordination partition out of range or for an offset that is not higher than the one
        before.
        """
        if not 0 <= partition < self.coordination_partitions:
            raise ValueError(f"There is no coordination partition {partition}.")
        if partition not in self.logs:
            # 5: a reader starts at log offset 0, else it only observes.
            self.logs[partition] = {
                "observed": offset > 0,
                "log_time": timestamp_ms,
                "last_offset": -1,
                "groups": {},
            }
        log = self.logs[partition]
        if offset <= log["last_offset"]:
            raise ValueError(f"Offset {offset} does not come after {log['last_offset']}.")
        log["last_offset"] = offset

        # 2: the larger of its own timestamp and the log time before it, of invalid and refused ones too (1).
        log["log_time"] = max(log["log_time"], timestamp_ms)

        record = parse(value, partition, self.coordination_partitions)
        if record is None:
            self.invalid = self.invalid + 1
            return "invalid"
        if log["observed"]:
            self._observe(log, record)
            return "accepted"
        if self._change(log, record, offset):
            return "accepted"
        self.refused = self.refused + 1
        return "refused"

    # Section 5: what an observing reader shows.

    def _observe(self, log: dict[str, Any], record: dict[str, Any]) -> None:
        kind = record["type"]
        if kind == "Mark":
            return
        group = log["groups"].setdefault(record["group"], new_group())
        if kind == "ReleaseGroup":
            group["paused_until"] = record["expiry"]
            group["paused_by"] = record["instance"]
            return
        if kind == "GroupSettings":
            group["settings"] = record["settings"]
            return
        key = group["keys"].setdefault((record["topic"], record["partition"]), new_key())
        if kind in {"Heartbeat", "ClaimingPartition"}:
            key["owner"] = new_owner(record, None, log["log_time"])
        if kind == "ReleasingPartition" and key["owner"] is not None:
            if key["owner"]["instance"] == record["instance"]:
                key["owner"] = None
        if kind == "RevokingClaim":
            key["owner"] = None
        if kind in {"Heartbeat", "ReleasingPartition"}:
            key["offset"] = record["offset"]
        if kind == "DataTopic":
            key["data_topic_id"] = record["data_topic_id"]

    # Sections 4 and 7: the effect of a record on a certain reader; False is a refusal.

    def _change(self, log: dict[str, Any], record: dict[str, Any], offset: int) -> bool:
        kind = record["type"]
        if kind == "Mark":
            return True  # always accepted, no effect, names nothing

        # A refused record leaves no trace: a new group or key is stored only when the record is accepted.
        group = log["groups"].get(record["group"])
        if group is None:
            group = new_group()

        if kind == "ReleaseGroup":
            accepted = self._release_group(group, record)
        elif kind == "GroupSettings":
            accepted = self._group_settings(log, group, record, offset)
        else:
            key = group["keys"].get((record["topic"], record["partition"]))
            if key is None:
                key = new_key()
            if kind == "ClaimingPartition":
                accepted = self._claiming_partition(log, group, key, record, offset)
            elif kind == "Heartbeat":
                accepted = self._heartbeat(log, group, key, record, offset)
            elif kind == "ReleasingPartition":
                accepted = self._releasing_partition(log, group, key, record, offset)
            elif kind == "RevokingClaim":
                accepted = self._revoking_claim(key, record)
            elif kind == "ClaimingMessages":
                accepted = self._claiming_messages(log, group, key, record)
            elif kind == "ClaimingRange":
                accepted = self._claiming_range(log, group, key, record, offset)
            elif kind == "PlanningRange":
                accepted = self._planning_range(log, group, key, record)
            elif kind == "RangeHeartbeat":
                accepted = self._range_heartbeat(log, key, record)
            elif kind == "RangeDone":
                accepted = self._range_done(key, record)
            elif kind == "ReleasingRange":
                accepted = self._releasing_range(key, record)
            elif kind == "RevokingRange":
                accepted = self._revoking_range(key, record)
            else:
                accepted = self._data_topic(log, group, key, record, offset)
            if accepted:
                group["keys"][record["topic"], record["partition"]] = key

        if accepted:
            log["groups"][record["group"]] = group
        return accepted

    def _claiming_partition(
        self,
        log: dict[str, Any],
        group: dict[str, Any],
        key: dict[str, Any],
        record: dict[str, Any],
        offset: int,
    ) -> bool:
        if self._has_live_owner(log, group, key):
            return False
        if is_paused(log, group) and group["paused_by"] != record["instance"]:
            return False
        # R3: no range is live, and either every range is spent, or the sender paused the group.
        for each in key["ranges"]:
            if self._is_live(log, group, each["owner"]):
                return False
        sender_paused = is_paused(log, group) and group["paused_by"] == record["instance"]
        for each in key["ranges"]:
            if not self._is_spent(log, group, each) and not sender_paused:
                return False
        self._drop_abandoned_claims(log, group, key)
        for each in key["ranges"]:
            each["owner"] = None
        key["owner"] = new_owner(record, offset, log["log_time"])
        if key["plan_end"] is not None:
            key["plan_attempts"] = key["plan_attempts"] + 1
        return True

    def _heartbeat(
        self,
        log: dict[str, Any],
        group: dict[str, Any],
        key: dict[str, Any],
        record: dict[str, Any],
        offset: int,
    ) -> bool:
        owner = key["owner"]
        is_owner = owner is not None and owner["instance"] == record["instance"]

        if self._settings_of(group)["rules"] == "go":
            # 7: from any instance; sets the offset, also to a lower one; the sender becomes the owner.
            # The lowering and the displacement are both reported, also when one record does both.
            if owner is not None and not is_owner:
                self._note("displaced")
            if key["offset"] is not None and record["offset"] < key["offset"]:
                self._note("lowered")
            if not is_owner:
                key["owner"] = new_owner(record, offset, log["log_time"])
            key["owner"]["last_beat"] = log["log_time"]
            move_offset(key, record["offset"])
            return True

        if not is_owner:
            return False
        key["owner"]["last_beat"] = log["log_time"]
        if key["offset"] is not None and record["offset"] < key["offset"]:
            self._note("rewind")  # a lower one is reported and moves nothing
            return True
        if key["ranges"] != []:
            if record["offset"] != key["offset"]:
                self._note("beyond_ranges")
            return True  # R3: the offset stays where it is
        if key["offset"] is not None and record["offset"] > key["offset"] and key["plan_end"] is None:
            self._note("unplanned")  # it moves a known offset without a plan
        if key["offset"] is None or record["offset"] > key["offset"]:
            move_offset(key, record["offset"])
        return True

    def _note(self, what: str) -> None:
        self.noted[what] = self.noted.get(what, 0) + 1

    def _releasing_partition(
        self,
        log: dict[str, Any],
        group: dict[str, Any],
        key: dict[str, Any],
        record: dict[str, Any],
        offset: int,
    ) -> bool:
        owner = key["owner"]
        if owner is None:
            return False
        if owner["instance"] != record["instance"]:
            return False
        key["owner"] = None
        if is_paused(log, group) and group["paused_by"] == record["instance"]:
            # The second row: a position is set.
            key["offset"] = record["offset"]
            end_plan(key)
            key["generation"] = offset
            key["ranges"] = []  # R3
            return True
        if self._settings_of(group)["rules"] == "go":
            # 7: a release that sets no position moves the offset forwards.
            if key["offset"] is None or record["offset"] > key["offset"]:
                move_offset(key, record["offset"])
        if record["offset"] != key["offset"]:
            self._note("released_elsewhere")  # an o other than the offset is reported
        return True

    def _revoking_claim(self, key: dict[str, Any], record: dict[str, Any]) -> bool:
        if key["owner"] is None:
            return False
        if key["owner"]["epoch"] != record["epoch"]:
            return False
        key["owner"] = None
        return True

    def _claiming_messages(
        self, log: dict[str, Any], group: dict[str, Any], key: dict[str, Any], record: dict[str, Any]
    ) -> bool:
        if not self._has_live_owner(log, group, key):
            return False
        if key["owner"]["instance"] != record["instance"]:
            return False
        if is_paused(log, group):
            return False
        if key["offset"] is None:
            return False
        if record["offset"] <= key["offset"]:
            return False
        if key["ranges"] != []:
            return False  # R3: no range is there
        if key["plan_end"] is None:
            key["plan_end"] = record["offset"]
            key["plan_attempts"] = 0
            return True
        # A plan that was open is only repeated, and keeps its attempts.
        return bool(key["plan_end"] == record["offset"])

    def _release_group(self, group: dict[str, Any], record: dict[str, Any]) -> bool:
        group["paused_until"] = record["expiry"]
        group["paused_by"] = record["instance"]
        return True

    def _data_topic(
        self,
        log: dict[str, Any],
        group: dict[str, Any],
        key: dict[str, Any],
        record: dict[str, Any],
        offset: int,
    ) -> bool:
        if not self._has_live_owner(log, group, key):
            return False
        if key["owner"]["instance"] != record["instance"]:
            return False
        paused_by_sender = is_paused(log, group) and group["paused_by"] == record["instance"]
        if key["data_topic_id"] is not None and not paused_by_sender:
            return False
        if key["data_topic_id"] is not None and key["data_topic_id"] != record["data_topic_id"]:
            # In place of another id.
            key["offset"] = None
            end_plan(key)
            key["generation"] = offset
            key["ranges"] = []  # R3
        key["data_topic_id"] = record["data_topic_id"]
        return True

    def _group_settings(self, log: dict[str, Any], group: dict[str, Any], record: dict[str, Any], offset: int) -> bool:
        for key in group["keys"].values():
            if self._has_live_owner(log, group, key):
                return False
            for each in key["ranges"]:
                if self._is_live(log, group, each["owner"]):
                    return False  # R3: no range is live
        paused_by_sender = is_paused(log, group) and group["paused_by"] == record["instance"]
        if not paused_by_sender:
            if group["settings"] is not None:
                return False
            for key in group["keys"].values():
                if key["plan_end"] is not None:
                    return False
        for key in group["keys"].values():
            self._drop_abandoned_claims(log, group, key)  # R3
        delivery_before = self._settings_of(group)["delivery"]
        group["settings"] = record["settings"]
        for key in group["keys"].values():
            key["owner"] = None
            for each in key["ranges"]:
                each["owner"] = None  # R3
            if record["settings"]["delivery"] != delivery_before and key["offset"] is not None:
                end_plan(key)
                key["generation"] = offset
                key["ranges"] = []  # R3
            if not self._enables_ranges(group) and key["ranges"] != []:
                key["ranges"] = []  # R3: they do not enable ranges, and one is left
                key["generation"] = offset
        return True

    # R3: claims on ranges.

    def _claiming_range(
        self,
        log: dict[str, Any],
        group: dict[str, Any],
        key: dict[str, Any],
        record: dict[str, Any],
        offset: int,
    ) -> bool:
        if not self._enables_ranges(group):
            return False
        if is_paused(log, group):
            return False
        if self._has_live_owner(log, group, key):
            return False
        if key["plan_end"] is not None:
            return False
        if key["offset"] is None:
            return False
        if key["data_topic_id"] is None:
            return False
        if record["start"] < key["offset"]:
            return False
        if record["start"] >= record["end"]:
            return False

        # The spent left aside: either it is exactly a planned range without a live owner ...
        again = None
        for each in key["ranges"]:
            if each["start"] == record["start"] and each["end"] == record["end"]:
                if each["phase"] == "planned" and not self._is_live(log, group, each["owner"]):
                    again = each
        if again is None:
            # ... or no range overlaps it and there are fewer than 256.
            count = 0
            for each in key["ranges"]:
                if self._is_spent(log, group, each):
                    continue
                count = count + 1
                if each["start"] < record["end"] and record["start"] < each["end"]:
                    return False
            if count >= MOST_RANGES:
                return False

        self._drop_abandoned_claims(log, group, key)
        key["owner"] = None
        if again is not None:
            again["owner"] = new_owner(record, offset, log["log_time"])
            again["attempts"] = again["attempts"] + 1
        else:
            key["ranges"].append(
                {
                    "start": record["start"],
                    "end": record["end"],
                    "phase": "claimed",
                    "attempts": 0,
                    "owner": new_owner(record, offset, log["log_time"]),
                }
            )
            key["ranges"].sort(key=lambda each: int(each["start"]))
        return True

    def _planning_range(
        self, log: dict[str, Any], group: dict[str, Any], key: dict[str, Any], record: dict[str, Any]
    ) -> bool:
        found = range_of(key, record["epoch"])
        if found is None:
            return False
        if found["owner"]["instance"] != record["instance"]:
            return False
        if not self._is_live(log, group, found["owner"]):
            return False
        if is_paused(log, group):
            return False
        if found["phase"] == "planned":
            return bool(found["end"] == record["end"])
        if record["end"] <= found["start"]:
            return False
        if record["end"] > found["end"]:
            return False
        found["end"] = record["end"]
        found["phase"] = "planned"
        return True

    def _range_heartbeat(self, log: dict[str, Any], key: dict[str, Any], record: dict[str, Any]) -> bool:
        found = range_of(key, record["epoch"])
        if found is None:
            return False
        if found["owner"]["instance"] != record["instance"]:
            return False
        found["owner"]["last_beat"] = log["log_time"]
        return True

    def _range_done(self, key: dict[str, Any], record: dict[str, Any]) -> bool:
        found = range_of(key, record["epoch"])
        if found is None:
            return False
        if found["owner"]["instance"] != record["instance"]:
            return False
        if found["phase"] != "planned":
            return False
        found["phase"] = "done"
        found["owner"] = None
        found["attempts"] = 0  # they are those of a planned range (R2)
        join_done(key)
        # If a done range begins at the offset: offset := its end, and that range is gone.
        for each in list(key["ranges"]):
            if each["phase"] == "done" and each["start"] == key["offset"]:
                move_offset(key, each["end"])
                key["ranges"].remove(each)
        return True

    def _releasing_range(self, key: dict[str, Any], record: dict[str, Any]) -> bool:
        found = range_of(key, record["epoch"])
        if found is None:
            return False
        if found["owner"]["instance"] != record["instance"]:
            return False
        give_range_up(key, found)
        return True

    def _revoking_range(self, key: dict[str, Any], record: dict[str, Any]) -> bool:
        found = range_of(key, record["epoch"])
        if found is None:
            return False
        give_range_up(key, found)
        return True

    # R2.

    def _enables_ranges(self, group: dict[str, Any]) -> bool:
        settings = self._settings_of(group)
        return "ranges" in settings["features"] and settings["rules"] == "native"

    def _is_spent(self, log: dict[str, Any], group: dict[str, Any], each: dict[str, Any]) -> bool:
        return each["phase"] == "claimed" and not self._is_live(log, group, each["owner"])

    def _drop_abandoned_claims(self, log: dict[str, Any], group: dict[str, Any], key: dict[str, Any]) -> None:
        for each in list(key["ranges"]):
            if self._is_spent(log, group, each):
                key["ranges"].remove(each)

    # Section 3.

    def _settings_of(self, group: dict[str, Any]) -> dict[str, Any]:
        if group["settings"] is not None:
            settings: dict[str, Any] = group["settings"]
            return settings
        return {
            "heartbeat_interval_ms": self.heartbeat_interval_ms,
            "rules": self.rules,
            "delivery": "at_least_once",
            "features": [],
        }

    def _has_live_owner(self, log: dict[str, Any], group: dict[str, Any], key: dict[str, Any]) -> bool:
        return self._is_live(log, group, key["owner"])

    def _is_live(self, log: dict[str, Any], group: dict[str, Any], owner: dict[str, Any] | None) -> bool:
        if owner is None:
            return False
        age_ms = log["log_time"] - owner["last_beat"]
        return bool(age_ms <= 2 * self._settings_of(group)["heartbeat_interval_ms"])

    # What `replay --json` prints.

    def summary(self) -> dict[str, Any]:
        """Return the JSON object of `replay --json`; stale owners and expired pauses are shown as stored."""
        groups: dict[str, Any] = {}
        for log in self.logs.values():
            for group_name, group in log["groups"].items():
                if group_name not in groups:
                    groups[group_name] = {"paused_until": None, "partitions": []}
                shown = groups[group_name]
                if group["paused_until"] is not None:
                    if shown["paused_until"] is None or shown["paused_until"] < group["paused_until"]:
                        shown["paused_until"] = group["paused_until"]
                for (topic, number), key in group["keys"].items():
                    shown["partitions"].append(shown_key(topic, number, key, provisional=log["observed"]))
        for shown in groups.values():
            shown["partitions"].sort(key=lambda each: (each["topic"], each["partition"]))
        return {"invalid": self.invalid, "refused": self.refused, "groups": groups}


def new_group() -> dict[str, Any]:
    """Return the state of a group in a coordination partition before an accepted record names it."""
    return {"paused_until": None, "paused_by": None, "settings": None, "keys": {}}


def new_key() -> dict[str, Any]:
    """Return the state of a (group, topic, partition) before an accepted record names it (3)."""
    return {
        "owner": None,
        "offset": None,
        "plan_end": None,
        "plan_attempts": 0,
        "generation": 0,
        "data_topic_id": None,
        "ranges": [],
    }


def new_owner(record: dict[str, Any], epoch: int | None, log_time: int) -> dict[str, Any]:
    """Return an owner: the sender of the record (3, 4)."""
    return {
        "instance": record["instance"],
        "client": record["client"],
        "epoch": epoch,
        "last_beat": log_time,
    }


def shown_key(topic: str, number: int, key: dict[str, Any], *, provisional: bool) -> dict[str, Any]:
    """Return a key's row in the summary."""
    owner = key["owner"]
    if owner is None:
        owner = {"instance": None, "client": None, "epoch": None, "last_beat": None}
    shown = {
        "topic": topic,
        "partition": number,
        "owner_instance": owner["instance"],
        "owner_client": owner["client"],
        "epoch": owner["epoch"],
        "offset": key["offset"],
        "plan_end": key["plan_end"],
        "plan_attempts": key["plan_attempts"],
        "generation": key["generation"],
        "data_topic_id": key["data_topic_id"],
        "last_beat_ms": owner["last_beat"],
        "provisional": provisional,
    }
    if key["ranges"] != []:
        shown["ranges"] = [shown_range(each) for each in key["ranges"]]
    return shown


def shown_range(each: dict[str, Any]) -> dict[str, Any]:
    """Return a range's row in the summary."""
    owner = each["owner"]
    if owner is None:
        owner = {"instance": None, "client": None, "epoch": None, "last_beat": None}
    return {
        "start": each["start"],
        "end": each["end"],
        "phase": each["phase"],
        "attempts": each["attempts"],
        "owner_instance": owner["instance"],
        "owner_client": owner["client"],
        "epoch": owner["epoch"],
        "last_beat_ms": owner["last_beat"],
    }


def range_of(key: dict[str, Any], epoch: int) -> dict[str, Any] | None:
    """Return the range that has an owner of that epoch (R2)."""
    for each in key["ranges"]:
        if each["owner"] is not None and each["owner"]["epoch"] == epoch:
            found: dict[str, Any] = each
            return found
    return None


def give_range_up(key: dict[str, Any], found: dict[str, Any]) -> None:
    """Remove a range's owner; a range that is only claimed is removed (R3)."""
    if found["phase"] == "claimed":
        key["ranges"].remove(found)
    else:
        found["owner"] = None


def join_done(key: dict[str, Any]) -> None:
    """Merge done ranges that touch (R2)."""
    joined: list[dict[str, Any]] = []
    for each in key["ranges"]:
        if joined != [] and each["phase"] == "done" and joined[-1]["phase"] == "done":
            if joined[-1]["end"] == each["start"]:
                joined[-1]["end"] = each["end"]
                continue
        joined.append(each)
    key["ranges"] = joined


def is_paused(log: dict[str, Any], group: dict[str, Any]) -> bool:
    """Return whether a group is paused at log time (4: while t < e * 1000)."""
    if group["paused_until"] is None:
        return False
    return bool(log["log_time"] < group["paused_until"] * 1000)


def end_plan(key: dict[str, Any]) -> None:
    """End a key's plan, if it has one; without a plan the attempts are 0 (3)."""
    key["plan_end"] = None
    key["plan_attempts"] = 0


def move_offset(key: dict[str, Any], new_offset: int) -> None:
    """Set a key's offset; its plan exists exactly as long as the offset does not change (3)."""
    if key["offset"] != new_offset:
        end_plan(key)
    key["offset"] = new_offset


# Section 1: wire format.


def parse(value: bytes | None, partition: int, coordination_partitions: int) -> dict[str, Any] | None:
    """Return the fields of a value found in that coordination partition, None for an invalid one (1)."""
    if value is None:
        return None
    if len(value) > 2048:
        return None
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        return None

    fields = text.split("/")
    kind = fields[0]
    if kind not in TAIL_FIELDS:
        return None
    if len(fields) != 8 + TAIL_FIELDS[kind]:
        return None
    _, version, time, instance, client, group, topic, topic_partition = fields[:8]
    tail = fields[8:]

    if number(version, INT64_MAX) is None:
        return None
    if number(time, INT64_MAX) is None:
        return None
    if not is_name(instance) or not is_name(client) or not is_name(group):
        return None
    partition_number = number(topic_partition, INT32_MAX)
    if partition_number is None:
        return None
    if kind in TYPES_WITHOUT_TOPIC:
        if topic != "":
            return None
        if partition_number != 0:
            return None
    else:
        if not is_topic(topic):
            return None
        if coordination_partition(topic, coordination_partitions) != partition:
            return None

    record: dict[str, Any] = {
        "type": kind,
        "instance": instance,
        "client": client,
        "group": group,
        "topic": topic,
        "partition": partition_number,
    }
    if kind in {"Heartbeat", "ReleasingPartition", "ClaimingMessages"}:
        record["offset"] = number(tail[0], INT64_MAX)
        if record["offset"] is None:
            return None
    if kind == "RevokingClaim":
        record["epoch"] = number(tail[0], INT64_MAX)
        if record["epoch"] is None:
            return None
    if kind == "ClaimingRange":
        record["start"] = number(tail[0], INT64_MAX)
        record["end"] = number(tail[1], INT64_MAX)
        if record["start"] is None or record["end"] is None:
            return None
    if kind in {"PlanningRange", "RangeHeartbeat", "RangeDone", "ReleasingRange", "RevokingRange"}:
        record["epoch"] = number(tail[0], INT64_MAX)
        if record["epoch"] is None:
            return None
    if kind == "PlanningRange":
        record["end"] = number(tail[1], INT64_MAX)
        if record["end"] is None:
            return None
    if kind == "ReleaseGroup":
        record["expiry"] = number(tail[0], INT64_MAX)
        if record["expiry"] is None:
            return None
    if kind == "DataTopic":
        if not consists_of(tail[0], LOWER + UPPER + DIGITS + "_-") or len(tail[0]) != 22:
            return None
        record["data_topic_id"] = tail[0]
    if kind == "GroupSettings":
        record["settings"] = parse_settings(tail)
        if record["settings"] is None:
            return None
    return record


def parse_settings(tail: list[str]) -> dict[str, Any] | None:
    """Return the settings in the tail of a `GroupSettings`, None for invalid ones (1)."""
    heartbeat_interval_ms = number(tail[0], INT64_MAX)
    rules, delivery, features = tail[1:]
    if heartbeat_interval_ms is None:
        return None
    if heartbeat_interval_ms < 1:
        return None
    if rules not in {"native", "go"}:
        return None
    if rules == "go" and heartbeat_interval_ms != 60_000:
        return None
    if delivery not in DELIVERIES:
        return None
    names = []
    if features != "-":
        for name in features.split(","):
            if name == "" or name[0] not in LOWER:
                return None
            if not consists_of(name, LOWER + DIGITS + "_") or len(name) > 32:
                return None
            if name in names:
                return None
            names.append(name)
    return {
        "heartbeat_interval_ms": heartbeat_interval_ms,
        "rules": rules,
        "delivery": delivery,
        "features": names,
    }


def number(text: str, largest: int) -> int | None:
    """Return the number: ASCII digits, no sign, no leading zero except in `0` itself; else None (1)."""
    if text == "":
        return None
    if not consists_of(text, DIGITS):
        return None
    if text[0] == "0" and text != "0":
        return None
    result = int(text)
    if result > largest:
        return None
    return result


def is_name(text: str) -> bool:
    """Return whether this may be an instance, client or group: 1 to 255 code points, no `/`, no Cc (1)."""
    if not 1 <= len(text) <= 255:
        return False
    for character in text:
        if character == "/":
            return False
        if unicodedata.category(character) == "Cc":
            return False
    return True


def is_topic(text: str) -> bool:
    """Return whether this may be a topic (1)."""
    if not 1 <= len(text) <= 249:
        return False
    if text in {".", ".."}:
        return False
    return consists_of(text, LOWER + UPPER + DIGITS + "._-")


def consists_of(text: str, alphabet: str) -> bool:
    """Return whether each character of the text is in the alphabet."""
    return text.strip(alphabet) == ""  # a character outside of the alphabet stays, with all between two of them


def coordination_partition(topic: str, coordination_partitions: int) -> int:
    """Return the coordination partition of a topic (1)."""
    digest = hashlib.md5(topic.encode("ascii"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") % coordination_partitions


def records_of(lines: Iterable[str]) -> list[tuple[int, int, int, bytes | None]]:
    """Return the records of the lines of `replay FILE`; a text that is not valid UTF-8 becomes invalid bytes."""
    records = []
    for line in lines:
        row = json.loads(line)
        value = row["value"]
        if value is not None:
            value = value.encode("utf-8", "surrogatepass")
        records.append((row["partition"], row["offset"], row["timestamp"], value))
    return records
