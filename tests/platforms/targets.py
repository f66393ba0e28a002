"""The versions that are tested, and the tests of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.packages import SparkBuild, delta_package


class Kind(StrEnum):
    """What a version is a version of."""

    SPARK = "spark"
    TUTORIAL = "tutorial"
    PYTHON = "python"
    DAGSTER = "dagster"
    BROKER = "broker"


@dataclass(frozen=True, slots=True)
class Feature:
    """What some versions lack."""

    name: str
    keyword: str
    """The part of a test's name, or of its file's, that all tests of the feature have in common."""


@dataclass(frozen=True, slots=True)
class Target:
    """A version, what is installed for it, and which tests run with it."""

    kind: Kind
    version: str
    requires: tuple[str, ...] = ()
    """Requirements that take the place of the locked versions."""
    python: str = "3.11"
    """The version of Python that runs the tests."""
    tests: tuple[str, ...] = ()
    """Pytest's arguments for the whole run."""
    short: tuple[str, ...] = ()
    """Pytest's arguments for the short run."""
    without_extras: frozenset[str] = frozenset()
    """Extras of the wheel that this version cannot have."""
    missing: Mapping[Feature, str] = field(default_factory=dict)
    """The features whose tests do not run, with the reason."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What else is not tested, with the reason."""

    @property
    def selection(self) -> tuple[str, ...]:
        """Pytest's arguments that leave out the tests of missing features."""
        keywords = " or ".join(feature.keyword for feature in self.missing)
        return ("-k", f"not ({keywords})") if keywords else ()

    @property
    def not_tested(self) -> dict[str, str]:
        """What is not tested, with the reason."""
        return {feature.name: why for feature, why in self.missing.items()} | dict(self.left_out)


VARIANTS: Final = Feature("variants", "variants")
PACKAGES: Final = {Feature("the sink for Delta Lake", "delta"): delta_package}
"""The features that need a package of their own, each with the function that finds the one for a Spark."""


_CLUSTER: Final = "tests/real/cluster/test_spark_cluster.py"
_DELTA: Final = "tests/real/test_sink_delta.py"
_TAKEOVER: Final = "tests/real/test_takeover_sinks.py"
_DECODING: Final = "tests/real/test_decoding.py"
_READER: Final = "tests/real/test_spark_reader.py"

SPARK_SHORT: Final = (
    f"{_READER}::test_rows_are_the_messages_at_exactly_these_offsets",
    f"{_TAKEOVER}::test_half_each_of_what_was_not_written",
    f"{_TAKEOVER}::test_a_session_whose_jvm_is_killed",
    f"{_DELTA}::test_a_managed_table_by_name",
    f"{_DECODING}::test_each_json_value_is_good_or_bad_for_a_reason",
    f"{_DECODING}::test_a_number_in_a_timestamp_is_seconds_or_bad",
    f"{_DECODING}::test_avro_of_several_schemas_is_read_by_one",
    f"{_DECODING}::test_protobuf_of_several_schemas_is_read_by_one",
    f"{_CLUSTER}::test_a_failing_task_is_not_retried_at_most_once",
)
"""Claim and read, each sink, a killed session whose batch is repeated, decoding, at most once's single execution."""
SPARK_TESTS: Final = (
    _READER,
    _DECODING,
    "tests/real/test_sink_spark.py::TestRules",
    "tests/real/test_sink_spark.py::test_files_keep_every_value",
    "tests/real/test_sink_spark.py::test_a_table_keeps_every_value",
    _DELTA,
    "tests/real/test_sink_kafka.py::test_rows_become_records",
    "tests/real/test_sink_kafka.py::test_a_process_killed_at_each_step",
    "tests/real/test_sink_kafka_tasks.py",
    "tests/real/test_sink_postgres_spark.py",
    "tests/real/test_sink_postgres_tasks.py",
    "tests/real/test_sink_mariadb_spark.py",
    "tests/real/test_spark_job_control.py",
    "tests/real/test_kafka_secured.py::test_spark_reads_through_tls_with_a_password",
    f"{_TAKEOVER}::test_half_each_of_what_was_not_written",
    f"{_TAKEOVER}::test_a_spark_process_killed_at_work",
    f"{_TAKEOVER}::test_a_session_whose_jvm_is_killed",
    f"{_TAKEOVER}::test_a_spark_process_killed_within_deltas_own_commit",
    f"{_CLUSTER}::test_a_session_with_retries_is_refused_at_most_once",
    f"{_CLUSTER}::test_a_task_that_is_lost_with_its_worker_is_not_run_again_at_most_once",
    f"{_CLUSTER}::test_a_failing_task_is_not_retried_at_most_once",
)
TUTORIAL_TESTS: Final = ("tests/real/test_examples.py",)
FAST_TESTS: Final = ("-m", "not thorough", "tests/fast", "--ignore", "tests/fast/test_import_contracts.py")
FAST_SHORT: Final = (
    *("-m", "not thorough"),
    *(
        f"tests/fast/test_{name}.py"
        for name in (
            *("batches", "claimer", "cli_main", "cli_status", "coordinator", "dagster_assets"),
            *("dagster_component", "dagster_ops", "dagster_resources", "decoding_protobuf", "extras"),
            *("kafka_connection", "outbox_harvester", "pipes", "processes", "scenarios", "sink_files"),
            *("sinks_pickled", "spark_session", "telemetry"),
        )
    ),
)
"""The fast tests of each part that depend most on the interpreter and its packages."""
BROKER_TESTS: Final = (
    "tests/real/test_race.py",
    "tests/real/test_batches.py::test_an_empty_topic",
    "tests/real/test_batches.py::test_kafkas_group_offsets",
    "tests/real/test_batches.py::test_transactions",
    "tests/real/test_batches.py::test_a_paused_group",
    "tests/real/test_admin.py::test_a_group_is_paused_repositioned_and_resumed",
    "tests/real/test_range_claims.py",
    "tests/real/test_outbox.py::test_rows_are_published_in_order",
    "tests/real/test_outbox.py::test_a_zombie_can_do_nothing",
    f"{_READER}::test_rows_are_the_messages_at_exactly_these_offsets",
    f"{_READER}::test_every_range_over_transactions",
)


def _spark(
    version: str,
    *,
    scala: str = "2.13",
    without: Sequence[str] = (),
    missing: Mapping[Feature, str] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Target:
    return Target(
        Kind.SPARK,
        version,
        (f"pyspark=={version}.*",),
        tests=SPARK_TESTS,
        short=SPARK_SHORT,
        without_extras=frozenset(without),
        missing={**missing_packages(SparkBuild(version, scala)), **(missing or {})},
        left_out=left_out or {},
    )


def _tutorial(spark: str, python: str, *, without: Sequence[str] = ()) -> Target:
    return Target(
        Kind.TUTORIAL,
        f"{spark}-python-{python}",
        (f"pyspark=={spark}.*",),
        python,
        TUTORIAL_TESTS,
        without_extras=frozenset(without),
    )


def missing_packages(build: SparkBuild) -> dict[Feature, str]:
    """Return the features whose package has no version for a Spark, with the reason."""
    missing = {}
    for feature, find in PACKAGES.items():
        try:
            find(build)
        except ConfigurationError:
            missing[feature] = f"no version for Spark {build.minor} is known"
    return missing


TARGETS: Final = (
    _spark(
        "3.5",
        scala="2.12",
        without=("connect",),
        missing={VARIANTS: "Spark has them from 4.0 on"},
        left_out={"Spark Connect": "its client has retry policies and progress from PySpark 4.0 on"},
    ),
    *(_spark(version) for version in ("4.0", "4.1", "4.2", "4.3")),
    _tutorial("3.5", "3.11", without=("connect",)),
    _tutorial("4.2", "3.13"),
    *(Target(Kind.PYTHON, version, (), version, FAST_TESTS, FAST_SHORT) for version in ("3.11", "3.12", "3.13")),
    Target(Kind.DAGSTER, "lowest", ("dagster=={lowest}",), tests=FAST_TESTS),
    Target(Kind.DAGSTER, "newest", ("dagster",), tests=FAST_TESTS),
    *(Target(Kind.BROKER, version, tests=BROKER_TESTS) for version in ("2.8.2", "3.5.2", "3.9.1", "4.3.1")),
)


def targets_of(kind: Kind, versions: Sequence[str] = ()) -> list[Target]:
    """Return the targets of a kind: all of them, or those of the versions."""
    found = [target for target in TARGETS if target.kind is kind]
    if not versions:
        return found
    known = {target.version: target for target in found}
    unknown = sorted(set(versions) - known.keys())
    if unknown:
        raise SystemExit(f"not a version of {kind}: {', '.join(unknown)}; known are {', '.join(known)}")
    return [known[version] for version in versions]
