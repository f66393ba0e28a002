"""The options of a harvester, with their defaults and help texts. This module imports no Kafka client."""

import math
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.election.rules import Timing
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.partitioner import Partitioner
from marshal_dagster.outbox.backoff import HarvestLimits


@dataclass(frozen=True, slots=True)
class HarvesterOptions:
    """The options of a harvester.

    Raises:
        ConfigurationError: A time is out of range, or librdkafka has no such partitioner.

    Example:
        ```python
        options = HarvesterOptions(limits=HarvestLimits(max_in_flight_records=5_000), poll_interval_s=1.0)
        ```
    """

    limits: HarvestLimits = field(default_factory=HarvestLimits)
    """The limits of a batch and of retries."""
    timing: Timing = field(default_factory=Timing)
    """The timing of the election."""
    poll_interval_s: float = 0.1
    """How often the harvester looks for rows, in seconds, if the database does not notify it."""
    transaction_timeout_s: float = 10.0
    """After this time, in seconds, the brokers abort the open transaction of a harvester that died.

    Until then, `read_committed` consumers wait for the transaction.
    """
    partitioner: Partitioner | str = Partitioner.MURMUR2_RANDOM
    """The librdkafka partitioner, which chooses the partition of a key; the default is that of Kafka's Java clients.

    All harvesters of an outbox need the same one: if the partition of a key changes, its records lose their order.
    """

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` if a value is invalid."""
        Partitioner.of(self.partitioner)
        for name in ("poll_interval_s", "transaction_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be above 0")


DEFAULT_OPTIONS: Final = HarvesterOptions()
NAME_TEXT: Final = "Name of the outbox, which is also the name of its table."
SCHEMA_TEXT: Final = "Schema of the table."
MAX_IN_FLIGHT_TEXT: Final = "Largest number of rows in a batch."
MAX_ATTEMPTS_TEXT: Final = "Number of attempts to publish a row before it is set aside."
TOPIC_PATIENCE_TEXT: Final = (
    "Shortest time to wait for a topic that cannot be written to before its rows are set aside."
)
PARTITIONER_TEXT: Final = (
    "librdkafka partitioner that chooses the partition of a key; the default is that of Kafka's Java clients. All "
    "harvesters of an outbox need the same one."
)
"""The descriptions of the options on the command line and in the resource."""
