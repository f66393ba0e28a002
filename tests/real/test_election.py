"""Elections over a real Kafka, with members that are killed, stopped or ended in order."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from marshal_dagster.election.elector import LEADER_SETTINGS, Elector
from marshal_dagster.election.rules import Event, TermEnded, TermStarted, Timing
from marshal_dagster.errors import AuthorizationError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.conditions import WITHIN_S, wait_until
from tests.election_process import boot_ms
from tests.real.conftest import MakeTopic
from tests.real.secured_kafka import PLAIN_PASSWORD, PLAIN_USER, SecuredKafka, secured_kafka

SESSION_S, LONG_SESSION_S = 6, 60
ASIDE_S = 10.0


@dataclass(slots=True)
class Member:
    """A member in its own process."""

    process: subprocess.Popen[bytes]
    journal: Path

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the member's journal, without one that is not yet written to its end."""
        text = self.journal.read_text() if self.journal.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def fence(self) -> int | None:
        """The fence of the term in which the member believes that it leads."""
        answers = [line for line in self.lines() if "fence" in line]
        return answers[-1]["fence"] if answers else None

    @property
    def is_there(self) -> bool:
        """Whether the member has started to write its journal."""
        return bool(self.lines())

    def leads(self) -> bool:
        """Return whether the member believes that it leads."""
        return self.fence is not None


class Election:
    """Members of one group."""

    def __init__(self, servers: str, topic: str, folder: Path) -> None:
        self.topic = topic
        self.session_s = SESSION_S
        self.members: list[Member] = []
        self._servers = servers
        self._folder = folder

    def start(self) -> Member:
        """Start a member."""
        journal = self._folder / f"journal{len(self.members)}"
        given = [self._servers, self.topic, f"group-{self.topic}", str(journal), str(self.session_s * 1_000)]
        process = subprocess.Popen([sys.executable, "-m", "tests.election_process", *given])
        self.members.append(Member(process, journal))
        return self.members[-1]

    def start_both(self) -> tuple[Member, Member]:
        """Start two members. Return the leader first."""
        for _ in range(2):
            self.start()
        wait_until(lambda: all(member.is_there for member in self.members), "all members are started")
        wait_until(lambda: sum(member.leads() for member in self.members) == 1, "one member leads")
        leader, other = sorted(self.members, key=Member.leads, reverse=True)
        return leader, other

    def terms(self) -> list[tuple[int, float, float]]:
        """Return each term: its fence, and two moments at which its leader certainly believed in it, far apart."""
        times: dict[int, list[tuple[float, float]]] = {}
        for member in self.members:
            for line in member.lines():
                if line.get("fence") is not None:
                    times.setdefault(line["fence"], []).append((line["until_ms"], line["at_ms"]))
        return sorted((fence, min(looks)[0], max(looks)[1]) for fence, looks in times.items())

    def count_members(self) -> int:
        """Return how many members the broker has in the group."""
        group = f"group-{self.topic}"
        admin = AdminClient({"bootstrap.servers": self._servers})
        return len(admin.describe_consumer_groups([group])[group].result(WITHIN_S).members)

    def close(self) -> None:
        """End all members."""
        for member in self.members:
            if member.process.poll() is None:
                member.process.kill()
            member.process.wait()


@pytest.fixture
def election(kafka: str, topic: MakeTopic, tmp_path: Path) -> Iterator[Election]:
    """An election for this test."""
    election = Election(kafka, topic(1, LEADER_SETTINGS), tmp_path)
    yield election
    election.close()


def _starts_term(line: dict[str, Any]) -> bool:
    return line.get("event") == "TermStarted"


def check_terms(election: Election, count: int) -> None:
    """Check that terms follow each other in the order of their fences, and that two members never lead at once.

    On a busy machine there may be more of them. Each was reported by its leader.
    """
    terms = election.terms()
    reported = {line["reported"] for member in election.members for line in member.lines() if _starts_term(line)}
    assert len(terms) >= count
    assert reported >= {fence for fence, _, _ in terms}
    for (_, _, last_ms), (_, first_ms, _) in pairwise(terms):
        assert last_ms < first_ms


def test_another_leads_when_the_leader_is_killed(election: Election) -> None:
    """The other member leads when the session timeout has passed."""
    leader, other = election.start_both()
    os.kill(leader.process.pid, signal.SIGKILL)
    wait_until(other.leads, "another member leads")
    check_terms(election, 2)


def test_a_leader_that_ends_hands_over_at_once(election: Election) -> None:
    """The leader reports its resignation and leaves the group, before its process ends."""
    election.session_s = LONG_SESSION_S
    leader, other = election.start_both()
    leader.process.terminate()
    assert leader.process.wait(WITHIN_S) == 0
    assert election.count_members() == 1, "its session has yet to end"
    wait_until(other.leads, "another member leads")
    events = [(line["event"], line.get("reported")) for line in leader.lines() if "event" in line]
    first, _ = [fence for fence, _, _ in election.terms()]
    assert events == [("TermStarted", first), ("TermEnded", first), ("Ended", None)]
    check_terms(election, 2)


def test_a_leader_that_was_stopped_does_not_believe_that_it_leads(election: Election) -> None:
    """Another member leads meanwhile. When the first one continues, it knows at once that its term is over."""
    leader, other = election.start_both()
    fence = leader.fence
    os.kill(leader.process.pid, signal.SIGSTOP)
    wait_until(other.leads, "another member leads")
    before = len(leader.lines())
    continued_ms = boot_ms()
    os.kill(leader.process.pid, signal.SIGCONT)
    wait_until(
        lambda: ("TermEnded", fence) in [(line.get("event"), line.get("reported")) for line in leader.lines()],
        "the former leader has resigned",
    )
    wait_until(lambda: len(leader.lines()) > before + 20, "the former leader beats on")
    answers = [line for line in leader.lines() if "fence" in line and line["at_ms"] > continued_ms]
    assert len(answers) > 10
    assert fence not in {line["fence"] for line in answers}
    check_terms(election, 2)


def test_a_leader_that_hears_nothing_of_itself_steps_down(connection: KafkaConnection, topic: MakeTopic) -> None:
    """The leader steps down by its own clock. It leads in a later term when its beats arrive again."""
    name, events = topic(1, LEADER_SETTINGS), list[Event]()
    timing = Timing(receive_deadline_ms=3_000)
    with Elector(
        connection, name, f"group-{name}", timing=timing, listener=lambda _, event: events.append(event)
    ) as elector:
        first = elector.wait_for_term(WITHIN_S)
        assert first is not None
        with Topics(connection) as topics:
            # The broker rejects all beats from now on.
            set_largest(connection, name, 1)
            wait_until(lambda: not elector.leads(first), "the elector has lost the first term")
            wait_until(lambda: len(events) == 2, "two events were reported")
            assert topics.has_consumers(elector.group)
        assert isinstance(events[1], TermEnded)
        assert events[1].reason == "read back none of its own beats of the last 3 s"
        wait_until(lambda: elector.failure is not None, "the elector reports that it cannot lead")
        assert "are not stored or not read back: Broker: Message size too large" in str(elector.failure)
        set_largest(connection, name, 10_000)
        second = elector.wait_for_term(WITHIN_S)
        assert second is not None
        assert second.fence > first.fence
        assert second.leader_id != first.leader_id
        wait_until(lambda: elector.failure is None, "the failure is over")
    assert [type(event) for event in events] == [TermStarted, TermEnded, TermStarted, TermEnded]
    assert elector.term() is None


def test_a_group_that_cannot_be_joined_is_reported(connection: KafkaConnection, topic: MakeTopic) -> None:
    """If another program uses the election's group, the member can never join, and reports that."""
    name = topic(1, LEADER_SETTINGS)
    group = f"group-{name}"
    other = Consumer(
        {
            "bootstrap.servers": connection.bootstrap_servers,
            "group.id": group,
            "partition.assignment.strategy": "range",
        }
    )
    other.subscribe([name])
    try:
        wait_until(lambda: other.poll(0.1) is None and bool(other.assignment()), "the other is a member")
        with Elector(connection, name, group) as elector:
            wait_until(lambda: other.poll(0.1) is None and elector.failure is not None, "the elector reports it")
            assert f"cannot take part in election {group!r}" in str(elector.failure)
            assert "\n" not in str(elector.failure)
    finally:
        other.close()


def set_largest(connection: KafkaConnection, topic: str, size: int) -> None:
    """Set the maximum size of a topic's batches."""
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its type hints lack these exports
        AdminClient,
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
    )

    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": connection.bootstrap_servers})
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(WITHIN_S)


def test_each_partition_has_a_leader_of_its_own(connection: KafkaConnection, topic: MakeTopic) -> None:
    """If a leader gives up its term, it leads again in a later term. The term of the other partition continues."""
    name = topic(2, LEADER_SETTINGS)
    with Elector(connection, name, f"group-{name}") as elector:
        terms = [elector.wait_for_term(WITHIN_S, partition) for partition in range(2)]
        assert None not in terms
        first, beside = terms
        assert first is not None
        assert beside is not None
        elector.give_up(first, "by request")
        assert not elector.leads(first)
        wait_until(lambda: elector.term() is not None, "the elector leads")
        later = elector.term()
        assert later is not None
        assert later.fence > first.fence
        assert elector.leads(beside, 1)


def test_one_that_stands_aside_lets_another_of_its_process_lead(connection: KafkaConnection, topic: MakeTopic) -> None:
    """The elector leaves the group for the given time and then returns.

    It leads again when the other elector steps aside.
    """
    name = topic(1, LEADER_SETTINGS)
    with Elector(connection, name, f"group-{name}") as one, Elector(connection, name, f"group-{name}") as another:
        wait_until(lambda: one.term() is not None or another.term() is not None, "one of the two leads")
        leader, other = (one, another) if one.term() is not None else (another, one)
        first = leader.term()
        assert first is not None
        leader.step_down(first, "no database", ASIDE_S)
        second = other.wait_for_term(WITHIN_S)
        assert second is not None
        assert second.fence > first.fence
        wait_until(lambda: leader._aside_s == 0, "the pause after the failure is over")
        other.step_down(first, "an earlier term", ASIDE_S)
        assert (leader.term(), other.term(), other._aside_s) == (None, second, 0)
        other.step_down(second, "no database", WITHIN_S)
        third = leader.wait_for_term(WITHIN_S)
        assert third is not None
        assert third.fence > second.fence
        assert other.term() is None


def test_a_topic_that_is_missing_is_reported(connection: KafkaConnection) -> None:
    """The error comes at once, in one line."""
    with (
        pytest.raises(TopicNotFoundError, match="'no-such-topic'") as reported,
        Elector(connection, "no-such-topic", "group"),
    ):
        pass
    assert "\n" not in str(reported.value)


def test_brokers_that_are_down_are_reported() -> None:
    """The error comes within the connection's timeout, in one line."""
    connection = KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=1)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1") as reported, Elector(connection, "topic", "group"):
        pass
    assert "\n" not in str(reported.value)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredKafka]:
    """A broker on which authenticated users need rights."""
    with secured_kafka(tmp_path) as secured:
        yield secured


def test_a_right_that_is_missing_is_reported(secured: SecuredKafka) -> None:
    """A missing right on the topic is reported at once, one on the group after a moment.

    Once all rights are granted, one elector leads and the other stands by.
    """
    topic, group = "leader", "group"
    with Topics(KafkaConnection(bootstrap_servers=secured.servers["PLAINTEXT"])) as admin:
        admin.create(topic, 1, 1)
    connection = KafkaConnection(
        bootstrap_servers=secured.servers["SASL_PLAINTEXT"],
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        username=PLAIN_USER,
        password=PLAIN_PASSWORD,  # type: ignore[arg-type]  # pydantic makes it a secret
    )

    def stand() -> Elector:
        return Elector(connection, topic, group, timing=Timing(receive_deadline_ms=1_000))

    for right in ("DESCRIBE", "READ", "WRITE"):
        wanted = rf"grant this user .*{right}.* on topic 'leader'"
        refused = wait_until(lambda wanted=wanted: re.search(wanted, refusal(stand())), f"{right} is missing")  # type: ignore[misc]
        assert "\n" not in refused.string
        secured.grant(PLAIN_USER, right, "TOPIC", topic)
    wait_until(lambda: not refusal(stand()), "the rights on the topic are known")
    with stand() as one, stand() as another:
        both = (one, another)
        wait_until(lambda: all(each.failure is not None for each in both), "both report that a right is missing")
        for each in both:
            assert "grant this user READ on group 'group'" in str(each.failure)
            assert "\n" not in str(each.failure)
        secured.grant(PLAIN_USER, "READ", "GROUP", group)
        wait_until(lambda: any(each.term() is not None for each in both), "one of the two leads")
        wait_until(lambda: all(each.failure is None for each in both), "neither reports a failure")


def refusal(elector: Elector) -> str:
    """Return why the elector cannot start, or nothing. Granted rights take effect after a moment."""
    try:
        with elector:
            return ""
    except AuthorizationError as error:
        return str(error)
