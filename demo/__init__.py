"""Demonstration of a whole deployment: real flights, a real Kafka, Dagster with its daemon, Spark, and a killed run.

`python -m demo` runs it, checks the result and writes `build/demo.json`. `python -m demo.dev` starts the Dagster UI for
the same deployment. None of this is in the wheel.
"""
