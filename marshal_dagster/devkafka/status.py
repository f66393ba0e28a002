"""What a cluster of one machine tells about itself."""

from dataclasses import dataclass
from pathlib import Path

from marshal_dagster._internal.ports import HOST


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """One broker: its port, its process (None when none runs), whether it answers requests, and its log."""

    broker_id: int
    port: int
    pid: int | None
    ready: bool
    log: Path

    @property
    def address(self) -> str:
        """The `host:port` that clients connect to."""
        return f"{HOST}:{self.port}"


@dataclass(frozen=True, slots=True)
class KafkaStatus:
    """A cluster: its brokers (none, if the directory holds no cluster), and those that this call started."""

    directory: Path
    cluster_id: str | None
    brokers: tuple[BrokerStatus, ...]
    started: tuple[int, ...] = ()

    @property
    def bootstrap_servers(self) -> str:
        """All brokers' addresses, comma-separated, as clients take them; empty without brokers."""
        return ",".join(broker.address for broker in self.brokers)

    @property
    def is_up(self) -> bool:
        """Whether each broker of the cluster answers."""
        return bool(self.brokers) and all(broker.ready for broker in self.brokers)

    @property
    def is_running(self) -> bool:
        """Whether at least one broker process lives."""
        return any(broker.pid is not None for broker in self.brokers)
