"""The world state: one log, read by the library, by its fast path, through a snapshot, and by the reference reader."""

from typing import Any, Final

from marshal_dagster.protocol import snapshots
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import Range
from marshal_dagster.protocol.world import PartitionWorld, Verdict, VerdictKind, World
from tests.fuzz.logs import Log
from tests.fuzz.promises import GROWTH_BYTES, GROWTH_BYTES_PER_BYTE, PromiseError, held_bytes, hold, in_time
from tests.fuzz.supply import Supply

TOPIC_ID: Final = "A" * 22
MOST_RECORDS: Final = 2_000

State = dict[str, Any]


def check(data: bytes) -> int:
    """Read the log that the bytes write; return the number of records read."""
    return Readers(Log(Supply(data))).run()


class Readers:
    """The three readers of one log, compared after each record."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.by_one = self._new()
        self.by_many = self._new()
        self.empty_bytes = held_bytes(self.by_one)
        self.may_grow_bytes = 0
        self.waiting: list[tuple[int, int, bytes | None]] = []

    def _new(self) -> PartitionWorld:
        world = World(self.log.partitions, self.log.interval_ms, RuleSet(self.log.rules))
        return world.start(0, self.log.start)

    def run(self) -> int:
        """Read the whole log."""
        records = 0
        before = state_of(self.by_one)
        while self.log.supply and records < MOST_RECORDS:
            before = self._step(before)
            records += 1
            if len(self.waiting) >= self.log.piece:
                self._catch_up()
            if records == self.log.snapshot_at:
                self._catch_up()
                self._restart()
        self._catch_up()
        for world in (self.by_one, self.by_many):
            keys = sum(len(group.keys) for group in world.groups.values())
            hold(len(world._beats) <= keys, "of each key one heartbeat is remembered", len(world._beats), keys)
        held = held_bytes(self.by_one) - self.empty_bytes
        hold(held <= self.may_grow_bytes, "accepted records grow a reader no more than they may", held)
        return records

    def _step(self, before: State) -> State:
        """Read one record with the library and with the reference reader; return the state after it."""
        offset, timestamp_ms, value = self.log.next_record()
        remembered = len(self.by_one._beats)
        verdict = in_time("a record", lambda: self.by_one.apply(offset, timestamp_ms, value))
        plain = self.log.plain.read(0, offset, timestamp_ms, value)
        self.waiting.append((offset, timestamp_ms, value))
        after = state_of(self.by_one)
        if verdict.kind != plain:
            raise PromiseError(f"the verdict of {value!r} is {plain}, not {verdict}")
        log = self.log.plain.logs[0]
        if after != state_of_plain(log):
            raise PromiseError(f"the state after {value!r} is {state_of_plain(log)}, not {after}")
        hold(self.by_one.log_time_ms == log["log_time"], "log time never falls", self.by_one.log_time_ms)
        self._hold_growth(verdict, value, before, after, remembered)
        return after

    def _hold_growth(self, verdict: Verdict, value: bytes | None, before: State, after: State, remembered: int) -> None:
        if verdict.kind is VerdictKind.ACCEPTED:
            self.may_grow_bytes += GROWTH_BYTES + GROWTH_BYTES_PER_BYTE * len(value or b"")
            return
        hold(before == after, "what is not accepted leaves no trace", verdict, value)
        hold(len(self.by_one._beats) == remembered, "what is not accepted is not remembered", verdict, value)

    def _catch_up(self) -> None:
        """Read by the fast path what the other readers have read."""
        waiting, self.waiting = self.waiting, []
        in_time("records at once", lambda: self.by_many.apply_many(waiting), max(1, len(waiting)))
        hold_equal(self.by_many, self.by_one, "many at once lead to the state that one by one does")

    def _restart(self) -> None:
        """Continue from a snapshot."""
        if not self.by_one.certain:
            try:
                snapshots.render(self.by_many, TOPIC_ID, "s")
            except ValueError:
                return
            raise PromiseError("no member writes a snapshot of an observed state")
        records = snapshots.render(self.by_many, TOPIC_ID, "s", part_bytes=100)
        choice = snapshots.choose(
            records,
            topic_id=TOPIC_ID,
            number=0,
            partitions=self.log.partitions,
            start=0,
            end=self.by_many.next_offset,
            defaults=GroupSettings(self.log.interval_ms, RuleSet(self.log.rules)),
        )
        if choice.world is None:
            raise PromiseError(f"a snapshot can be read by who wrote it, not {choice.passed_over}")
        hold_equal(choice.world, self.by_one, "a snapshot brings the whole state back")
        self.by_many = choice.world


def hold_equal(one: PartitionWorld, other: PartitionWorld, promise: str) -> None:
    """Check that two readers of the library agree in every field."""
    for name in ("groups", "log_time_ms", "next_offset", "certain", "had_ranges", "invalid", "refused", "noted"):
        mine, others = getattr(one, name), getattr(other, name)
        hold(mine == others, f"{promise}: {name}", mine, others)


def state_of(world: PartitionWorld) -> State:
    """Return the library's state of each group, as plain values."""
    return {
        name: (
            group.paused_until_s,
            group.paused_by,
            group.settings if group.settings_accepted else None,
            {
                place: (
                    key.offset,
                    key.owner and (*key.owner, key.last_beat_ms),
                    key.plan_end,
                    key.plan_attempts,
                    key.generation,
                    key.data_topic_id,
                    key.provisional,
                    tuple(map(_range_of, key.ranges)),
                )
                for place, key in group.keys.items()
            },
        )
        for name, group in world.groups.items()
    }


def state_of_plain(log: State) -> State:
    """Return the reference reader's state of each group, in the same form."""
    return {
        name: (
            group["paused_until"],
            group["paused_by"],
            group["settings"] and settings_of(group["settings"]),
            {
                place: (
                    key["offset"],
                    key["owner"] and tuple(key["owner"].values()),
                    key["plan_end"],
                    key["plan_attempts"],
                    key["generation"],
                    key["data_topic_id"],
                    log["observed"],
                    tuple(map(_plain_range_of, key["ranges"])),
                )
                for place, key in group["keys"].items()
            },
        )
        for name, group in log["groups"].items()
    }


def _range_of(one: Range) -> State:
    owner = one.owner and (*one.owner, one.last_beat_ms)
    return {"start": one.start, "end": one.end, "phase": one.phase.value, "attempts": one.attempts, "owner": owner}


def _plain_range_of(one: State) -> State:
    return {**one, "owner": one["owner"] and tuple(one["owner"].values())}


def settings_of(plain: State) -> GroupSettings:
    """Return settings in the form of the library."""
    return GroupSettings(
        plain["heartbeat_interval_ms"],
        RuleSet(plain["rules"]),
        DeliveryMode(plain["delivery"]),
        tuple(plain["features"]),
    )
