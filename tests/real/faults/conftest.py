"""The brokers on which all files of this folder inject faults."""

from collections.abc import Iterator

import pytest

from tests.coordinator_faults.scenario import LINKS
from tests.fault_harness.cluster import FaultyKafka, faulty_kafka
from tests.faults.__main__ import LANES
from tests.faults.scenario import MEMBERS
from tests.outbox_faults.scenario import HARVESTERS


@pytest.fixture(scope="package")
def faulty_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyKafka]:
    """Three brokers, with the links of the suite that needs most."""
    with faulty_kafka(tmp_path_factory.mktemp("kafka"), links=max(LANES * MEMBERS, LINKS, HARVESTERS)) as kafka:
        yield kafka
