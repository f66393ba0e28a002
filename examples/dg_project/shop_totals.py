"""Show the orders of each shop in the output."""

from pathlib import Path

from marshal_dagster import FileSink, spark_settings, start_session

spark = start_session(spark_settings(app_name="totals"))
orders = FileSink(Path("data/orders").absolute()).read(spark)
orders.groupBy("shop").sum("count").show()
