"""The supported versions: of Spark, Python, Dagster and the brokers, each tested in an environment of its own.

`targets` lists them with their tests, `environments` installs what they need in `build/platforms`, `brokers` starts a
Kafka of a version, `results` keeps one row for each run, and `page` writes `docs/reference/platforms.md` from the rows.
"""
