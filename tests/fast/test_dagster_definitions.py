"""Check the deployable code location: its definitions, and that loading them needs no service."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

import definitions

ROOT = Path(__file__).resolve().parents[2]


def _validate(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Validate the workspace in a process that finds no Java and no Kafka."""
    no_java = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    return subprocess.run(
        [sys.executable, "-m", "dagster", "definitions", "validate", "-w", "workspace.yaml"],
        cwd=ROOT,
        env={**no_java, "PATH": str(tmp_path), "DAGSTER_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
def test_the_code_location_loads_without_kafka_and_java(tmp_path: Path) -> None:
    """`dagster definitions validate` succeeds without Kafka and Java, and starts neither."""
    reported = _validate(tmp_path, MARSHAL_BOOTSTRAP_SERVERS="127.0.0.1:9")
    assert reported.returncode == 0, reported.stderr
    assert "All code locations passed validation" in reported.stderr + reported.stdout


@pytest.mark.thorough
def test_a_wrong_variable_is_named_when_the_location_is_loaded(tmp_path: Path) -> None:
    """The error names the wrong environment variable and shows which values are accepted."""
    reported = _validate(tmp_path, MARSHAL_MAX_RECORDS="many")
    assert reported.returncode != 0
    assert "MARSHAL_MAX_RECORDS is 'many'; it must be a whole number of at least 1" in reported.stderr + reported.stdout


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")  # Dagster warns when it copies a sensor
def test_the_deployment_is_a_schedule_a_sensor_and_jobs() -> None:
    """The job runs each minute by schedule; the sensor runs every 5 s and requests the reprocessing job.

    Other jobs pause, resume and reposition the group, and revoke the claims of dead runs.
    """
    repository = definitions.defs.get_repository_def()
    assert {job.name for job in repository.get_all_jobs()} >= {
        "flights",
        "reprocess_flights",
        "pause_flights",
        "resume_flights",
        "set_flights_position",
        "import_flights_positions",
        "reprocess_flights_range",
        "revoke_flights",
    }
    (schedule,), (sensor,) = repository.schedule_defs, repository.sensor_defs
    assert (schedule.cron_schedule, schedule.job.name) == ("* * * * *", "flights")
    assert (sensor.minimum_interval_seconds, [target.job_name for target in sensor.targets]) == (
        5,
        ["reprocess_flights"],
    )
    assert {sensor.default_status, schedule.default_status} == {
        dg.DefaultSensorStatus.RUNNING,
        dg.DefaultScheduleStatus.RUNNING,
    }


def test_both_resources_are_of_one_cluster_and_log() -> None:
    """The sensor reads the coordination log to which the runs write."""
    assert definitions.defs.resources is not None
    claimer, rationalizer = (definitions.defs.resources[name] for name in ("claimer", "rationalizer"))
    assert claimer.coordination_topic == rationalizer.coordination_topic
    assert claimer.connection == rationalizer.connection
    assert claimer.coordination_connection is None
