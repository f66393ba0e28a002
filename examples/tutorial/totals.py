"""Show the orders of each shop in the output."""

from shop import sink

from marshal_dagster import spark_settings, start_session

spark = start_session(spark_settings(app_name="totals"))
sink.read(spark).groupBy("shop").sum("count").show()
