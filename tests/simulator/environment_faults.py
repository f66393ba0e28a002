"""Faults and events of a simulated group at given times: crashes, clocks, garbage, operators, losses of the log."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from marshal_dagster.admin.settings_change import SettingsChanger
from marshal_dagster.coordination.claimer import Claimer, new_instance_id
from marshal_dagster.coordination.claimer import Member as Claimant
from marshal_dagster.coordination.log import Append
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import DeliveryMode, RuleSet, settings_text
from marshal_dagster.runs.names import run_of
from tests.simulator.broker import EPOCH_MS, AppendFault, SimulatedClock, SimulatedLog
from tests.simulator.checkers import KeyState, RangeState, ranges_of
from tests.simulator.data import Attempt
from tests.simulator.scenario import GROUP, TOPIC, WAITING_FOR_A_PERSON, Event, EventKind, Member
from tests.simulator.scheduler import Process
from tests.simulator.snapshots import render_as_former

if TYPE_CHECKING:
    from tests.simulator.world import Run, Simulation

_PAUSES_FIRST = (EventKind.POSITION, EventKind.SWITCH_OFF, EventKind.SETTLE)

_PAUSING = frozenset({EventKind.PAUSE, *_PAUSES_FIRST})
"""The events that pause the group."""

WRONG_CLOCK_MS = 5_000
"""The largest error of a member's clock."""

_Act = Callable[[Sequence[Append]], AppendFault | None]
"""Called with the records of an append; returns the fault of that append."""

_AtRecord = tuple[bytes, _Act]
"""An action just before the next append of a record that starts with these bytes."""


class Nature:
    """Carries out the events of one simulation."""

    def __init__(self, world: "Simulation") -> None:
        self._world = world
        self._pausing_until_ms: dict[Event, float] = {}
        """The time at which an event that pauses the group ended; infinite while it runs."""
        self._at_records: list[_AtRecord] = []
        self._stopped_range: tuple[int, int] | None = None
        """Partition and start of the range whose owner was stopped last while it ended it."""
        world.cluster.before_append = self._look_at
        self._acts: dict[EventKind, Callable[[random.Random], bool]] = {
            EventKind.CRASH: self._crash,
            EventKind.STOP: self._stop,
            EventKind.ORPHAN: self._orphan,
            EventKind.TAKEN_FOR_DEAD: self._revoke_some,
            EventKind.CLOCK_BACK: self._clock_back,
            EventKind.CLOCK_AHEAD: self._clock_ahead,
            EventKind.GARBAGE: self._litter,
            EventKind.DOUBLE: self._double,
            EventKind.LAST_MOMENT: self._claim_at_the_last_moment,
            EventKind.OTHER_INTERVAL: self._join_with_another_interval,
            EventKind.PAUSE: self._pause,
            EventKind.POSITION: self._set_positions,
            EventKind.LATE_RELEASE: self._let_a_release_come_late,
            EventKind.PARTITIONS: self._grow,
            EventKind.RETENTION: self._cut_behind_a_snapshot,
            EventKind.LATE_SNAPSHOT: self._write_a_snapshot_late,
            EventKind.MIDDLE: self._cut,
            EventKind.TRUNCATION: self._truncate,
            EventKind.SWITCH_OFF: self._switch_ranges_off,
            EventKind.REVOKED_DONE: self._revoke_what_is_done_next,
            EventKind.SETTLE: self._settle,
            EventKind.SENDERS_TIME: self._let_senders_date,
            EventKind.INTRUDER: self._let_a_go_consumer_in,
            EventKind.FORMER_SNAPSHOT: self._write_a_former_snapshot,
            EventKind.TAKE_OVER: self._free_from_a_dead_owner,
            EventKind.GO_POSITION: self._set_go_positions,
        }

    def inject_fault(self, event: Event) -> None:
        """Run `event` at its time, and count it if it had its effect.

        An event that waits for a record is counted when that record comes. Only the operator of the event sees errors
        of the library.
        """
        self._world.scheduler.sleep(event.at_ms)
        if event.kind in _PAUSES_FIRST:
            self._pausing_until_ms[event] = inf
        has_befallen = False
        with suppress(MarshalError):
            has_befallen = self._acts[event.kind](random.Random(event.chance))
        if has_befallen:
            self._count(event.kind)
        if event.kind in _PAUSES_FIRST:
            self._pausing_until_ms[event] = self._world.scheduler.now_ms

    def has_paused_since(self, at_ms: float) -> bool:
        """Return whether an event that pauses the group was still running after `at_ms`."""
        return any(until_ms > at_ms for until_ms in self._pausing_until_ms.values())

    def end(self) -> None:
        """End all faults: the broker's clock is right, the group is not paused, and it has settings."""
        world = self._world
        world.cluster.broker.is_sender_timed = False
        world.cluster.faults.clear()
        self._at_records.clear()
        world.cluster.looking_again = lambda _: None
        world.snapshot_faults.clear()
        if world.cluster.jump_ms < 0:
            world.unsure_until_ms = world.scheduler.now_ms - world.cluster.jump_ms + 3 * world.hi_ms
        world.cluster.jump_ms = 0

        is_waiting = world.scenario.beginning in WAITING_FOR_A_PERSON and not self._has_settings()
        if not is_waiting and not any(event.kind in _PAUSING for event in world.scenario.events):
            return

        def resume() -> None:
            with suppress(MarshalError):
                self._operator()[1].resume()
            if is_waiting:
                self._settle_as_a_person(random.Random(0))

        Process(world.scheduler, "operator").spawn(resume)

    def _has_settings(self) -> bool:
        return self._world.judge.has_settings(self._world.home, GROUP)

    def _settle(self, chance: random.Random) -> bool:
        """Write the group's settings: with the library's own operator commands, or record by record."""
        world = self._world
        if chance.random() < 0.5:
            return self._settle_as_a_person(chance)
        settings, wait_ms = world.settings(world.scenario.members[0]), world.scenario.calm_ms - world.scheduler.now_ms
        self._operator()[1].set_settings(settings, wait_ms=max(0, wait_ms), is_dead=world.is_dead)
        if not world.is_truncated and not self._has_settings():
            world.fail("settings that were written are in force", str(settings))
        return True

    def _settle_as_a_person(self, chance: random.Random) -> bool:
        """Write the group's settings, as an operator who knows that no Go consumer will use this topic again."""
        world, numbers = self._world, self._world.partitions
        by = f"person.{chance.getrandbits(16)}/operator/{GROUP}//0"
        for number in numbers:
            world.cluster.put(number, f"ReleaseGroup/1/1700000000/{by}/2000000000".encode())
        while world.scheduler.now_ms < world.scenario.taken_up_ms and any(map(world.is_live, world.keys_of_group())):
            world.scheduler.sleep(world.hi_ms / 20)
        settings = settings_text(world.settings(world.scenario.members[0]))
        for number in numbers:
            world.cluster.put(number, f"GroupSettings/1/1700000000/{by}/{settings}".encode())
        for number in numbers:
            world.cluster.put(number, f"ReleaseGroup/1/1700000000/{by}/0".encode())
        return self._has_settings()

    def _let_senders_date(self, chance: random.Random) -> bool:
        """Use senders' timestamps for a while, from now or from a release on; clocks may be wrong."""
        world, duration_ms = self._world, self._world.hi_ms * chance.uniform(0.1, 1)
        broker = world.cluster.broker

        def begin(_: Sequence[Append] = ()) -> None:
            broker.is_sender_timed = True
            world.unsure_until_ms = world.scheduler.now_ms + duration_ms + WRONG_CLOCK_MS + 4 * world.hi_ms

        if chance.random() < 0.5:
            begin()
        else:
            self._at_records.append((b"Releasing", begin))
            self._wait_for(lambda: broker.is_sender_timed)
            if not broker.is_sender_timed:
                self._at_records.remove((b"Releasing", begin))
                return False
        world.scheduler.sleep(duration_ms)
        broker.is_sender_timed = False
        return True

    def _let_a_go_consumer_in(self, chance: random.Random) -> bool:
        """Let a Go consumer claim, work, and move the offset of a partition by heartbeats alone."""
        world = self._world
        sender, free = "intruder-1/intruder", list[tuple[int, int]]()

        def look() -> bool:
            bounds = world.data.offsets(TOPIC, world.data.describe(TOPIC).partitions)
            free[:] = [
                (number, int(str(state[4])))
                for number, state in (self._states() if self._has_settings() else [])
                if state[0] is None and state[5] is None and not ranges_of(state) and state[4] is not None
                if int(str(state[4])) < bounds[number].end
            ]
            return bool(free)

        self._wait_for(look)
        if not free:
            return False
        partition, offset = chance.choice(free)
        self._say("ClaimingPartition", sender, partition)
        world.scheduler.sleep(chance.random() * 20)
        self._say("Heartbeat", sender, partition, str(offset))
        world.scheduler.sleep(chance.random() * world.hi_ms / 2)
        if world.judge.state(world.home, (GROUP, TOPIC, partition))[0] != "intruder-1":
            return False
        end = chance.randint(offset + 1, world.data.offsets(TOPIC, [partition])[partition].end)
        world.output.elsewhere |= {(partition, each) for each in range(offset, end)}
        self._say("Heartbeat", sender, partition, str(end))
        world.has_intruder = True
        world.scheduler.sleep(chance.random() * 20)
        if chance.random() < 0.7:
            self._say("ReleasingPartition", sender, partition, str(end))
        return True

    def _write_a_former_snapshot(self, chance: random.Random) -> bool:
        """Write snapshots as members of the former version did; delete the log below those that are valid."""
        world = self._world
        if world.is_truncated or world.is_cut:
            return False
        topic_id = world.cluster.broker.identity.topic_id
        for number in range(world.scenario.coordination_partitions):
            records = [record[1:4] for record in world.judge.records if record[0] == number]
            if not records:
                continue
            for record in render_as_former(records, number, world.scenario.coordination_partitions, topic_id, chance):
                world.snapshot_topic.append(number, [record])
                world.snapshot_judge.read(number, *record)
            if world.judge.is_usable_to_former(number) and chance.random() < 0.6:
                start = world.cluster.broker.bounds(number).start
                world.cluster.broker.retain_from(number, max(start, records[-1][0] + 1))
        return True

    def _free_from_a_dead_owner(self, chance: random.Random) -> bool:
        """Free a partition by a heartbeat at its offset, as an operator who knows that its owner is dead."""
        world, held = self._world, list[int]()
        living = {run.batch.batch_id for run in world.runs if run.batch is not None and not run.process.is_dead}

        def look() -> bool:
            held[:] = [n for n, state in self._states() if state[0] is not None and state[0] not in living]
            return bool(held)

        self._wait_for(look)
        if not held:
            return False
        partition = chance.choice(held)
        clock, reader = self._reader()
        member = Claimant(GROUP, "operator", new_instance_id("operator"))
        claimer = Claimer(reader, member, TOPIC, world.settings(world.scenario.members[0]), clock=clock)
        since = world.cluster.broker.bounds(world.home).end
        for number in claimer.take_over_and_release({partition: None}):
            states = world.judge.history[world.home][GROUP, TOPIC, number]
            if not world.is_truncated and not any(at >= since and state[0] is None for at, state in states):
                world.fail("what an operator has freed is free", f"partition {number}")
        return True

    def _set_go_positions(self, chance: random.Random) -> bool:
        """Set positions of a Go group back, as an operator who believes that all of its consumers are stopped."""
        world, partitions = self._world, self._world.data.describe(TOPIC).partitions[:2]
        offsets = {n: self._earlier(n, at, chance) for n in partitions if (at := world.offset(n))}
        since = world.cluster.broker.bounds(world.home).end
        wait_ms = max(0, world.scenario.calm_ms - world.scheduler.now_ms)
        self._operator()[1].set_go_positions(TOPIC, offsets, wait_ms=wait_ms)
        for partition, offset in offsets.items():
            states = world.judge.history[world.home][GROUP, TOPIC, partition]
            is_set = any(at >= since and state[0] is None and state[4] == offset for at, state in states)
            if not is_set and not world.is_truncated:
                world.fail("a position that was set counts", f"partition {partition} at {offset} in a Go group")
        return bool(offsets)

    def _litter(self, chance: random.Random) -> bool:
        """Write records without meaning, once the group has settings; before that some of them would have an effect."""
        if not self._has_settings():
            return False
        for _ in range(chance.randint(1, 4)):
            value = chance.choice(
                [
                    b"",
                    b"\xff\xfe",
                    b"Heartbeat/1/0/a/b/etl/orders/0/-1",
                    b"Heartbeat/1/0/stranger.0/b/etl/orders/0/99",
                    b"ReleasingPartition/1/0/stranger.0/b/etl/orders/0/0",
                    b"RevokingClaim/1/0/stranger.0/b/etl/orders/0/999999",
                    b"ClaimingMessages/1/0/stranger.0/b/etl/orders/0/99",
                    b"ClaimingRange/1/0/stranger.0/b/etl/orders/0/5/5",
                    b"RangeDone/1/0/stranger.0/b/etl/orders/0/3",
                    b"RevokingRange/1/0/stranger.0/b/etl/orders/0/999999",
                    b"Tomorrow/2/0/a/b/etl/orders/0",
                    chance.randbytes(chance.randint(1, 40)),
                ]
            )
            self._world.cluster.put(chance.randrange(self._world.scenario.coordination_partitions), value)
        return True

    def _double(self, chance: random.Random) -> bool:
        """Write a record with an owner's instance id, as a process that knows less than the owner."""
        world = self._world
        self._wait_for(self._planned if chance.random() < 0.5 else self._held)
        if not self._has_settings():
            return False
        records = len(world.judge.records)
        for partition, state in self._states():
            for one in ranges_of(state):
                self._double_range(partition, state, one, chance)
            instance, client, epoch, _, offset, plan_end, *_ = state
            if instance is None or offset is None:
                continue
            if plan_end is not None and chance.random() < 0.3:
                self._carry_out_as_double(partition, state)
                continue
            tail = chance.choice((f"{max(0, int(str(offset)) - 1)}", "0", str(offset)))
            sender = f"{instance}/{client}" if chance.random() < 0.7 else f"nobody.0/{client}"
            kind = chance.choice(("Heartbeat", "Heartbeat", "ReleasingPartition", "RevokingClaim"))
            if kind == "RevokingClaim":
                tail = str(int(str(epoch)) - 1)
            if plan_end is not None and chance.random() < 0.4:
                kind, tail = "ClaimingMessages", str(int(str(plan_end)) + chance.choice((-1, 1)))
            if kind == "ReleasingPartition" and sender.startswith(str(instance)):
                continue
            self._say(kind, sender, partition, tail)
        return len(world.judge.records) > records

    def _carry_out_as_double(self, partition: int, state: KeyState) -> None:
        """Let the second process carry out and commit the owner's plan: its record may move the offset."""
        if self._world.scenario.mode is DeliveryMode.EFFECTIVELY_ONCE:
            return
        epoch, start, end = (int(str(state[n])) for n in (2, 4, 5))
        self._process(partition, state, epoch, start, end)
        self._say("Heartbeat", f"{state[0]}/{state[1]}", partition, str(end))

    def _process(self, partition: int, state: KeyState, epoch: int, start: int, end: int) -> None:
        world, generation, data_topic_id = self._world, int(str(state[7])), str(state[8])
        one = ClaimedRange("", GROUP, TOPIC, data_topic_id, partition, generation, epoch, start, end, start)
        world.output.attempts.append(
            Attempt(one, (GROUP, TOPIC, partition), done=[offset for _, offset in world.data.read([one])])
        )

    def _double_range(self, partition: int, state: KeyState, one: RangeState, chance: random.Random) -> None:
        """Write a record as a process with the instance id of a range's owner, or with that range's epoch."""
        start, end, phase, instance, client, epoch, *_ = one
        if instance is None or epoch is None or chance.random() < 0.5:
            return
        sender, is_planned = f"{instance}/{client}", phase == "planned"
        if is_planned and self._world.scenario.mode is not DeliveryMode.EFFECTIVELY_ONCE and chance.random() < 0.3:
            self._process(partition, state, epoch, start, end)
            self._say("RangeDone", sender, partition, str(epoch))
            return
        if not is_planned and chance.random() < 0.4:
            self._say("RangeDone", sender, partition, f"{epoch}")
            return
        if is_planned and end - start > 1 and chance.random() < 0.6:
            self._say("PlanningRange", sender, partition, f"{epoch}/{chance.randrange(start + 1, end)}")
            return
        records = [(kind, sender, f"{epoch - 1}") for kind in ("RangeHeartbeat", "RangeDone", "ReleasingRange")]
        records += [
            (kind, f"nobody.0/{client}", f"{epoch}") for kind in ("RangeHeartbeat", "RangeDone", "ReleasingRange")
        ]
        records += [("RangeHeartbeat", sender, f"{epoch}"), ("RevokingRange", sender, f"{epoch - 1}")]
        records += [
            ("PlanningRange", f"nobody.0/{client}", f"{epoch}/{end}"),
            ("ClaimingRange", sender, f"{start}/{end}"),
        ]
        kind, sender, tail = chance.choice(records)
        self._say(kind, sender, partition, tail)

    def _say(self, kind: str, sender: str, partition: int, tail: str = "") -> None:
        value = f"{kind}/1/1700000000/{sender}/{GROUP}/{TOPIC}/{partition}" + (f"/{tail}" if tail else "")
        self._world.cluster.put(self._world.home, value.encode())

    def _claim_at_the_last_moment(self, chance: random.Random) -> bool:
        """Claim and die at once, when an owner has been silent for exactly two intervals, or 1 ms more or less."""
        world, is_done = self._world, False
        for _ in range(8):
            partition = chance.choice(self._held() or world.data.describe(TOPIC).partitions)
            state = world.judge.state(world.home, (GROUP, TOPIC, partition))
            held = [one for one in ranges_of(state) if one[3] is not None]
            one = chance.choice(held) if held else None
            beat_ms = one[6] if one is not None else state[3]
            if beat_ms is None:
                world.scheduler.sleep(world.hi_ms / 2)
                continue
            stale_ms = int(str(beat_ms)) - EPOCH_MS - world.cluster.jump_ms + 2 * world.hi_ms
            at_ms = stale_ms + chance.choice((-1, 0, 0, 1))
            world.scheduler.sleep(max(1.0, at_ms - world.scheduler.now_ms + 0.5))
            self._claim_and_die(partition, None if one is None else (one[0], one[1]))
            is_done = True
        return is_done

    def _join_with_another_interval(self, chance: random.Random) -> bool:
        """Let a member with another heartbeat interval start, unless it would be the first: it may claim nothing."""
        if not self._has_settings():
            return False
        member = Member(client="misconfigured", interval_factor=3)
        number = len(self._world.scenario.members)
        run = self._world.start(f"run{number}x{chance.getrandbits(16)}", number, member)
        self._world.finish(run)
        return True

    def _grow(self, chance: random.Random) -> bool:
        partitions = len(self._world.data.describe(TOPIC).partitions)
        self._world.data.grow(partitions + 1)
        self._world.data.append(partitions, chance.randint(0, 5))
        return True

    def _truncate(self, chance: random.Random) -> bool:
        """Delete the newest records: now, when a reader retries a failed read, or before an append."""
        if chance.random() < 0.4:
            cluster = self._world.cluster
            cluster.failing_part = max(cluster.failing_part, 0.3)
            cluster.looking_again = lambda log: self._truncate_before_a_look(chance, log)
            return False
        if self._world.scenario.has_snapshots and chance.random() < 0.7:
            self._at_records.append((b"", self._truncate_before_a_snapshot))
            return False
        end = self._world.cluster.broker.bounds(self._world.home).end
        if not end:
            return False
        self._truncate_to(max(0, end - chance.randint(1, 6)))
        return True

    def _truncate_before_a_look(self, chance: random.Random, log: SimulatedLog) -> None:
        """Delete records that the reader of `log` has read, before one of the checks with which it continues."""
        world = self._world
        read = log.read.get(world.home, 0)
        if not read or world.scheduler.now_ms > world.scenario.faulty_ms or chance.random() < 0.5:
            return
        world.cluster.looking_again = lambda _: None
        self._truncate_to(max(0, read - chance.randint(1, 6)))
        self._count(EventKind.TRUNCATION)

    def _truncate_before_a_snapshot(self, records: Sequence[Append]) -> None:
        """Delete what the sender's snapshot contains, and before it as many records as are to be appended."""
        world, task = self._world, self._world.scheduler.current
        run = None if task is None else world.by_process.get(task.process)
        began_at = 0 if run is None or run.batch is None else run.batch._claimer.rationalizer._began_at[world.home]
        if began_at < len(records) or world.scheduler.now_ms > world.scenario.faulty_ms:
            self._at_records.append((b"", self._truncate_before_a_snapshot))
            return
        self._truncate_to(began_at - len(records))
        self._count(EventKind.TRUNCATION)

    def _truncate_to(self, cut: int) -> None:
        self._world.is_truncated = self._world.judge.is_truncated = True
        kept = list(self._world.judge.records)
        self._world.cluster.broker.truncate(self._world.home, cut)
        self._world.judge.restart()
        self._world.judge.records.clear()
        for partition, offset, timestamp_ms, value, _ in kept:
            if partition != self._world.home or offset < cut:
                self._world.judge.read(partition, offset, timestamp_ms, value.encode("utf-8", "surrogateescape"))

    def _pause(self, chance: random.Random) -> bool:
        world = self._world
        clock, operator = self._operator()
        settles = chance.random() < 0.3 and (self._has_settings() or world.scenario.rule_set is RuleSet.NATIVE)
        if settles:
            for partition in self._world.data.describe(TOPIC).partitions:
                self._claim_and_die(partition)
        until_s = clock.wall_ms() // 1_000 + chance.randint(1, 4) * world.hi_ms // 1_000
        operator.pause(until_s)
        self._world.check_paused(until_s)
        self._world.scheduler.sleep(self._world.hi_ms * (2.1 if settles else chance.uniform(0.1, 3)))
        if settles:
            self._settle_again()
        with suppress(MarshalError):  # another operator may have resumed it
            operator.resume()
        return True

    def _claim_and_die(self, partition: int, offsets: tuple[int, int] | None = None) -> None:
        """Claim a partition, or a range of it, as a process that does nothing more; not before there are settings."""
        world = self._world
        if not self._has_settings() and world.scenario.rule_set is RuleSet.NATIVE:
            return
        hasty = f"hasty.{world.judge.log_time_ms(world.home)}"
        if offsets is None:
            claim = f"ClaimingPartition/1/1700000000/{hasty}/c/{GROUP}/{TOPIC}/{partition}"
        else:
            claim = f"ClaimingRange/1/1700000000/{hasty}/c/{GROUP}/{TOPIC}/{partition}/{offsets[0]}/{offsets[1]}"
        world.cluster.put(world.home, claim.encode())

    def _settle_again(self) -> None:
        """Write the group's settings again, as the instance that paused it: that only removes stale owners."""
        world = self._world
        for partition, log in world.judge.reader.logs.items():
            by = log["groups"].get(GROUP, {}).get("paused_by")
            if by is not None:
                settings = settings_text(world.settings(world.scenario.members[0]))
                world.cluster.put(partition, f"GroupSettings/1/1700000000/{by}/operator/{GROUP}//0/{settings}".encode())

    def _set_positions(self, chance: random.Random) -> bool:
        world = self._world
        _, operator = self._operator()
        unconfirmed: _AtRecord = (b"RangeDone", self._stop_without_answer)
        if world.scenario.ranges is not None and chance.random() < 0.8:
            self._at_records.append(unconfirmed)
            until_ms = world.scheduler.now_ms + chance.uniform(0, 1.5) * world.hi_ms
            self._wait_for(lambda: unconfirmed not in self._at_records or world.scheduler.now_ms > until_ms)
        described = world.data.describe(TOPIC)
        known = described.partitions[:2] if self._has_settings() else ()
        offsets = {n: self._earlier(n, at, chance) for n in known if (at := world.offset(n))}
        if self._stopped_range is not None:
            # Then other members may end the same range, in the new generation, before its owner reads the log again.
            partition, start = self._stopped_range
            offsets[partition] = min(start, world.offset(partition))
        world.hesitates = chance.random() < 0.5
        since = world.cluster.broker.bounds(world.home).end
        if chance.random() < 0.4:
            self._resume_soon(chance)
        try:
            operator.set_positions(TOPIC, offsets, described.topic_id, wait_ms=4 * world.hi_ms, is_dead=world.is_dead)
        finally:
            if unconfirmed in self._at_records:
                self._at_records.remove(unconfirmed)
        if not world.is_truncated:
            world.check_positions(offsets, since)
        return bool(offsets)

    def _switch_ranges_off(self, _: random.Random) -> bool:
        world = self._world
        had_settings = world.judge.has_settings(world.home, GROUP)
        self._operator()[1].switch_ranges_off(wait_ms=6 * world.hi_ms)
        if had_settings and not world.is_truncated:  # otherwise a first member may have enabled ranges since
            world.check_ranges_off()
        return True

    def _earlier(self, partition: int, at: int, chance: random.Random) -> int:
        """Choose an offset to go back to; often one at which a batch has started."""
        world = self._world
        begun = {state[4] for _, state in world.judge.history[world.home][GROUP, TOPIC, partition]}
        known = sorted(offset for offset in begun if isinstance(offset, int) and offset <= at)
        return chance.choice(known) if known and chance.random() < 0.5 else chance.randint(0, at)

    def _resume_soon(self, chance: random.Random) -> None:
        """Let another operator resume the group soon."""

        def resume() -> None:
            self._world.scheduler.sleep(chance.random() * 60)
            with suppress(MarshalError):
                self._operator()[1].resume()

        Process(self._world.scheduler, "another operator").spawn(resume)

    def _operator(self) -> tuple[SimulatedClock, SettingsChanger]:
        """Open an operator in the current process."""
        clock, reader = self._reader()
        return clock, SettingsChanger(reader, GROUP, "operator", clock=clock)

    def _reader(self) -> tuple[SimulatedClock, Rationalizer]:
        """Open a reader in the current process."""
        world = self._world
        clock = SimulatedClock(world.scheduler)
        task = world.scheduler.current
        process = Process(world.scheduler, "operator") if task is None else task.process
        snapshots = world.snapshots(process, lambda: world.scheduler.sleep(1))
        return clock, Rationalizer(world.cluster.open(process), clock=clock, snapshots=snapshots)

    def _crash(self, chance: random.Random) -> bool:
        living = self._one_living(chance)
        for run in living:
            run.process.kill()
        return bool(living)

    def _stop(self, chance: random.Random) -> bool:
        living = self._one_living(chance)
        for run in living:
            run.process.stop(self._world.hi_ms * chance.uniform(2, 4))
        return bool(living)

    def _orphan(self, chance: random.Random) -> bool:
        living = self._one_living(chance)
        for run in living:
            self._world.over.add(run.run_id)
        return bool(living)

    def _held(self) -> list[int]:
        """Return the partitions with an owner, of the whole or of a range."""
        return [n for n, state in self._states() if state[0] is not None or any(one[3] for one in ranges_of(state))]

    def _planned(self) -> list[int]:
        """Return the partitions with an owner and a plan."""
        return [
            n
            for n, state in self._states()
            if (state[0] is not None and state[5] is not None)
            or any(one[2] == "planned" and one[3] for one in ranges_of(state))
        ]

    def _states(self) -> list[tuple[int, KeyState]]:
        """Return the state of each partition's key."""
        world = self._world
        partitions = world.data.describe(TOPIC).partitions
        return [(n, world.judge.state(world.home, (GROUP, TOPIC, n))) for n in partitions]

    def _wait_for(self, look: Callable[[], object]) -> None:
        """Wait until there is something to harm, or until faults are over."""
        world = self._world
        while world.scheduler.now_ms < world.scenario.faulty_ms and not look():
            world.scheduler.sleep(world.hi_ms / 10)

    def _one_living(self, chance: random.Random) -> "list[Run]":
        """Return one run whose process lives, if there is any."""
        living = [run for run in self._world.runs if run.process.tasks and not run.process.is_dead]
        return [chance.choice(living)] if living else []

    def _clock_back(self, chance: random.Random) -> bool:
        self._world.cluster.jump_ms -= int(self._world.hi_ms * chance.uniform(0.1, 3))
        return True

    def _clock_ahead(self, chance: random.Random) -> bool:
        jump_ms = int(self._world.hi_ms * chance.uniform(0.1, 3))
        self._world.cluster.jump_ms += jump_ms
        self._world.unsure_until_ms = self._world.scheduler.now_ms + jump_ms + 3 * self._world.hi_ms
        return True

    def _cut_behind_a_snapshot(self, chance: random.Random) -> bool:
        """Let retention delete some or all of the records that the newest whole snapshot contains."""
        world, is_cut = self._world, False
        task = world.scheduler.current
        assert task is not None
        kept = world.snapshots(task.process, lambda: None)
        assert kept is not None
        identity = world.cluster.broker.identity
        self._wait_for(lambda: any(head is not None for head in kept.heads(identity).values()))
        for partition, head in kept.heads(identity).items():
            bounds = world.cluster.broker.bounds(partition)
            # A snapshot may be newer than the end of a log that was truncated, which retention never passes.
            newest = 0 if head is None else min(head.offset, bounds.end)
            if newest > bounds.start:
                start = chance.choice((newest, chance.randint(bounds.start, newest)))
                world.cluster.broker.retain_from(partition, start)
                is_cut = True
        return is_cut

    def _write_a_snapshot_late(self, chance: random.Random) -> bool:
        """Read the log, sleep, and write a snapshot of that state. Others may have written newer ones meanwhile."""
        world = self._world
        task = world.scheduler.current
        assert task is not None
        kept = world.snapshots(task.process, lambda: world.scheduler.sleep(chance.random() * 5))
        assert kept is not None
        reader = Rationalizer(world.cluster.open(task.process), clock=SimulatedClock(world.scheduler), snapshots=kept)
        reader.catch_up()
        world.scheduler.sleep(world.hi_ms * chance.uniform(0, 4))
        certain = [partition for partition in reader.world.partitions.values() if partition.certain]
        for partition in certain:
            kept.write(partition, reader.identity)
        return bool(certain)

    def _cut(self, chance: random.Random) -> bool:
        """Let retention delete all records: now, or just before a claim or plan is appended."""
        if chance.random() < 0.5:
            self._cut_now()
        else:
            self._at_records.append((b"Claiming", self._overtake))
        return False

    def _overtake(self, _: Sequence[Append]) -> None:
        self._world.cluster.put(self._world.home, b"garbage")
        self._cut_now()

    def _cut_now(self) -> None:
        world = self._world
        bounds = world.cluster.broker.bounds(world.home)
        if bounds.start == bounds.end:
            return
        world.is_cut = True
        self._count(EventKind.MIDDLE)
        world.cluster.broker.retain_from(world.home, bounds.end)

    def _stop_without_answer(self, records: Sequence[Append]) -> AppendFault | None:
        """Stop a process that ends a range for as long as possible, without an acknowledgement."""
        world, task = self._world, self._world.scheduler.current
        if task is None or world.scheduler.now_ms > world.scenario.faulty_ms:
            return None
        partition, epoch = map(int, records[0].value.decode().split("/")[7:9])
        ranges = ranges_of(world.judge.state(world.home, (GROUP, TOPIC, partition)))
        self._stopped_range = next(((partition, one[0]) for one in ranges if one[5] == epoch), None)
        task.process.stop(inf)
        return AppendFault.LOST

    def _let_a_release_come_late(self, _: random.Random) -> bool:
        """Kill the run that releases a claim next, and let its record arrive once the same run owns that again."""
        self._at_records.append((b"ReleasingPartition", self._die_with_records_under_way))
        return False

    def _die_with_records_under_way(self, records: Sequence[Append]) -> AppendFault | None:
        world, before = self._world, [self._holder(record) for record in records]
        task = world.scheduler.current
        if task is None or task.process.is_dead or task.process not in world.by_process:
            self._at_records.append((b"ReleasingPartition", self._die_with_records_under_way))
            return None

        def arrive() -> None:
            for record, held in zip(records, before, strict=True):
                while not self._is_held_again(record, held) and world.scheduler.now_ms < world.cluster.faults_end_ms:
                    world.scheduler.sleep(world.hi_ms / 20)
                is_over = self._holder(record) != held
                world.cluster.put(record.partition, record.value)
                if is_over and not world.doubled and not world.is_truncated:
                    world.check_refused("a tenure's record counts for no other", record.value)

        self._count(EventKind.LATE_RELEASE)
        Process(world.scheduler, "network").spawn(arrive)
        return AppendFault.CRASH_BEFORE

    def _is_held_again(self, record: Append, held: tuple[str, int]) -> bool:
        """Return whether the run that owned the partition of a record owns it by another claim."""
        instance, epoch = self._holder(record)
        return run_of(instance) == run_of(held[0]) and epoch != held[1]

    def _holder(self, record: Append) -> tuple[str, int]:
        """Return the instance id and the epoch of the owner of a record's partition."""
        partition = int(record.value.decode().split("/")[7])
        instance, _, epoch, *_ = self._world.judge.state(self._world.home, (GROUP, TOPIC, partition))
        return str(instance), int(str(epoch or 0))

    def _revoke_some(self, chance: random.Random) -> bool:
        """Revoke some claims, as a process that takes their owners for dead."""
        self._wait_for(self._held)
        records = len(self._world.judge.records)
        for partition, state in self._states():
            if chance.random() < 0.5:
                continue
            if state[2] is not None:
                self._say("RevokingClaim", "operator.0/c", partition, str(state[2]))
            for one in ranges_of(state):
                if one[5] is not None:
                    self._say("RevokingRange", "operator.0/c", partition, str(one[5]))
        return len(self._world.judge.records) > records

    def _revoke_what_is_done_next(self, _: random.Random) -> bool:
        """Revoke a range just before its owner reports it as done, as a process that takes the owner for dead."""
        self._at_records.append((b"RangeDone", self._revoke))
        return False

    def _revoke(self, records: Sequence[Append]) -> None:
        partition, epoch = records[0].value.decode().split("/")[7:9]
        self._count(EventKind.REVOKED_DONE)
        self._say("RevokingRange", "operator.0/c", int(partition), epoch)

    def _look_at(self, records: Sequence[Append]) -> AppendFault | None:
        """Run the actions that wait for one of these records, which are about to be appended; each action runs once."""
        if not self._at_records:
            return None
        values = [record.value for record in records if record.partition == self._world.home]
        due = {act: kind for kind, act in self._at_records if any(value.startswith(kind) for value in values)}
        for act, kind in due.items():
            self._at_records.remove((kind, act))
        faults = [act(records) for act in due]
        return next((fault for fault in faults if fault is not None), None)

    def _count(self, kind: EventKind) -> None:
        self._world.befallen[kind] += 1
