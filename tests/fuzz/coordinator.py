"""The coordinator's topics: no record in them, by whatever member or coordinator, may end a member or a coordinator.

The bytes add messages to a group of one member: messages of both sides, with unusual fields or changed bytes, and
noise. The coordinator, the member, a reader of the topic and the next coordinator read all of it.
"""

import json
import logging
from typing import Any, Final

from marshal_dagster.coordinator.assignment import sticky_assignment
from marshal_dagster.coordinator.assignment_reader import assigned_partitions
from marshal_dagster.coordinator.group import GroupCoordinator, GroupEventKind, GroupRules
from marshal_dagster.coordinator.group_view import view_of
from marshal_dagster.coordinator.member import Membership
from marshal_dagster.coordinator.messages import (
    CoordinatorMessage,
    MemberMessage,
    Register,
    StartFetcher,
    parse_coordinator_message,
    parse_member_message,
    render,
)
from marshal_dagster.coordinator.transport import NewestMessages, ReceivedRecord, keep_newest, key_of, partition_of
from tests.fuzz.promises import hold, in_time
from tests.fuzz.supply import Supply

GROUP: Final = "etl"
EPOCH: Final = 5
SESSION_MS: Final = 6_000
MOST_RECORDS: Final = 200
KINDS: Final = ("register", "pong", "stopped", "started", "leave", "ping", "registered", "stop", "start", "what")
NUMBERS: Final = (0, 1, 2, 3, EPOCH, EPOCH + 1, 2**31, 2**40, 2**60, 2**62 - 1, 2**62, 2**63, -1, 10**400)
NAMES: Final = ("a", "b", "*", "", "/", "größe", "\ud83d", "x" * 300, "a\n")
PLACES: Final[tuple[dict[str, list[int]], ...]] = (
    {},
    {"orders": [0]},
    {"orders": [0, 1, 2]},
    {"other": [7]},
    {"orders": [2**31]},
    {"..": [1]},
    {"": []},
)
TIMES_MS: Final = (0, -1, 1_795_230_000_000, 2**53, 2**63 - 1, -(2**63))
VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "version": (1, 2, "1", None),
    "group": (GROUP, *NAMES),
    "member": NAMES,
    "tenure": NAMES,
    "epoch": NUMBERS,
    "round": NUMBERS,
    "retry": NUMBERS,
    "generation": NUMBERS,
    "session_timeout_ms": (SESSION_MS, *NUMBERS),
    "capacity": NUMBERS,
    "topics": ([], ["orders"], ["ö"], [""], ["orders"] * 3, None),
    "pattern": (None, "*", "o?d*", "[", "x" * 300, "(a+)+$"),
    "is_static": (True, False, 1),
    "auto_commit": (True, False, "yes"),
    "holds": PLACES,
    "places": PLACES,
    "gained": PLACES,
    "offsets": ({}, {"orders": {"0": 7}}, {"orders": {"0": 2**62}}, {"orders": {"-1": 0}}, None),
    "error": (None, "bad_pattern", "unknown_member", "duplicate_id", "what"),
}


def check(data: bytes) -> int:
    """Let a group read the records that the bytes describe; return their number."""
    logging.disable(logging.CRITICAL)
    try:
        return _Group(Supply(data)).run()
    finally:
        logging.disable(logging.NOTSET)


class _Group:
    """A correct coordinator, a correct member, and readers of the other records."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self._now_ms = 0.0
        self._leader = GroupCoordinator(GROUP, EPOCH, GroupRules(sticky_assignment), 0.0)
        register = Register(
            group=GROUP, member="a", epoch=0, tenure="a", topics=["orders"], session_timeout_ms=SESSION_MS
        )
        self._member = Membership(register, 0.0)
        self._newest: NewestMessages = {}
        self._offset = 0
        self._send(self._leader.update_topics({"orders": 3}, 0.0))

    def run(self) -> int:
        records = 0
        while self._supply and records < MOST_RECORDS:
            self._now_ms += self._supply.byte() * 20
            self._answer(self._member.tick(self._now_ms).messages)
            self._send(self._leader.tick(self._now_ms))
            value, at_ms = self._value(), self._supply.choose(TIMES_MS)
            in_time("reading a record", lambda value=value, at_ms=at_ms: self._read(value, at_ms))  # type: ignore[misc]
            records += 1
        kinds = [event.happening for event in self._leader.events]
        hold(GroupEventKind.SUPERSEDED not in kinds, "no member ends a term by a number")
        self._look()
        self._succeed()
        return records

    def _value(self) -> bytes:
        supply = self._supply
        choice = supply.byte() % 8
        if choice == 0:
            return supply.take(supply.byte())
        if choice == 1:
            return supply.choose((b"[", b'{"holds":', b'{"kind":"start","places":{"a":[')) * (supply.byte() * 64)
        fields: dict[str, Any] = {"kind": supply.choose(KINDS), "group": GROUP, "member": "a", "tenure": "a"}
        fields |= {"epoch": EPOCH, "round": 1, "generation": 1, "session_timeout_ms": SESSION_MS, "places": {}}
        for _ in range(supply.byte() % 5):
            name = supply.choose(tuple(VALUES))
            fields[name] = supply.choose(VALUES[name])
        value = bytearray(json.dumps(fields, ensure_ascii=bool(choice % 2)).encode(errors="surrogatepass"))
        if choice == 2:
            at = (supply.byte() * 256 + supply.byte()) % (len(value) + 1)
            value[at : at + supply.byte() % 4] = supply.take(supply.byte() % 8)
        return bytes(value)

    def _read(self, value: bytes, at_ms: int) -> None:
        message, order = parse_member_message(value), parse_coordinator_message(value)
        hold(message is None or order is None, "a message is of one side", value)
        for found in (message, order):
            if found is not None:
                partition_of(found.group, 8)
                render(found)
        if message is not None and message.group == GROUP:
            self._send(self._leader.receive(message, self._now_ms))
        if order is not None:
            hold(parse_coordinator_message(render(order)) == order, "what is read can be written", value)
            self._keep(ReceivedRecord(0, 0, key_of(order), value, at_ms))
            if order.group == GROUP:
                self._obey(order)
        self._keep(ReceivedRecord(0, 0, self._supply.take(4), value, at_ms))

    def _keep(self, record: ReceivedRecord) -> None:
        self._offset += 1
        keep_newest(self._newest, record._replace(offset=self._offset))
        keys = {key for _, key in self._newest}
        own = {key_of(message) for message, _ in self._newest.values()}
        hold(keys == own, "a message counts under its own key", keys)

    def _look(self) -> None:
        """Check that readers of the group and of its assignment get a result."""
        view = view_of(GROUP, [(message, record.at_ms) for message, record in self._newest.values()])
        for member in (*view.shares, "a"):
            for now_ms in (0.0, 1_795_230_000_000.0, float(view.pinged_at_ms or 0)):
                assigned_partitions(view, member, "orders", SESSION_MS, now_ms)

    def _succeed(self) -> None:
        """Check that the next coordinator starts with the kept messages and assigns all partitions to the member."""
        kept = [message for message, _ in self._newest.values() if isinstance(message, StartFetcher)]
        heir = GroupCoordinator(GROUP, EPOCH + 10, GroupRules(sticky_assignment), self._now_ms, kept=kept)
        heir.update_topics({"orders": 3}, self._now_ms)
        register = Register(group=GROUP, member="z", epoch=0, tenure="z", topics=["orders"], session_timeout_ms=1_000)
        heir.receive(register, self._now_ms)
        orders: list[CoordinatorMessage] = []
        for _ in range(100):
            self._now_ms += 1_000
            new = heir.tick(self._now_ms)
            orders += new
            for order in new:
                render(order)
                if order.kind == "ping":
                    fields = {"kind": "pong", "group": GROUP, "member": "z", "tenure": "z", "epoch": EPOCH + 10}
                    pong = parse_member_message(json.dumps({**fields, "round": order.round}).encode())
                    hold(pong is not None, "a pong is a message")
                    heir.receive(pong, self._now_ms)  # type: ignore[arg-type]
        shares = [order.places for order in orders if isinstance(order, StartFetcher) and order.member == "z"]
        hold({"orders": [0, 1, 2]} in shares, "the next coordinator assigns everything", shares)

    def _obey(self, order: CoordinatorMessage) -> None:
        actions = self._member.receive(order, self._now_ms)
        self._answer(actions.messages)
        if actions.stop:
            self._answer(self._member.stopped(actions.stop).messages)

    def _answer(self, messages: tuple[MemberMessage, ...]) -> None:
        for message in messages:
            hold(parse_member_message(render(message)) == message, "what a member writes can be read", message)
            self._leader.receive(message, self._now_ms)

    def _send(self, orders: list[CoordinatorMessage]) -> None:
        for order in orders:
            hold(parse_coordinator_message(render(order)) == order, "what a coordinator writes can be read", order)
            self._keep(ReceivedRecord(0, 0, key_of(order), render(order), self._supply.choose(TIMES_MS)))
            self._obey(order)
