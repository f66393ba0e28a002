"""The main job, shown whole: real flights, a real Kafka, Dagster with its daemon, Spark, and a run that is killed.

`python -m demo` proves it and says so in `build/demo.json`; `python -m demo.dev` opens the Dagster UI on the same
deployment. Not in the wheel.
"""
