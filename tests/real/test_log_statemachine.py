"""The log over Kafka under any sequence of steps. `tests/fast/test_log_statemachine.py` tests the log in memory."""

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.log_statemachine import LogMachine
from tests.real.conftest import MakeTopic
from tests.real.test_kafka_log import SETTINGS, KafkaHouse

FEW = settings(
    max_examples=10,
    stateful_step_count=20,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


def test_any_steps_leave_the_log_as_the_lists_say(
    connection: KafkaConnection, topics: Topics, topic: MakeTopic
) -> None:
    """Members append, read, start at other offsets, purge and leave, while retention deletes records.

    Each run has a topic.
    """

    class KafkaLogMachine(LogMachine):
        def make_house(self) -> KafkaHouse:
            return KafkaHouse(connection, topics, topic(2, SETTINGS))

    run_state_machine_as_test(KafkaLogMachine, settings=FEW)
