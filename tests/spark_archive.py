"""A class data sharing (CDS) archive of Spark's classes, with which the JVMs of the tests start in half the time.

The archive is made once for each Java and PySpark, by a session that runs a few queries, and is kept in `build`. The
tests make it if it is missing; `python -m tests.spark_archive` makes it before.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

from marshal_dagster._internal.file_lock import locked
from marshal_dagster._internal.java import find_java

QUICK: Final = (
    *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:ReservedCodeCacheSize=256m"),
    "-Djdk.lang.Process.launchMechanism=VFORK",
)
"""Flags for a JVM that lives a few seconds: the second compiler and parallel collection cost more than they give.

With one compiler Java has 48 MB for compiled code. A session of Spark fills them in three minutes; Java then drops most
of the code, and compiles it again.

Without its native library, which PySpark does not have, Hadoop starts `chmod` for each local file that it creates. By
default Java first starts a helper process, which then becomes `chmod`; with `VFORK` it does not.
"""
_FOLDER: Final = Path(__file__).parent.parent / "build"
_MADE_WITHIN_S: Final = 3_600
"""Only ends a run that hangs: a machine with a load of 20 on two cores needs more than five minutes."""
_QUERIES: Final = """
import sys
from pyspark.sql import SparkSession, functions

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.createDataFrame([(1, "a", {"b": 1.5}), (2, None, {})], "id int, text string, numbers map<string, double>")
for kind in ("parquet", "json"):
    path = f"{sys.argv[1]}/{kind}"
    rows.repartition(2, "id").write.format(kind).save(path)
    spark.read.schema(rows.schema).format(kind).load(path).groupBy("id").agg(functions.max("text")).collect()
spark.stop()
"""


def start_spark_quickly() -> None:
    """Set the environment so that Spark's JVMs, of this process and of those that it starts, start quickly."""
    # Java rejects an archive if the class path names a folder with files, such as one with Spark's defaults.
    os.environ.pop("SPARK_CONF_DIR", None)
    crash = f"-XX:ErrorFile={_FOLDER / 'jvm-crash-%p.log'}"
    flags = shlex.join([*QUICK, f"-XX:SharedArchiveFile={_archive()}", "-Xshare:auto", "-Xlog:cds*=off", crash])
    os.environ |= {
        "SPARK_LAUNCHER_OPTS": shlex.join(QUICK),
        "SPARK_SUBMIT_OPTS": flags,
        "SPARK_DAEMON_JAVA_OPTS": flags,
    }


def jvm_crash_log(pid: int) -> Path:
    """Return the file in which a JVM of Spark explains its crash."""
    return _FOLDER / f"jvm-crash-{pid}.log"


def _archive() -> Path:
    """Return the archive. It is made first if there is none."""
    java = find_java()
    parts = (str(java.executable.resolve()), java.version, version("pyspark"))
    archive = _FOLDER / f"spark-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}.jsa"
    with locked(archive.with_suffix(".lock"), _MADE_WITHIN_S):
        if not archive.exists():
            _make(archive)
    return archive


def _make(archive: Path) -> None:
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder, archive.name)
        flags = shlex.join([*QUICK, f"-XX:ArchiveClassesAtExit={made}"])
        done = subprocess.run(
            [sys.executable, "-c", _QUERIES, folder],
            env=os.environ | {"SPARK_SUBMIT_OPTS": flags},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MADE_WITHIN_S,
            check=False,
        )
        assert made.exists(), f"no archive of Spark's classes was made: {done.stdout}{done.stderr}"
        made.replace(archive)


if __name__ == "__main__":
    start_spark_quickly()
