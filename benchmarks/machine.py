"""Conditions of a run: time, commit, machine and versions."""

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import confluent_kafka
import psutil

from marshal_dagster._internal.java import find_java
from marshal_dagster.devkafka import KAFKA_VERSION
from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TOP: Final = Path(__file__).resolve().parent.parent
_MEASURED_CODE: Final = ("marshal_dagster", "benchmarks", "tests/log_generator.py", "tests/coordinator_world.py")
_BYTES_PER_GIB: Final = 2**30
_CPU_INFO: Final = Path("/proc/cpuinfo")


def conditions(sizes: "DataclassInstance") -> dict[str, Any]:
    """Return the conditions. Call this before the measurement, so that the load is that of other processes only."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": _uncommitted_changes(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(psutil.virtual_memory().total / _BYTES_PER_GIB, 1),
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
        "versions": _versions(),
        "sizes": asdict(sizes),
    }


def _versions() -> Mapping[str, str]:
    return {
        "python": platform.python_version(),
        "confluent-kafka": version("confluent-kafka"),
        "librdkafka": confluent_kafka.libversion()[0],
        "broker": KAFKA_VERSION,
        "spark": version("pyspark"),
        "dagster": version("dagster"),
        "java": _java(),
    }


def _java() -> str:
    try:
        return find_java().version
    except ConfigurationError:
        return "none"


def _processor() -> str:
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _uncommitted_changes() -> bool | None:
    """Return whether the measured code differs from the commit, or None if git fails."""
    changed = _git("status", "--porcelain", "--", *_MEASURED_CODE)
    return None if changed is None else bool(changed)


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=TOP, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
