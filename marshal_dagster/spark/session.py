"""Spark sessions: the settings of a local session, and the checks that a session must pass before a batch uses it.

Any tool can start the session: `start_session`, `dagster_pyspark` or a cluster's own tools. A failed check raises a
one-line error.
"""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.spark import connect
from marshal_dagster.spark.connector import EXCLUDES, connector_jars, fetch_connector
from marshal_dagster.spark.conversion_settings import GREGORIAN_DATES
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.packages import find_spark, kafka_package, minor_version, session_build
from marshal_dagster.spark.task_attempts import check_attempts_are_shown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

SINGLE_EXECUTION: Mapping[str, str] = {
    "spark.task.maxFailures": "1",
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "false",
    "spark.decommission.enabled": "false",
}
"""The settings with which Spark runs no task a second time. `at_most_once` needs them."""

# Limits for the lengths that an Avro record claims. Without them a broken record of seven bytes can use all memory.
_AVRO_LIMITS: Mapping[str, int] = {"string": 128 * 1024**2, "bytes": 128 * 1024**2, "collectionItems": 16 * 1024**2}
_JAVA_OPTIONS = " ".join(f"-Dorg.apache.avro.limits.{name}.maxLength={limit}" for name, limit in _AVRO_LIMITS.items())
_DRIVER_OPTIONS, _EXECUTOR_OPTIONS = "spark.driver.defaultJavaOptions", "spark.executor.defaultJavaOptions"
JAVA_VARIABLES = ("SPARK_SUBMIT_OPTS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")
"""Environment variables with options for the JVM of a local session."""
_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_LOG_FILE = re.compile(r"log4j2(-test)?\.(properties|ya?ml|jso?n|xml)")
_REPOSITORIES = frozenset({"spark.jars.repositories", "spark.jars.ivySettings"})
_LOCAL_MASTER = re.compile(r"local(\[\s*([0-9]+|\*)\s*(,\s*([0-9]+)\s*)?\])?")
_LOOPBACK = "127.0.0.1"
_CONNECTOR_NAME = ":spark-sql-kafka-0-10_"
_FEWEST_SHUFFLE_PARTITIONS = 4
# By default Spark caches consumers and the records that they fetched for minutes. In a warm session that processes many
# topics this fills the heap. The evictor examines ten consumers at a time, so it has to run often.
_IDLE_CONSUMERS: Mapping[str, str] = {
    "spark.kafka.consumer.cache.timeout": "10s",
    "spark.kafka.consumer.cache.evictorThreadRunInterval": "1s",
    "spark.kafka.consumer.fetchedData.cache.timeout": "1s",
    "spark.kafka.consumer.fetchedData.cache.evictorThreadRunInterval": "1s",
}
_DEFAULTS = {**SINGLE_EXECUTION, "spark.task.maxFailures": "4", "spark.stage.maxConsecutiveAttempts": "4"}

_fit: "WeakSet[SparkSession]" = WeakSet()
"""Sessions of this process that have passed `check_session`, whose result does not change."""
_sharing: "WeakKeyDictionary[SparkSession, bool]" = WeakKeyDictionary()
"""The results of `shares_consumers`."""
_SOURCE = "org.apache.spark.sql.kafka010.KafkaSourceProvider"


def spark_settings(
    *,
    app_name: str,
    connector: str | None = None,
    ivy_folder: str | os.PathLike[str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the settings of a session on this machine that can read Kafka.

    If the connector's jars are not downloaded yet, the settings let Spark fetch them.

    Args:
        app_name: The name of the application, shown on Spark's pages.
        connector: Maven coordinates of the Kafka connector (default: the one for the installed Spark).
        ivy_folder: The folder of the connector's jars (default: in the user's cache folder).
        extra: Settings that replace or extend the defaults. `spark.jars` and `spark.jars.packages` are added to the
            connector's, and `defaultJavaOptions` of driver and executors to the limits for Avro. With another
            `spark.master` than `local`, the settings for one machine are left out. Among these are settings of the
            JVM's log, unless the folder of Spark's configuration has a `log4j2` file or Java's options name one.

    Returns:
        The settings, for `start_session` or `SparkSession.builder`.

    Raises:
        ConfigurationError: Spark is not installed, or no connector is known for its version.

    Example:
        ```python
        session = start_session(spark_settings(app_name="shops", extra={"spark.driver.memory": "4g"}))
        ```
    """
    wanted = dict(extra or {})
    connector = kafka_package() if connector is None else connector
    folder = Path(ivy_folder) if ivy_folder else cache_folder()
    fetched = connector_jars(connector, folder)
    jars = [*map(str, fetched), *_listed(wanted.pop("spark.jars", ""))]
    packages = [*([] if fetched else [connector]), *_listed(wanted.pop("spark.jars.packages", ""))]
    excludes = [*EXCLUDES, *_listed(wanted.pop("spark.jars.excludes", ""))]
    options = {name: f"{_JAVA_OPTIONS} {wanted.pop(name, '')}".strip() for name in (_DRIVER_OPTIONS, _EXECUTOR_OPTIONS)}
    settings = {
        "spark.app.name": app_name,
        "spark.master": "local[*]",
        **_joined({"spark.jars": jars, "spark.jars.packages": packages}),
        **(_joined({"spark.jars.excludes": excludes, "spark.jars.ivy": [str(folder / "ivy")]}) if packages else {}),
        **options,
        "spark.sql.session.timeZone": "UTC",
        **GREGORIAN_DATES,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **_IDLE_CONSUMERS,
    }
    if is_local(wanted.get("spark.master", "local")):
        settings |= {
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.driver.host": _LOOPBACK,
            "spark.sql.shuffle.partitions": str(max(_FEWEST_SHUFFLE_PARTITIONS, os.cpu_count() or 1)),
            # Runs retry whole batches. Retrying a stage gains nothing, and at_most_once forbids it.
            "spark.stage.maxConsecutiveAttempts": "1",
        }
        user_options = (settings[_DRIVER_OPTIONS], wanted.get("spark.driver.extraJavaOptions", ""))
        if not _has_log_settings(user_options) and _LOG_SETTINGS.is_file():  # it is no file in an archive
            settings[_DRIVER_OPTIONS] += f" -Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}"
    return settings | wanted


def _has_log_settings(options: Iterable[str]) -> bool:
    """Return whether `options` of Java or the environment name a log4j2 file, or Spark's configuration has one."""
    from_environment = (os.environ.get(name, "") for name in JAVA_VARIABLES)
    if "LOG4J_CONFIGURATION_FILE" in os.environ or any(
        "configurationFile" in text for text in (*options, *from_environment)
    ):
        return True
    home, named = find_spark(), os.environ.get("SPARK_CONF_DIR")
    folder = Path(named) if named else home and home / "conf"
    return folder is not None and any(_LOG_FILE.fullmatch(file.name) for file in folder.glob("log4j2*"))


def start_session(settings: Mapping[str, str]) -> "SparkSession":
    """Start a session with `settings`, or return the session that this process already has; then check it.

    The connector is downloaded first if it is missing.

    Args:
        settings: The settings, usually those of `spark_settings`.

    Returns:
        The session.

    Raises:
        ConfigurationError: There is no suitable Java, or the session is unsuitable (`check_session`).
        UnavailableError: The connector cannot be downloaded, or Spark does not start.

    Example:
        ```python
        session = start_session(spark_settings(app_name="shops"))
        ```
    """
    require_extra(Extra.SPARK, "a Spark session")
    from pyspark.sql import SparkSession

    find_java()
    settings = with_connector(settings)
    if is_local(settings.get("spark.master", "")):
        _prepare_local_process()
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _startup_errors():
        session = builder.getOrCreate()
    check_session(session)
    return session


def session_of_resource(resource: object) -> "SparkSession":
    """Return the session of a Dagster resource, such as a `LazyPySparkResource`, which may start it now.

    Args:
        resource: The resource. For a local session of a `LazyPySparkResource` this process is prepared first.

    Returns:
        The session. Reading a batch checks it (`check_session`).

    Raises:
        AttributeError: The resource has no `spark_session`.
        ConfigurationError: There is no suitable Java.
        UnavailableError: Spark does not start.
    """
    _prepare_lazy_session(resource)
    with _startup_errors():
        return resource.spark_session  # type: ignore[attr-defined, no-any-return] # each kind of resource has its own class


@contextmanager
def _startup_errors() -> Iterator[None]:
    """Raise `UnavailableError` with one line if Spark does not start.

    PySpark 4.3 imports its testing helpers at the start, which warn of pandas 3 whether pandas is used or not. A later
    use of pandas warns again.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
            yield
    except (MarshalError, AttributeError):
        raise
    except Exception as error:  # PySpark, Py4J and the operating system have their own types
        raise UnavailableError(
            f"Spark does not start: {first_line(error)}. Check the settings of the session and its Java"
        ) from error


def _prepare_lazy_session(resource: object) -> None:
    """Prepare this process for a local session. Other resources, and a master elsewhere, need no preparation."""
    settings, started = getattr(resource, "spark_config", None), getattr(resource, "_spark_session", None)
    if started is not None or not isinstance(settings, Mapping):
        return
    nested = settings.get("spark")
    master = settings.get("spark.master") or (nested.get("master") if isinstance(nested, Mapping) else None)
    if is_local(str(master or "local")):
        find_java()
        _prepare_local_process()
        if isinstance(settings, dict) and not _REPOSITORIES & settings.keys():
            _use_connector(settings)


def _use_connector(settings: dict[str, Any]) -> None:
    """Put the connector's jars into the settings of a lazy session, and download them first if necessary.

    Spark would download them without a lock, and print a report of a hundred lines. Without a network it can still
    have them from another session, so it tries if this library cannot.
    """
    try:
        fetched = with_connector(settings)
    except UnavailableError as error:
        logger.warning("Spark downloads its Kafka connector itself, because this library cannot: %s", error)
        return
    settings.update(fetched)  # never empty, because another thread may start the session
    for name in settings.keys() - fetched.keys():
        del settings[name]


def _prepare_local_process() -> None:
    os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    # Spark would use the first `python3` on the PATH, which may have another version or other packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def active_session(asked: str) -> "SparkSession":
    """Return this thread's session. Raises `ConfigurationError` if there is none; `asked` describes what needs it."""
    require_extra(Extra.SPARK, asked)
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        raise ConfigurationError(
            f"{asked} is queried through Spark before the batch is read, but there is no Spark session: start one "
            "before the batch is claimed, or pass `session` to the sink"
        )
    return session


def with_connector(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with the connector's jars instead of its coordinates; download the jars if necessary.

    Raises `UnavailableError` if they cannot be downloaded.
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
    """Raise `ConfigurationError` unless PySpark fits the session's Spark, and the Kafka connector works in it.

    In a session on a Spark Connect server, calls to a dead server fail fast from now on
    (`connect.fail_fast_when_dead`). Raises `UnavailableError` if the server has died.
    """
    if spark in _fit:
        return
    is_remote = connect.is_connect(spark)
    if is_remote:
        connect.fail_fast_when_dead(spark)
    else:
        _check_pyspark(spark)
    try:
        # The connector alone resolves this; it contacts no broker.
        reader = spark.read.format("kafka").options(
            **{"kafka.bootstrap.servers": f"{_LOOPBACK}:1", "assign": '{"none":[0]}'}
        )
        reader.load().schema  # noqa: B018 - a Connect server is not contacted before this
        is_old = is_remote and not connect.has_newest_function(spark)
    except Exception as error:  # also linkage errors of the JVM
        if is_remote and not connect.is_alive(spark):
            raise UnavailableError(f"{connect.ENDED} ({first_line(error)})") from error
        how = "the server" if is_remote else "it"
        where = "" if is_remote else ", as `spark_settings` does, in a process that has no session yet"
        raise ConfigurationError(
            f"this session has no working Kafka connector ({first_line(error)}): start {how} with "
            f"spark.jars.packages={kafka_package(session_build(spark))}{where}"
        ) from error
    if is_old:
        raise ConfigurationError(
            f"the Spark Connect server is Spark {spark.version}: use one of Spark {connect.FIRST_RELEASE} or newer"
        )
    if not is_remote:
        _fit.add(spark)


def _check_pyspark(spark: "SparkSession") -> None:
    """Raise `ConfigurationError` if PySpark is of another version than the session's Spark, whose methods it calls."""
    from pyspark import __version__ as installed

    release = minor_version(spark.version)
    if release != minor_version(installed):
        raise ConfigurationError(
            f"this session is Spark {spark.version}, but PySpark is {installed}: install pyspark=={release}.*, or "
            "unset SPARK_HOME if it names another Spark"
        )


def check_single_execution(spark: "SparkSession") -> None:
    """Raise `ConfigurationError` if `spark` may run a task twice, which `at_most_once` forbids.

    See protocol.md, section 6.

    No setting covers a lost machine of a cluster. There the tasks themselves reject a second attempt
    (`reader.run_once`). A Connect server must have all settings, even with a local master.
    """
    is_remote = connect.is_connect(spark)
    if is_remote:
        conf = connect.known_settings(spark, {**_DEFAULTS, "spark.master": ""})
        master = conf["spark.master"]
    else:
        master = str(spark.sparkContext.master)
        if not is_local(master):
            check_attempts_are_shown(spark)
        conf = dict(spark.sparkContext.getConf().getAll())
    wrong = [
        f"{name} is {value}, must be {SINGLE_EXECUTION[name]}"
        for name, default in _DEFAULTS.items()
        if (value := conf.get(name, default)) != SINGLE_EXECUTION[name]
        # On one machine only the master defines how often a task may fail, and there are no executors to lose.
        and (is_remote or not is_local(master) or name in {"spark.stage.maxConsecutiveAttempts", "spark.speculation"})
    ]
    if is_remote and connect.may_resend_statements(spark):
        wrong.append("the client repeats calls without reattachable execution")
    failures = _LOCAL_MASTER.fullmatch(master.strip())
    if failures and int(failures[4] or 1) > 1:
        wrong.insert(0, f"spark.master is {master}, must not set a number of allowed failures (use local[N])")
    if wrong:
        started = "the server" if is_remote else "it"
        raise ConfigurationError(
            f"at_most_once: this session may run a task more than once: {'; '.join(wrong)}. "
            f"Start {started} with these settings (marshal_dagster.spark.session.SINGLE_EXECUTION)"
        )


def runs_tasks_once(spark: "SparkSession") -> bool:
    """Return whether the session is on a cluster and allows no task to fail twice.

    Then no task may run twice for another reason either, and `run_once` protects its frames.
    """
    failures = "spark.task.maxFailures"
    if connect.is_connect(spark):
        conf = connect.known_settings(spark, {"spark.master": "", failures: ""})
        return not is_local(conf["spark.master"]) and conf[failures] == "1"
    context = spark.sparkContext  # read once, because `getConf` calls the JVM for each setting
    return not is_local(str(context.master)) and context.getConf().get(failures) == "1"


def shares_consumers(spark: "SparkSession") -> bool:
    """Return whether a read may use the consumers of the previous read.

    The session must discard their fetched records soon. Otherwise it could return records that a truncation of the
    topic has removed in the meantime. On a Connect server the answer is False: each client has its own consumers, and
    its next batch rarely comes in time.
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
    """Suppress a long warning of each read about consumers with a fixed group id.

    The consumers join no group and commit nothing. The other warnings of Spark's Kafka source are about options that a
    batch does not use.
    """
    with suppress(Exception):  # a session with another logging library
        log4j = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr] # noqa: SLF001 - there is no public name
        log4j.core.config.Configurator.setLevel(_SOURCE, log4j.Level.ERROR)


def is_local(master: str) -> bool:
    """Return whether driver and executors are one process, by the URL of the master."""
    return _LOCAL_MASTER.fullmatch(master.strip()) is not None


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _joined(lists: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the lists as values of Spark settings, without the empty ones."""
    return {name: ",".join(values) for name, values in lists.items() if values}
