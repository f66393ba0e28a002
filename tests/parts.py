"""The parts of the test suite: `make test PART=sinks` runs what a change of that part of the library can break.

Each file of tests belongs to at least one part. CI runs all of them.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "coordination": (
        "claim_watch",
        "claimer*",
        "cut_log*",
        "data_of_*",
        "go_groups",
        "heartbeats",
        "kill_points",
        "killed_processes",
        "log_*",
        "observer",
        "paused_collector",
        "race",
        "range_*",
        "rationalizer*",
        "reader_diff",
        "reference_reader",
        "scenarios",
        "seed_protocol/*",
        "settings_mismatch",
        "simulator",
        "snapshot*",
        "state_keys",
        "unread_records",
        "faults",
        "fault_*",
        "fuzz",
    ),
    "kafka": ("coordination_topic", "devkafka*", "java", "kafka*", "topic_names", "security", "upgrading"),
    "batches": (
        "batch*",
        "failing_records",
        "idempotence",
        "numbers_out_of_range",
        "open_plans",
        "pause_reason",
        "pipes",
        "record_search",
    ),
    "spark": (
        "avro_*",
        "decoding*",
        "arrow_tasks*",
        "executor*",
        "failing_records",
        "record_search",
        "session_settings",
        "spark_*",
        "task_secret",
    ),
    "sinks": (
        "column_names",
        "data_of_*",
        "database_dialect",
        "file_formats",
        "full_disk",
        "kill_points_sinks",
        "memory_sink",
        "pg_binary",
        "session_settings",
        "sink*",
        "source_headers",
        "takeover_sinks",
        "task_race*",
    ),
    "dagster": (
        "component",
        "dagster_*",
        "examples",
        "freshness_example",
        "plain_python",
        "postgres_tutorial",
        "quick_dagster",
        "run_in_memory",
        "telemetry",
        "testing_example",
    ),
    "operators": (
        "admin*",
        "cli_*",
        "disaster_recovery",
        "exporter*",
        "import_positions",
        "night",
        "observability",
        "prometheus",
        "timeline*",
    ),
    "outbox": ("cli_outbox", "dagster_outbox", "data_of_*", "election*", "elector", "fault_*", "outbox*"),
    "coordinator": (
        "assignment",
        "cli_coordinator",
        "coordinator*",
        "data_of_*",
        "dagster_group_membership",
        "fault_*",
        "fuzz",
    ),
    "repository": (
        "api_reference",
        "benchmarks",
        "check_*",
        "conditions",
        "containers",
        "configuration_reference",
        "demo",
        "diagrams",
        "docs",
        "docstring_examples",
        "error_reference",
        "extras",
        "import_contracts",
        "leftovers",
        "measured_figures",
        "page_blocks",
        "parts",
        "platforms",
        "processes",
        "protocol_page",
        "quick_disk",
        "release",
        "repository_checks",
        "shell_quoting",
        "stress",
        "test_services",
        "times",
    ),
}
"""The files of each part: their names without `test_` and `.py`, or a folder of files."""


def files_of(part: str, folder: str) -> list[Path]:
    """Return the files of a part in a folder of tests: `fast` or `real`."""
    patterns = (name.replace("/*", "/test_*.py") if "/" in name else f"**/test_{name}.py" for name in PARTS[part])
    return sorted({path for pattern in patterns for path in (FOLDER / folder).glob(pattern)})


def without_part(folder: str) -> list[Path]:
    """Return the files of a folder that belong to no part."""
    known = {path for part in PARTS for path in files_of(part, folder)}
    return sorted(set((FOLDER / folder).rglob("test_*.py")) - known)


def main(arguments: Sequence[str] | None = None) -> Iterable[Path]:
    """Return the files that the command's arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description="Prints the files of a part.")
    parser.add_argument("part", choices=PARTS, metavar="PART", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("folder", choices=("fast", "real"))
    requested = parser.parse_args(arguments)
    return files_of(requested.part, requested.folder)


if __name__ == "__main__":
    sys.stdout.write(" ".join(str(path.relative_to(FOLDER.parent)) for path in main()) + "\n")
