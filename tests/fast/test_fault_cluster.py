"""Check the repair of the brokers while another fault affects them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from marshal_dagster.devkafka import KafkaCluster
from marshal_dagster.devkafka.errors import BrokerFailedError
from tests.fault_harness.cluster import FaultyKafka


class Brokers:
    """Stand-ins for the processes of brokers; another fault may kill a broker during the first start."""

    def __init__(self, kafka: FaultyKafka) -> None:
        self.kafka = kafka
        self.is_killed = True
        self.starts = 0

    def up(self, *, timeout_s: float) -> None:
        """Start the brokers; the first start fails."""
        assert timeout_s > 0
        self.starts += 1
        if self.starts > 1:
            return
        if self.is_killed:
            self.kafka.kill(2)
        raise BrokerFailedError("broker 2 ended during its start")


@pytest.fixture
def brokers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Brokers]:
    """Yield stand-ins for brokers, so that the test starts and kills no processes."""
    kafka = FaultyKafka(tmp_path / "kafka", links=0)
    kafka.proxy.start()
    brokers = Brokers(kafka)
    monkeypatch.setattr(KafkaCluster, "kill", lambda *_: None)
    monkeypatch.setattr(kafka, "resume", lambda _: None)
    monkeypatch.setattr(kafka, "up", brokers.up)
    yield brokers
    kafka.proxy.stop()


def test_a_repair_begins_anew_when_another_fault_kills_what_it_starts(brokers: Brokers) -> None:
    """Two faults of brokers may overlap."""
    brokers.kafka.repair()
    assert brokers.starts == 2


def test_a_broker_that_ends_by_itself_is_reported(brokers: Brokers) -> None:
    """An earlier kill of another broker is no reason for a second start."""
    brokers.is_killed = False
    brokers.kafka.kill(1)
    with pytest.raises(BrokerFailedError, match="broker 2"):
        brokers.kafka.repair()
    assert brokers.starts == 1
