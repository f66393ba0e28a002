"""The mutation gate: deliberately broken variants of rules and steps, each of which the simulator must catch.

`python -m tests.simulator.mutants` breaks a copy of the library in one way after another and runs seeds until one finds
a violation. It prints which promise caught each mutant, and after how many seeds. A mutant that survives is a bug in
the checkers.
"""

import sys
from typing import Final

from tests.mutation_gate import Mutant, gate
from tests.simulator.runner import CODE

TRANSITIONS: Final = "protocol/rules.py"
CLAIMER: Final = "coordination/claimer.py"
BATCH: Final = "batches/batch.py"
WHOLE: Final = "batches/partition_source.py"
BASE_CLAIMER: Final = "coordination/base_claimer.py"
CLAIM_SET: Final = "coordination/claim_set.py"
CLAIMS: Final = "coordination/claims.py"
RATIONALIZER: Final = "coordination/rationalizer.py"
GROUP_READER: Final = "coordination/group_reader.py"
RANGE_CLAIMER: Final = "coordination/range_claimer.py"
KEY_RANGES: Final = "protocol/range_set.py"
SNAPSHOTS: Final = "protocol/snapshots.py"
AGREEMENT: Final = "coordination/group_settings.py"
STATE: Final = "protocol/state.py"

MUTANTS: Final = (
    Mutant(
        "a heartbeat takes the claim",
        TRANSITIONS,
        "        Heartbeat: Rule(beat, ((is_owner, Refusal.NOT_OWNER),)),\n        ReleasingPartition: Rule(release,",
        "        Heartbeat: Rule(go_beat),\n        ReleasingPartition: Rule(release,",
    ),
    Mutant(
        "ownership by client id",
        TRANSITIONS,
        "owner is not None and owner.instance == event.message.instance",
        "owner is not None and owner.client == event.message.client",
    ),
    Mutant(
        "staleness by the sender's clock",
        TRANSITIONS,
        "event.key.owner is None or not event.group.is_live(event.key, event.log_time_ms)",
        "event.key.owner is None or not event.group.is_live(event.key, event.message.time_s * 1_000)",
    ),
    Mutant(
        "live means less than two intervals, not at most",
        "protocol/state.py",
        "at_ms - key.last_beat_ms <= stale",
        "at_ms - key.last_beat_ms < stale",
    ),
    Mutant(
        "a heartbeat rewinds",
        TRANSITIONS,
        "        return (RecordNote.REWIND,)\n",
        "        key.move(offset)\n        return (RecordNote.REWIND,)\n",
    ),
    Mutant(
        "a rewinding heartbeat does not refresh the claim",
        TRANSITIONS,
        "    key.last_beat_ms = event.log_time_ms\n"
        "    if key.offset is not None and offset < key.offset:\n"
        "        return",
        "    if key.offset is not None and offset < key.offset:\n        return",
    ),
    Mutant(
        "a release by a non-owner",
        TRANSITIONS,
        "        ReleasingPartition: Rule(release, ((is_owner, Refusal.NOT_OWNER),)),",
        "        ReleasingPartition: Rule(release),",
    ),
    Mutant(
        "a release moves the offset",
        TRANSITIONS,
        "    return () if event.message.offset == key.offset else (RecordNote.RELEASED_ELSEWHERE,)",
        "    key.move(event.message.offset)\n    return ()",
    ),
    Mutant(
        "a plan is lost at takeover",
        TRANSITIONS,
        "    if key.plan_end is not None:\n        key.plan_attempts += 1",
        "    key.end_plan()",
    ),
    Mutant("an open plan is replaced", TRANSITIONS, "event.key.plan_end in (None, event.message.plan_end)", "True"),
    Mutant(
        "a revocation carries an offset",
        TRANSITIONS,
        "def revoke(event: Event[RevokingClaim]) -> Notes:\n",
        "def revoke(event: Event[RevokingClaim]) -> Notes:\n    event.key.move(0)\n",
    ),
    Mutant(
        "a revocation of any epoch",
        TRANSITIONS,
        "event.key.owner is not None and event.key.owner.epoch == event.message.epoch",
        "event.key.owner is not None",
    ),
    Mutant("a paused group claims", TRANSITIONS, "return is_running(event) or is_pauser(event)", "return True"),
    Mutant("a paused group plans", TRANSITIONS, "                (is_running, Refusal.PAUSED),\n", ""),
    Mutant(
        "a stale owner plans",
        TRANSITIONS,
        "                (is_live_owner, Refusal.NOT_LIVE),\n                (is_running, Refusal.PAUSED),",
        "                (is_running, Refusal.PAUSED),",
    ),
    Mutant(
        "log time follows the last timestamp",
        "protocol/world.py",
        "        if log_time_ms is None or timestamp_ms > log_time_ms:\n            self.log_time_ms",
        "        if True:\n            self.log_time_ms",
    ),
    Mutant(
        "settings leave stale owners",
        TRANSITIONS,
        "    for key in group.keys.values():\n        key.owner = None\n",
        "    for key in group.keys.values():\n",
    ),
    Mutant(
        "a reader that starts in the middle claims",
        "protocol/world.py",
        "        self.certain = start == 0\n",
        "        self.certain = True\n",
    ),
    Mutant(
        "members with different heartbeat intervals",
        "coordination/group_settings.py",
        "    if group.settings == settings:\n        return\n",
        "    if True:\n        return\n",
    ),
    Mutant(
        "an instance id is used for two tenures",
        CLAIMS,
        '    return f"{run_id}.{os.urandom(6).hex()}"',
        '    return f"{run_id}.0"',
    ),
    Mutant(
        "a truncated log is not noticed",
        "coordination/rationalizer.py",
        "            if at.end < read:\n",
        "            if False:\n",
    ),
    Mutant(
        "a log that was truncated after a failed reading is read further",
        "coordination/rationalizer.py",
        "        bounds = self.log.bounds(read.keys())\n        self._require_not_truncated(bounds)\n",
        "        bounds = self.log.bounds(read.keys())\n"
        "        read = {n: world for n, world in read.items() if world.next_offset <= bounds[n].end}\n",
    ),
    Mutant(
        "an acknowledgement where something was read before is nothing new",
        "coordination/rationalizer.py",
        "                if first < read:\n",
        "                if False:\n",
    ),
    Mutant(
        "claims are kept in a log with an incomplete state",
        CLAIM_SET,
        "        if not self._reader.is_certain:\n            return _OBSERVED\n",
        "",
        (
            (
                CLAIM_SET,
                "is_certain:\n            self.drop_all_if_log_changed()\n            raise",
                "is_certain and False:\n            raise",
            ),
            (
                CLAIM_SET,
                "        self.drop_all_if_log_changed()\n        instance = ",
                "        if not self._reader.is_certain:\n            return\n        instance = ",
            ),
            (
                CLAIM_SET,
                "        self.drop_all_if_log_changed()\n        home, instance",
                "        if not self._reader.is_certain:\n            return\n        home, instance",
            ),
        ),
    ),
    Mutant(
        "delivering without the lease",
        "protocol/leases.py",
        "        return self.ends_ms - now_ms\n",
        "        return 1e9\n",
    ),
    Mutant(
        "a lease counted from the acknowledgement",
        "coordination/appender.py",
        "        return AppendResult(sent_ms, messages, offsets, found)",
        "        return AppendResult(self._clock.lease_ms() + 500, messages, offsets, found)",
    ),
    Mutant(
        "a lease counted from a refused record",
        BASE_CLAIMER,
        "            if outcome.accepted:\n"
        "                claim.lease = claim.lease.renewed(renewed)\n"
        "            else:\n",
        "            claim.lease = claim.lease.renewed(renewed)\n            if False:\n",
        (
            (
                CLAIM_SET,
                "claim.refresh(key, instance):\n                self._lose_to_other(claim)",
                "claim.refresh(key, instance):\n                pass",
            ),
        ),
    ),
    Mutant(
        "a claim is won without reading back",
        BASE_CLAIMER,
        "            if outcome.accepted:\n                claim = self._won(",
        "            if True:\n                claim = self._won(",
        (
            (
                CLAIMS,
                "        return claim if claim.refresh(key, instance) else None",
                "        claim.refresh(key, instance)\n        return claim",
            ),
            (CLAIM_SET, "claim.epoch < read and not claim.is_held(key, instance)", "False"),
        ),
    ),
    Mutant(
        "a commit is not read back",
        BASE_CLAIMER,
        "            if missing:\n                self.clock.sleep_ms",
        "            missing = {}\n            if missing:\n                self.clock.sleep_ms",
    ),
    Mutant(
        "offsets are read before the claim is won",
        WHOLE,
        "        keys = context.keys(claim.partition for claim in claims)\n",
        "        keys = {claim.partition: self.early[claim.partition] for claim in claims}\n",
        (
            (
                BATCH,
                "        self._claimer.ensure_group_settings()\n",
                (
                    "        self._whole.early = self._context.keys(self._context.existing)\n"
                    "        self._claimer.ensure_group_settings()\n"
                ),
            ),
        ),
    ),
    Mutant(
        "at most once processes before the commit",
        BATCH,
        "            self._commit_before_processing()\n        self._move(BatchEvent.PERMIT)",
        "            self._claimer.plan({one.partition: one.end for one in self.ranges})\n"
        "        self._move(BatchEvent.PERMIT)",
    ),
    Mutant(
        "at most once processes whatever it owns at the plan's end",
        CLAIMER,
        "                and outcome.before == starts[message.partition]\n",
        "",
    ),
    Mutant(
        "at most once takes an unacknowledged commit for its own",
        CLAIMER,
        "                if outcome is not None\n"
        "                and outcome.accepted\n"
        "                and outcome.before",
        "                if outcome is None\n                or outcome.accepted\n                and outcome.before",
    ),
    Mutant(
        "the start of a plan is the offset that the owner counts itself",
        WHOLE,
        "        plans = {number: keys[number].plan_end for number in self.positions}",
        "        plans = dict.fromkeys(self.positions)",
    ),
    Mutant(
        "a result is written before its plan",
        BATCH,
        "        self.plan()\n        self.check()\n        self._written",
        "        self.check()\n        self._written",
    ),
    Mutant(
        "the output takes a range again",
        "protocol/idempotence.py",
        "    if position == wanted.end:\n        return Verdict.SKIP\n",
        "    if position == wanted.end:\n        return Verdict.TAKE\n",
    ),
    Mutant(
        "the output takes what a displaced run writes",
        "protocol/idempotence.py",
        "    if wanted.generation < stored.generation:\n",
        "    if False:\n",
        (
            (
                "protocol/idempotence.py",
                "    if wanted.epoch < stored.epoch and not wanted.in_any_order:\n",
                "    if False:\n",
            ),
            ("protocol/idempotence.py", "    if position != wanted.start:\n", "    if False:\n"),
        ),
    ),
    Mutant(
        "a pause is half written",
        "admin/group_writer.py",
        "            signed, unsent = self._sender.signed(member), list(ends)\n",
        "            signed, unsent = self._sender.signed(member), list(ends)[:1]\n",
    ),
    Mutant(
        "a position is set although the group was resumed in between",
        CLAIMER,
        "if log_offset is not None and self.key(message.partition).generation == log_offset",
        "if log_offset is not None",
    ),
    Mutant(
        "the queue is not purged at self-fencing",
        CLAIM_SET,
        "        if fenced:\n            self._reader.rationalizer.log.purge()",
        "        if fenced:\n            pass",
    ),
    Mutant(
        "a run uses the instance id of the previous run",
        CLAIMS,
        '    return f"{run_id}.{os.urandom(6).hex()}"',
        '    return f"{run_id}.0"',
        (("batches/session.py", "new_instance_id(self.run_id)", "new_instance_id(self.client)"),),
    ),
    Mutant(
        "a displaced instance claims again",
        CLAIM_SET,
        "            if not claim.refresh(key, instance):\n                self._lose_to_other(claim)",
        "            if not claim.refresh(key, instance):\n"
        "                claim.epoch = self.claim_again(claim.partition) or claim.epoch",
        (
            (
                BASE_CLAIMER,
                '        self._is_settled = True\n        """Whether',
                (
                    "        from marshal_dagster.protocol.messages import ClaimingPartition\n"
                    "        self._claim_set.claim_again = lambda partition: self._sender.send(\n"
                    "            [ClaimingPartition(partition=partition, **self._sender.signed(self.member))]\n"
                    "        ).log_offsets[0]\n"
                    '        self._is_settled = True\n        """Whether'
                ),
            ),
        ),
    ),
    Mutant(
        "a range is done by a member that does not own it",
        TRANSITIONS,
        "finish_range, (*_BY_RANGE_OWNER, (lambda",
        "finish_range, (_BY_RANGE_OWNER[0], (lambda",
    ),
    Mutant(
        "a range is done that is not planned",
        TRANSITIONS,
        "(*_BY_RANGE_OWNER, (lambda event: _named(event).phase is Phase.PLANNED, Refusal.NOT_PLANNED))",
        "_BY_RANGE_OWNER",
    ),
    Mutant(
        "a range is claimed over another",
        TRANSITIONS,
        "is not None or not any(range_.overlaps(start, end) for range_ in ranges)",
        "is not None or start < end",
    ),
    Mutant(
        "a planned range is planned to another end",
        TRANSITIONS,
        "                (is_same_plan_or_first, Refusal.OTHER_PLAN),\n",
        "",
    ),
    Mutant(
        "a whole claim beside live ranges",
        TRANSITIONS,
        "                (is_free_of_live_ranges, Refusal.HELD_BY_RANGES),\n"
        "                (is_free_of_ranges_or_pauser, Refusal.HELD_BY_RANGES),\n",
        "",
    ),
    Mutant(
        "the offset moves over a gap between ranges",
        KEY_RANGES,
        "    if start == offset:\n",
        "    if start >= offset:\n",
    ),
    Mutant(
        "records of an earlier claim count for a range",
        KEY_RANGES,
        "each.owner.epoch == epoch",
        "each.owner.epoch is not None and each.owner.epoch >= epoch",
    ),
    Mutant(
        "the plan of a range is not read back",
        RANGE_CLAIMER,
        "            self._require_plans_accepted(ends, sent)\n",
        "            self._settle()\n            self._claim_set.refresh()\n"
        "            self._claim_set.require(ends.keys())\n"
        "            for number, end in new.items():\n                claims[number].plan_end = end\n",
    ),
    Mutant(
        "what comes after the plan of a range is still counted on",
        RANGE_CLAIMER,
        "                claim.end = message.end\n",
        "                pass\n",
    ),
    Mutant(
        "at most once takes an unacknowledged end of a range for its own",
        RANGE_CLAIMER,
        "for message, outcome in sent if is_accepted(outcome))",
        "for message, outcome in sent if outcome is None or outcome.accepted)",
    ),
    Mutant(
        "at most once processes a range whose end was refused",
        BATCH,
        " and not self._early.is_refused(part)",
        "",
    ),
    Mutant(
        "what another generation has done counts as the range's commit",
        CLAIMS,
        "may_be_done and key.generation == self.generation and",
        "may_be_done and",
    ),
    Mutant(
        "an abandoned range is taken over in another size",
        "protocol/range_choice.py",
        "        return left.start, left.end\n",
        "        return left.start, min(left.end, left.start + size)\n",
    ),
    Mutant(
        "the output takes one of its ranges again",
        "protocol/idempotence.py",
        "    if not wanted.width or stored.overlapping == (wanted.start, wanted.end):\n        return Verdict.SKIP\n",
        "    if not wanted.width or stored.overlapping == (wanted.start, wanted.end):\n        return Verdict.TAKE\n",
    ),
    Mutant(
        "a range is read as far as it was claimed, not as it was planned",
        "batches/range_source.py",
        "            end = claim.end if claim.plan_end is not None else min(claim.end, at.end)\n",
        "            end = claim.end\n",
    ),
    Mutant(
        "ranges are off wherever none are known",
        "admin/group_writer.py",
        "        require_all_certain(world)\n",
        "",
    ),
    Mutant(
        "a snapshot leaves out the pause",
        SNAPSHOTS,
        '"paused_until_s": group.paused_until_s,',
        '"paused_until_s": None,',
    ),
    Mutant(
        "a snapshot forgets the attempts of a plan",
        SNAPSHOTS,
        "key.plan_end, key.plan_attempts, key.generation",
        "key.plan_end, 0, key.generation",
    ),
    Mutant(
        "a late writer of a snapshot deletes newer ones",
        SNAPSHOTS,
        "and name.offset < newest.offset",
        "and name.offset != newest.offset",
    ),
    Mutant(
        "half a snapshot is read on from",
        SNAPSHOTS,
        "not all(str(part) in self.parts for part in range(closing.parts))",
        "False",
        (
            (
                SNAPSHOTS,
                'b"".join(self.parts[str(part)] for part in range(closing.parts))',
                'b"".join(self.parts.get(str(part), b"") for part in range(closing.parts))',
            ),
            (
                SNAPSHOTS,
                "text if _checksum(self.name, text) == closing.checksum else RejectedSnapshot.CHECKSUM",
                "text",
            ),
            (
                SNAPSHOTS,
                "return [*records, Record(name.key(_CLOSING), _line(closing).encode())]",
                "return [Record(name.key(_CLOSING), _line(closing).encode()), *records]",
            ),
        ),
    ),
    Mutant(
        "a group without settings is a native one",
        "protocol/messages.py",
        "WITHOUT_SETTINGS: Final = GroupSettings(GO_HEARTBEAT_INTERVAL_MS, RuleSet.GO)",
        "WITHOUT_SETTINGS: Final = GroupSettings(GO_HEARTBEAT_INTERVAL_MS, RuleSet.NATIVE)",
    ),
    Mutant(
        "a heartbeat in a Go group lowers no offset",
        TRANSITIONS,
        "    key.move(event.message.offset)\n    displaced",
        "    key.move(max(event.message.offset, key.offset or 0))\n    displaced",
    ),
    Mutant(
        "a heartbeat in a Go group displaces no owner",
        TRANSITIONS,
        "    if not is_owner(event):\n        key.owner = _owner_of(event)\n",
        "    if key.owner is None:\n        key.owner = _owner_of(event)\n",
    ),
    Mutant(
        "a release in a Go group moves no offset",
        TRANSITIONS,
        "    if not is_pauser(event) and (key.offset is None or offset > key.offset):\n        key.move(offset)\n",
        "",
    ),
    Mutant(
        "first settings while a plan is open",
        TRANSITIONS,
        "is_pauser(event) or all(key.plan_end is None for key in event.group.keys.values()),",
        "True,",
    ),
    Mutant(
        "members of Go groups write settings",
        AGREEMENT,
        "    if settings == WITHOUT_SETTINGS:\n        return\n",
        "",
        ((AGREEMENT, "    require_no_go_consumers(world, member.group)\n", ""),),
    ),
    Mutant(
        "members of Go groups name the data topic",
        CLAIMER,
        "            if self.is_go:\n                return\n            nameless",
        "            nameless",
    ),
    Mutant(
        "members of Go groups revoke from the dead",
        GROUP_READER,
        "        if is_dead is assume_alive or self.is_go:",
        "        if is_dead is assume_alive:",
    ),
    Mutant(
        "members of Go groups revoke what has no offset",
        CLAIMER,
        "            if self.is_go:\n                return None\n",
        "",
    ),
    Mutant(
        "members of Go groups revoke claims that they have not read",
        CLAIMER,
        "self._release_own(partitions) if self.is_go else super()._revoke_own(partitions)",
        "super()._revoke_own(partitions)",
        (
            (
                BASE_CLAIMER,
                "        if self.is_go:\n            raise GoGroupError(",
                "        if False:\n            raise GoGroupError(",
            ),
        ),
    ),
    Mutant(
        "a release in a Go group sets the first offset",
        CLAIMER,
        "ReleasingPartition(partition=n, offset=at, **signed) for n, at in held.items() if at is not None]",
        "ReleasingPartition(partition=n, offset=at or 0, **signed) for n, at in held.items()]",
    ),
    Mutant(
        "members wait in a Go group as long as in any",
        "protocol/staleness.py",
        "GO_ALLOWANCE_MS: Final = 1_000",
        "GO_ALLOWANCE_MS: Final = 0",
    ),
    Mutant(
        "members of a Go group date their records by their clock",
        "coordination/appender.py",
        "GO_TIME_SHIFT_S: Final = 2",
        "GO_TIME_SHIFT_S: Final = 0",
    ),
    Mutant(
        "a member has the client id of a Go consumer",
        GROUP_READER,
        "        if self.member.client in clients:",
        "        if False:",
    ),
    Mutant(
        "members of a Go group look only before heartbeats",
        "coordination/heartbeats.py",
        "        else:\n            self._claimer.look()\n",
        "",
    ),
    Mutant(
        "members of a Go group do not look before heartbeats",
        CLAIMER,
        "        if self.is_go:\n            self._read_claims()\n",
        "",
    ),
    Mutant(
        "a check in a Go group does not look",
        BASE_CLAIMER,
        "            self.look()\n            self._claim_set.require(partitions)",
        "            self._claim_set.require(partitions)",
    ),
    Mutant(
        "a member continues after another took its partition back by a heartbeat",
        CLAIMS,
        "owner is not None and owner.epoch == self.epoch and owner.instance == instance",
        "owner is not None and owner.instance == instance",
    ),
    Mutant(
        "first settings in a group that Go consumers use",
        AGREEMENT,
        "    if name in used:\n",
        "    if False:\n",
        (
            (
                AGREEMENT,
                "    if used and not world.has_settings:\n",
                "    if used.keys() - {name} and not world.has_settings:\n",
            ),
        ),
    ),
    Mutant(
        "first settings beside a group of Go consumers",
        AGREEMENT,
        "    if used and not world.has_settings:\n",
        "    if False:\n",
    ),
    Mutant(
        "keys of former members are taken for Go's",
        STATE,
        "key.offset is not None and key.data_topic_id is None for key in keys",
        "key.offset is not None for key in keys",
    ),
    Mutant(
        "members claim although settings could not be given",
        AGREEMENT,
        "    if group.settings == settings:\n",
        "    if group.settings == settings or not group.settings_accepted:\n",
    ),
    Mutant(
        "ids of the data topic are looked at in a Go group",
        "batches/context.py",
        "return None if self.is_go else self.topic_id",
        "return self.topic_id",
    ),
    Mutant(
        "a position in a Go group counts as set although another took the partition",
        CLAIMER,
        "frozenset(n for n, key in keys.items() if key.owner is None and key.offset == known[n])",
        "frozenset(keys)",
    ),
    Mutant(
        "members continue beside a Go consumer in their group",
        CLAIM_SET,
        "        if seen is None or seen.log_offset < self._began_at:\n",
        "        if True:\n",
    ),
    Mutant(
        "a remembered heartbeat counts after its key has changed",
        "protocol/world.py",
        "        if type(message) is ClaimingMessages:\n",
        "        if type(message) is not Heartbeat:\n",
    ),
    Mutant(
        "own records with their sender's timestamp count",
        RATIONALIZER,
        "        if self._sender_timed:\n",
        "        if False:\n",
    ),
    Mutant(
        "an own record with its sender's timestamp is forgotten",
        RATIONALIZER,
        "        except (CoordinationLogChangedError, UnavailableError) as error:\n",
        "        except TimestampTypeError:\n            self._sender_timed.clear()\n            raise\n"
        "        except (CoordinationLogChangedError, UnavailableError) as error:\n",
    ),
    Mutant(
        "own records that are read late may have their sender's timestamp",
        RATIONALIZER,
        "            if self._unread_own.get(chunk.partition):\n",
        "            if chunk.partition in own:\n",
    ),
    Mutant(
        "a sender's timestamp counts only once a reading has succeeded",
        RATIONALIZER,
        "        if self._sender_timed:\n",
        "        if self._sender_timed and self.can_resume:\n",
    ),
    Mutant(
        "records are sent to a log that was found to be another one",
        "coordination/appender.py",
        "        self._rationalizer.require_unchanged()\n",
        "",
    ),
    Mutant(
        "at most once, what is done is processed beside a Go consumer",
        RANGE_CLAIMER,
        "            self._claim_set.require_valid(ends)\n",
        "",
    ),
    Mutant(
        "what a reading has shown that failed does not count",
        CLAIM_SET,
        "            if claim.epoch < read and not claim.is_held(",
        "            if False and not claim.is_held(",
    ),
    Mutant(
        "claims are judged only once",
        CLAIM_SET,
        "self._judged[0] is home and self._judged[1] == read:",
        "self._judged[0] is home:",
    ),
    Mutant(
        "claims are kept by a reader that continued from a newer snapshot",
        CLAIM_SET,
        "        if self._reader.began_at > self._began_at:\n            return _OVERTAKEN\n",
        "",
    ),
    Mutant(
        "a former snapshot of a group without settings is read on from",
        SNAPSHOTS,
        "    if is_former and any(group.keys and not group.settings_accepted for group in world.groups.values()):",
        "    if False:",
    ),
    Mutant(
        "former snapshots are passed over",
        SNAPSHOTS,
        "_defaults_text(_FORMER_WITHOUT_SETTINGS if is_former else defaults)",
        "_defaults_text(defaults)",
    ),
    Mutant(
        "former snapshots are deleted",
        SNAPSHOTS,
        "(*name[:3], name.version) == log",
        "name[:3] == log[:3]",
    ),
    Mutant(
        "a former snapshot counts as the newest",
        "coordination/snapshots.py",
        " or name.version not in WRITTEN_VERSIONS:",
        ":",
    ),
)


if __name__ == "__main__":
    sys.exit(gate(MUTANTS, "tests.simulator", CODE, seeds=10_000))
