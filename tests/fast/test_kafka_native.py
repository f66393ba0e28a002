"""Unusual broker responses must not crash the native client library and with it the process."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import marshal_dagster
from tests.conditions import WITHIN_S

HEAD = """
    import time
    from marshal_dagster.errors import MarshalError, UnavailableError
    from marshal_dagster.kafka import clients
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.kafka.connection import KafkaConnection
    from marshal_dagster.kafka.inspection import KafkaInspector
    from tests.fake_broker import METADATA, FakeBroker, fake_broker

    def connection_to(broker):
        return KafkaConnection(bootstrap_servers=f"127.0.0.1:{broker.port}", timeout_s=0.7)

    def answer_of(ask):
        try:
            return ask()
        except MarshalError as error:
            return f"{type(error).__name__}: {error}"

    def until(holds, ask):
        while not holds(found := answer_of(ask)):  # a busy machine may need several timeouts for an answer
            pass
        return found

    def without_brokers(ask):
        return until(lambda found: "lists no live broker" in str(found), ask)
"""


def run(script: str) -> list[str]:
    """Run `script` in a separate process, check that it exits by itself, and return the lines that it prints."""
    whole = textwrap.dedent(HEAD) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2_000:])
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_an_answer_that_lists_no_brokers_ends_no_process() -> None:
    """If a response lists no brokers, as that of a single fenced broker, each query raises an error with advice.

    Later queries work.
    """
    lines = run("""
        with fake_broker([1], {"orders": {0: 1, 1: 1}}) as broker, KafkaInspector(connection_to(broker)) as topics:
            until(lambda found: found == 1, topics.broker_count)
            reached, log = clients.admin(connection_to(broker), client_id="a")
            clients.reach(reached, log, timeout_s=60)
            broker.brokers, broker.topics = [], {}
            print(without_brokers(topics.broker_count))
            print(without_brokers(topics.brokers))
            print(without_brokers(lambda: clients.reach(reached, log, timeout_s=0.7)))
            print(without_brokers(lambda: clients.check_reachable(connection_to(broker))))
            print(without_brokers(topics.partition_counts))
            print(without_brokers(lambda: topics.offsets("orders", [0])))
            broker.brokers, broker.topics = [1], {"orders": {0: 1, 1: 1}}
            answers = lambda found: not isinstance(found, str)
            print(until(answers, topics.broker_count), until(answers, lambda: topics.offsets("orders", [0])[0]))
    """)
    for line in lines[:-1]:
        assert line.startswith("UnavailableError: Kafka at 127.0.0.1:")
        assert "the server's answer lists no live broker" in line
        assert "check the brokers' logs" in line
    assert lines[-1] == "1 OffsetBounds(start=3, end=68)"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["admin", "consumer", "producer"])
def test_each_client_names_a_cluster_without_brokers(kind: str) -> None:
    """Admin clients, consumers and producers all report that the cluster has no live broker."""
    arguments = {"producer": ", delivery_timeout_ms=500"}.get(kind, "")
    (line,) = run(f"""
        with fake_broker() as broker:
            client, log = clients.{kind}(connection_to(broker), client_id="a"{arguments})
            print(without_brokers(lambda: clients.reach(client, log, timeout_s=0.7)))
    """)
    assert "the server's answer lists no live broker (tried for 0.7 s); check the brokers' logs" in line


@pytest.mark.thorough
def test_leaders_that_come_and_go_end_no_process() -> None:
    """Querying offsets while leaders change is safe.

    The admin client's `list_offsets` crashed here on a large topic.
    """
    lines = run("""
        import itertools, threading

        class Settling(FakeBroker):
            counter = itertools.count()

            def answer(self, api, version, body):
                if api == METADATA and next(self.counter) % 3:
                    self.topics = {"orders": {number: 1 if number % 7 else -1 for number in range(1_000)}}
                elif api == METADATA:
                    self.topics = {"orders": dict.fromkeys(range(1_000), 1)}
                return super().answer(api, version, body)

        broker = Settling([1], {"orders": dict.fromkeys(range(1_000), 1)})
        with Topics(connection_to(broker)) as topics:
            deadline = time.monotonic() + 4
            def ask():
                while time.monotonic() < deadline:
                    answer_of(lambda: topics.offsets("orders", range(400), committed_only=False))
                    answer_of(lambda: topics._await_usable("orders", 1_000))
            asking = [threading.Thread(target=ask) for _ in range(3)]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
        print("over")
    """)
    assert lines == ["over"]


@pytest.mark.slow
def test_a_leader_that_knows_no_topic_does_not_make_it_missing() -> None:
    """If a leader does not know the topic, the metadata decides. Leaders also report this while a broker stops."""
    (line,) = run("""
        import itertools
        from tests.fake_broker import LIST_OFFSETS

        class Forgetful(FakeBroker):
            counter = itertools.count()

            def answer(self, api, version, body):
                if api == LIST_OFFSETS:
                    self.error = 3 if next(self.counter) < 4 else 0
                return super().answer(api, version, body)

        broker = Forgetful([1], {"orders": {0: 1}})
        with Topics(KafkaConnection(bootstrap_servers=f"127.0.0.1:{broker.port}", timeout_s=20)) as topics:
            print(answer_of(lambda: topics.offsets("orders", [0])[0]))
    """)
    assert line == "OffsetBounds(start=3, end=68)"


UNSAFE = re.compile(r"\.(describe_cluster|list_offsets|list_consumer_group_offsets)\(")
"""Calls of the admin client that can crash the process: a failed assertion, a use of freed memory, and a failed
assertion (librdkafka #4605).
"""


def test_no_code_calls_what_may_end_the_process() -> None:
    """The library uses metadata and consumers that read nothing instead of the calls that can crash."""
    sources = [path for path in Path(marshal_dagster.__file__).parent.rglob("*.py") if UNSAFE.search(path.read_text())]
    assert sources == []
