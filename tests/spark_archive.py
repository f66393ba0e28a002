"""A class data sharing (CDS) archive of Spark's classes, with which the JVMs of the tests start in half the time.

The archive is made once for each Java and PySpark, by a session that runs a few queries, and is kept in `build`, with
the compiled `QuickLocalFileSystem.java`. The tests make both if they are missing; `python -m tests.spark_archive` makes
them before.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pyspark

from marshal_dagster._internal.file_lock import locked
from marshal_dagster._internal.java import find_java

QUICK: Final = (
    *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:ReservedCodeCacheSize=256m"),
    "-Djdk.lang.Process.launchMechanism=VFORK",
)
"""Flags for a JVM that lives a few seconds: the second compiler and parallel collection cost more than they give.

With one compiler Java has 48 MB for compiled code. A session of Spark fills them in three minutes; Java then drops most
of the code, and compiles it again.

By default Java starts a process through a helper process; with `VFORK` it does not.
"""
_SOURCE: Final = Path(__file__).with_name("QuickLocalFileSystem.java")
"""Without its native library, which PySpark lacks, Hadoop starts `chmod` for each local file that it creates."""
_HADOOP_SETTINGS: Final = """<configuration>
<property><name>fs.file.impl</name><value>marshal.tests.QuickLocalFileSystem</value></property>
<property><name>fs.AbstractFileSystem.file.impl</name><value>marshal.tests.QuickLocalFileSystem$Contexts</value></property>
</configuration>
"""
_FOLDER: Final = Path(__file__).parent.parent / "build"
_SPARK_JARS: Final = Path(pyspark.__file__).parent / "jars"
_MADE_WITHIN_S: Final = 3_600
"""Only ends a run that hangs: a machine with a load of 20 on two cores needs more than five minutes."""
_QUERIES: Final = """
import sys
from pyspark.sql import SparkSession, functions

def query(spark, name):
    kinds = "id int, text string, numbers map<string, double>"
    rows = spark.createDataFrame([(1, "a", {"b": 1.5}), (2, None, {})], kinds)
    for kind in ("parquet", "json"):
        path = f"{sys.argv[1]}/{name}-{kind}"
        rows.repartition(2, "id").write.format(kind).save(path)
        spark.read.schema(rows.schema).format(kind).load(path).groupBy("id").agg(functions.max("text")).collect()
    rows.select(functions.udf(lambda text: text)("text")).collect()

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
query(spark, "compiled")
spark.conf.set("spark.sql.codegen.wholeStage", "false")
spark.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
query(spark, "interpreted")
spark.stop()
"""


def start_spark_quickly() -> None:
    """Set the environment so that Spark's JVMs, of this process and of those that it starts, start quickly."""
    # Java rejects an archive if the class path names a folder with files, such as one with Spark's defaults.
    os.environ.pop("SPARK_CONF_DIR", None)
    os.environ["SPARK_DIST_CLASSPATH"] = str(_quick_files())
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
    return _made("spark", ".jsa", _make_archive)


def _quick_files() -> Path:
    """Return a jar that Spark's JVMs have on their class path. It is made first if there is none."""
    return _made("quick-files", ".jar", _make_quick_files)


def _made(name: str, suffix: str, make: Callable[[Path], None]) -> Path:
    java = find_java()
    of_jvm = (str(java.executable.resolve()), java.version, str(_SPARK_JARS), version("pyspark"))
    parts = (*of_jvm, _HADOOP_SETTINGS, _SOURCE.read_text(), _QUERIES)
    path = _FOLDER / f"{name}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}{suffix}"
    with locked(path.with_suffix(".lock"), _MADE_WITHIN_S):
        if not path.exists():
            make(path)
    return path


def _make_quick_files(jar: Path) -> None:
    """Compile the source with the compiler that Spark ships."""
    jars = os.pathsep.join(map(str, _SPARK_JARS.glob("*.jar")))
    compiler = ("-cp", jars, "org.codehaus.commons.compiler.samples.CompilerDemo")
    with tempfile.TemporaryDirectory(dir=jar.parent) as folder:
        options = ("-classpath", jars, "-d", folder)
        command = [str(find_java().executable), *QUICK, *compiler, *options, str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MADE_WITHIN_S, check=False)
        classes = list(Path(folder).rglob("*.class"))
        assert classes, f"{_SOURCE.name} was not compiled: {done.stdout}{done.stderr}"
        made = Path(folder, jar.name)
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("core-site.xml", _HADOOP_SETTINGS)
            for path in classes:
                archive.write(path, path.relative_to(folder))
        made.replace(jar)


def _make_archive(archive: Path) -> None:
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
