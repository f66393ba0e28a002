"""What Spark runs in the tests of spark-submit: it works on batch after batch, in one session, with their function.

`submitted_script.py OUTPUT` does what the orders say that come, one after another, into the folder of the output.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Self

from marshal_dagster.batches.submitted import BATCH_VARIABLE, submitted_batch
from marshal_dagster.sinks import FileSink
from tests.real.batch_function import mark_when_at_work, values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Orders:
    """How to work on one batch: that of the environment, or of the folder `batch`.

    Once Spark is at work there is the file `mark`. With `goes_on` the script goes on when it fails.
    """

    output: str
    mark: str
    batch: str | None = None
    with_sink: bool = True
    slow_ms: int = 0
    goes_on: bool = False

    def write(self, folder: Path, number: int) -> None:
        """Give them to the script as its `number`th, whole."""
        (folder / "orders").write_text(json.dumps(asdict(self)))
        (folder / "orders").rename(folder / f"orders {number}")

    @classmethod
    def all_in(cls, folder: Path) -> Iterator[Self]:
        """Give one after another as they come."""
        for number in count(1):
            path = folder / f"orders {number}"
            while not path.exists():
                time.sleep(0.05)
            yield cls(**json.loads(path.read_text()))


def work(spark: "SparkSession", orders: Orders) -> None:
    """Work on one batch."""
    with submitted_batch(*([] if orders.batch is None else [{BATCH_VARIABLE: orders.batch}])) as batch:
        rows = values(batch.read(spark), orders.slow_ms)
        mark_when_at_work(spark, batch.batch_id, Path(orders.mark))
        if orders.with_sink:
            batch.write(FileSink(orders.output, format="json"), rows)
        else:
            rows.write.mode("append").json(orders.output)


def main() -> None:
    """Work, and say what became of each batch."""
    from pyspark.sql import SparkSession

    folder = Path(sys.argv[1]).parent
    spark = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    with (folder / "said").open("a", buffering=1) as said:
        for orders in Orders.all_in(folder):
            try:
                work(spark, orders)
            except Exception as error:
                while spark.sparkContext.statusTracker().getActiveJobsIds():
                    time.sleep(0.05)
                said.write(f"failed: {' '.join(str(error).split())}\n")
                if not orders.goes_on:
                    raise
            else:
                said.write("done\n")


if __name__ == "__main__":
    main()
