"""The script of the spark-submit tests. It processes one batch after another in one session.

`submitted_script.py OUTPUT` reads orders from the parent folder of the output, one after another, and executes them.
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
    """How to process one batch: the batch in the environment, or the one in the folder `batch`.

    The script creates the file `mark` once Spark works on the batch. With `goes_on` it continues after a failure.
    """

    output: str
    mark: str
    batch: str | None = None
    with_sink: bool = True
    slow_ms: int = 0
    goes_on: bool = False

    def write(self, folder: Path, number: int) -> None:
        """Write the orders atomically to `folder`, as the script's `number`th."""
        (folder / "orders").write_text(json.dumps(asdict(self)))
        (folder / "orders").rename(folder / f"orders {number}")

    @classmethod
    def all_in(cls, folder: Path) -> Iterator[Self]:
        """Yield the orders in `folder` in sequence, and wait for each."""
        for number in count(1):
            path = folder / f"orders {number}"
            while not path.exists():
                time.sleep(0.05)
            yield cls(**json.loads(path.read_text()))


def work(spark: "SparkSession", orders: Orders) -> None:
    """Process one batch."""
    with submitted_batch(*([] if orders.batch is None else [{BATCH_VARIABLE: orders.batch}])) as batch:
        rows = values(batch.read(spark), orders.slow_ms)
        mark_when_at_work(spark, batch.batch_id, Path(orders.mark))
        if orders.with_sink:
            batch.write(FileSink(orders.output, format="json"), rows)
        else:
            rows.write.mode("append").json(orders.output)


def main() -> None:
    """Process all batches and report the result of each."""
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
