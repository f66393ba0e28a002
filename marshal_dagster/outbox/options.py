"""How a harvester works, and what it does by default; to import it brings no Kafka client."""

import math
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.election.rules import Timing
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.partitioner import Partitioner
from marshal_dagster.outbox.backoff import HarvestLimits


@dataclass(frozen=True, slots=True)
class HarvesterOptions:
    """How a harvester works.

    All harvesters of an outbox need the same `partitioner`: a key whose partition changes has no order.

    Raises:
        ConfigurationError: a time is out of range, or Kafka's client does not know the partitioner.
    """

    limits: HarvestLimits = field(default_factory=HarvestLimits)
    timing: Timing = field(default_factory=Timing)
    poll_interval_s: float = 0.1
    """How soon rows are seen of which the database does not notify."""
    transaction_timeout_s: float = 10.0
    """After which brokers end the transaction of a harvester that is gone; consumers wait for it as long."""
    partitioner: Partitioner | str = Partitioner.MURMUR2_RANDOM

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for values that cannot be."""
        Partitioner.of(self.partitioner)
        for name in ("poll_interval_s", "transaction_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name}: {getattr(self, name)}; give a time above 0")


DEFAULT_OPTIONS: Final = HarvesterOptions()
NAME_TEXT: Final = "The outbox's name, which is its table's."
SCHEMA_TEXT: Final = "The schema that has the table."
MAX_IN_FLIGHT_TEXT: Final = "Rows in a batch, at most."
MAX_ATTEMPTS_TEXT: Final = "How often a row is tried before it is set aside."
TOPIC_PATIENCE_TEXT: Final = (
    "How long a topic that cannot be written to is waited for, at least, before its rows are set aside."
)
PARTITIONER_TEXT: Final = (
    "How a key's partition is chosen, as librdkafka names it; by default as Java's clients do. All harvesters of an "
    "outbox need the same one."
)
"""What the command line and the resource say of the options."""
