"""Spark sessions: their settings on one machine, and what a session must fulfil before a batch trusts it.

A session is made by whoever likes to (`dagster_pyspark`, `start_session`, a cluster's own tools); the checks here say
in one line what is wrong with it.
"""

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.spark import connect
from marshal_dagster.spark.connector import CONNECTOR, EXCLUDES, connector_jars, fetch_connector
from marshal_dagster.spark.error_text import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINGLE_EXECUTION: Mapping[str, str] = {
    "spark.task.maxFailures": "1",
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "false",
    "spark.decommission.enabled": "false",
}
"""The settings under which no task of a session is run a second time; at most once needs them."""

# Of what a broken Avro record says, so much is believed before it is read: else seven bytes can take all memory.
_AVRO_LIMITS: Mapping[str, int] = {"string": 128 * 1024**2, "bytes": 128 * 1024**2, "collectionItems": 16 * 1024**2}
_JAVA_OPTIONS = " ".join(f"-Dorg.apache.avro.limits.{name}.maxLength={limit}" for name, limit in _AVRO_LIMITS.items())
_SPARK_RELEASE = "4.0"
_LOCAL_MASTER = re.compile(r"local(\[\s*([0-9]+|\*)\s*(,\s*([0-9]+)\s*)?\])?")
_LOOPBACK = "127.0.0.1"
_CONNECTOR_NAME = ":spark-sql-kafka-0-10_"
_FEWEST_SHUFFLE_PARTITIONS = 4
# Spark keeps consumers, and all that they have fetched, for minutes: of one topic after another that fills the heap of
# a warm session. Of the consumers it looks at ten at a time.
_IDLE_CONSUMERS: Mapping[str, str] = {
    "spark.kafka.consumer.cache.timeout": "10s",
    "spark.kafka.consumer.cache.evictorThreadRunInterval": "1s",
    "spark.kafka.consumer.fetchedData.cache.timeout": "1s",
    "spark.kafka.consumer.fetchedData.cache.evictorThreadRunInterval": "1s",
}
_DEFAULTS = {**SINGLE_EXECUTION, "spark.task.maxFailures": "4", "spark.stage.maxConsecutiveAttempts": "4"}

_fit: "WeakSet[SparkSession]" = WeakSet()
"""Sessions in this process that have passed `check_session`: what it looks at stays as it is."""
_sharing: "WeakKeyDictionary[SparkSession, bool]" = WeakKeyDictionary()
"""What `shares_consumers` has found."""
_SOURCE = "org.apache.spark.sql.kafka010.KafkaSourceProvider"


def spark_settings(
    *,
    app_name: str,
    connector: str = CONNECTOR,
    ivy_folder: str | os.PathLike[str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the settings of a session on this machine that can read Kafka.

    The connector's jars are those that `fetch_connector` has put into `ivy_folder` (by default one in the user's cache
    folder); where it has not, Spark fetches them there. `extra` overrides all but the connector, to which its own
    `spark.jars` and `spark.jars.packages` are added; naming another `spark.master` there drops what holds for one
    machine only.
    """
    wanted = dict(extra or {})
    folder = Path(ivy_folder) if ivy_folder else cache_folder()
    fetched = connector_jars(connector, folder)
    jars = [*map(str, fetched), *_listed(wanted.pop("spark.jars", ""))]
    packages = [*([] if fetched else [connector]), *_listed(wanted.pop("spark.jars.packages", ""))]
    excludes = [*EXCLUDES, *_listed(wanted.pop("spark.jars.excludes", ""))]
    settings = {
        "spark.app.name": app_name,
        "spark.master": "local[*]",
        **_joined({"spark.jars": jars, "spark.jars.packages": packages}),
        **(_joined({"spark.jars.excludes": excludes, "spark.jars.ivy": [str(folder / "ivy")]}) if packages else {}),
        "spark.driver.defaultJavaOptions": _JAVA_OPTIONS,
        "spark.executor.defaultJavaOptions": _JAVA_OPTIONS,
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **_IDLE_CONSUMERS,
    }
    if is_local(wanted.get("spark.master", "local")):
        settings |= {
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.driver.host": _LOOPBACK,
            "spark.sql.shuffle.partitions": str(max(_FEWEST_SHUFFLE_PARTITIONS, os.cpu_count() or 1)),
            # The batch is what is tried again here; a stage alone gains nothing, and at most once may not.
            "spark.stage.maxConsecutiveAttempts": "1",
        }
    return settings | wanted


def start_session(settings: Mapping[str, str]) -> "SparkSession":
    """Start a session with `settings`, or return the one that this process already has; then check it.

    The connector is fetched first where it is not there yet. Raises `ConfigurationError` when there is no fitting Java,
    or the session cannot be used (`check_session`), and `UnavailableError` when the connector cannot be fetched or
    Spark does not start.
    """
    from pyspark.sql import SparkSession

    find_java()
    settings = with_connector(settings)
    if is_local(settings.get("spark.master", "")):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        # Spark would take the first `python3` on the PATH, which has other packages or is another version.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except Exception as error:  # PySpark, Py4J and the operating system each raise their own
        raise UnavailableError(f"Spark does not start: {first_line(error)}") from error
    check_session(session)
    return session


def active_session(asked: str) -> "SparkSession":
    """Return this thread's session. Raises `ConfigurationError`, which says what is `asked` through it, if none is."""
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        raise ConfigurationError(
            f"{asked} is asked through Spark before the batch is read, and there is no session: start it before the "
            "batch is claimed, or give the sink `session`"
        )
    return session


def with_connector(settings: Mapping[str, str]) -> dict[str, str]:
    """Put the connector's jars, fetched now if need be, in the place of its coordinates.

    Raises `UnavailableError` when they cannot be fetched.
    """
    packages = _listed(settings.get("spark.jars.packages", ""))
    ours = [name for name in packages if _CONNECTOR_NAME in name]
    if not ours:
        return dict(settings)
    ivy = settings.get("spark.jars.ivy")
    jars = [str(jar) for name in ours for jar in fetch_connector(name, folder=Path(ivy).parent if ivy else None)]
    others = {name: value for name, value in settings.items() if name not in {"spark.jars", "spark.jars.packages"}}
    return others | _joined(
        {
            "spark.jars": [*jars, *_listed(settings.get("spark.jars", ""))],
            "spark.jars.packages": [name for name in packages if name not in ours],
        }
    )


def check_session(spark: "SparkSession") -> None:
    """Raise `ConfigurationError` unless this is a Spark 4.0 session that has the Kafka connector.

    One on a Spark Connect server gives up soon, from now on, when the server has died (`connect.give_up_early`). Raises
    `UnavailableError` when it has.
    """
    if spark in _fit:
        return
    is_remote = connect.is_connect(spark)
    if is_remote:
        connect.fail_fast_when_dead(spark)
    if not spark.version.startswith(f"{_SPARK_RELEASE}."):
        raise ConfigurationError(
            f"this session is Spark {spark.version}; marshal-dagster works with {_SPARK_RELEASE}: "
            + (f"start a server of Spark {_SPARK_RELEASE}" if is_remote else f"install pyspark~={_SPARK_RELEASE}.0")
        )
    try:
        # Resolved by the connector alone; no broker is asked.
        reader = spark.read.format("kafka").options(
            **{"kafka.bootstrap.servers": f"{_LOOPBACK}:1", "assign": '{"none":[0]}'}
        )
        reader.load().schema  # noqa: B018 - a Connect server is not asked before
    except Exception as error:  # a JVM's linkage errors too
        if is_remote and not connect.is_alive(spark):
            raise UnavailableError(f"{connect.ENDED} ({first_line(error)})") from error
        how = "the server" if is_remote else "it"
        where = "" if is_remote else ", as `spark_settings` does, in a process that has no session yet"
        raise ConfigurationError(
            f"this session has no working Kafka connector ({first_line(error)}): start {how} with "
            f"spark.jars.packages={CONNECTOR}{where}"
        ) from error
    if not is_remote:
        _fit.add(spark)


def check_single_execution(spark: "SparkSession") -> None:
    """Raise `ConfigurationError` when `spark` could run a task twice, as at most once must not.

    See protocol.md, section 6.

    On a cluster an executor that is lost for a reason outside the application (a machine switched off) is not covered
    by any setting: there the tasks themselves refuse a second attempt (`reading.run_once`). Of a Connect server all
    settings are asked for, whatever its master.
    """
    is_remote = connect.is_connect(spark)
    if is_remote:
        conf = connect.known_settings(spark, {**_DEFAULTS, "spark.master": ""})
        master = conf["spark.master"]
    else:
        master = str(spark.sparkContext.master)
        conf = dict(spark.sparkContext.getConf().getAll())
    wrong = [
        f"{name} is {value}, must be {SINGLE_EXECUTION[name]}"
        for name, default in _DEFAULTS.items()
        if (value := conf.get(name, default)) != SINGLE_EXECUTION[name]
        # On one machine the master alone says how often a task may fail, and there are no executors to lose.
        and (is_remote or not is_local(master) or name in {"spark.stage.maxConsecutiveAttempts", "spark.speculation"})
    ]
    if is_remote and connect.may_resend_statements(spark):
        wrong.append("the client repeats calls without reattachable execution")
    failures = _LOCAL_MASTER.fullmatch(master.strip())
    if failures and int(failures[4] or 1) > 1:
        wrong.insert(0, f"spark.master is {master}, must not name failures to allow (local[N])")
    if wrong:
        started = "the server" if is_remote else "it"
        raise ConfigurationError(
            f"at most once: this session may run a task more than once: {'; '.join(wrong)}. "
            f"Start {started} with these settings (marshal_dagster.spark.session.SINGLE_EXECUTION)"
        )


def runs_tasks_once(spark: "SparkSession") -> bool:
    """Say whether no task may fail twice, on a cluster: then none should run twice for another reason either."""
    failures = "spark.task.maxFailures"
    if connect.is_connect(spark):
        conf = connect.known_settings(spark, {"spark.master": "", failures: ""})
        return not is_local(conf["spark.master"]) and conf[failures] == "1"
    context = spark.sparkContext  # whose `getConf` asks the JVM for each setting there is
    return not is_local(str(context.master)) and context.getConf().get(failures) == "1"


def shares_consumers(spark: "SparkSession") -> bool:
    """Say whether a read may go on with the consumers of the one before: where what they fetched is soon forgotten.

    If not, a log that was truncated meanwhile would be read as it was before. A Connect server's consumers serve one
    client each, whose next batch seldom comes in time.
    """
    if connect.is_connect(spark):
        return False
    if spark not in _sharing:
        conf = dict(spark.sparkContext.getConf().getAll())
        _sharing[spark] = _IDLE_CONSUMERS.items() <= conf.items()
        if _sharing[spark]:
            _silence_the_source(spark)
    return _sharing[spark]


def _silence_the_source(spark: "SparkSession") -> None:
    """Spare each read a long warning: that consumers with a group id that was given may meet others in the group.

    These join none and commit nothing. The source's other warnings are of options that a batch does not use.
    """
    with suppress(Exception):  # a session with another way to log
        log4j = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr] # noqa: SLF001 - there is no public way
        log4j.core.config.Configurator.setLevel(_SOURCE, log4j.Level.ERROR)


def is_local(master: str) -> bool:
    """Say whether driver and executors are one process, by the master."""
    return _LOCAL_MASTER.fullmatch(master.strip()) is not None


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _joined(lists: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the lists as Spark writes them, without the empty ones."""
    return {name: ",".join(values) for name, values in lists.items() if values}
