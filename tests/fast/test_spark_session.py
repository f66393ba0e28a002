"""Spark sessions without a JVM: their settings, and which sessions are rejected."""

import fcntl
import json
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock, Mock
from urllib.parse import unquote

import pyspark
import pytest

from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.spark import session, task_attempts
from marshal_dagster.spark.connector import connector_jars, fetch_connector
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.interrupts import changed_settings
from marshal_dagster.spark.packages import SparkBuild, avro_package, delta_package, iceberg_package, kafka_package
from marshal_dagster.spark.session import (
    SINGLE_EXECUTION,
    check_session,
    check_single_execution,
    spark_settings,
)
from marshal_dagster.spark.task_attempts import AttemptSource
from tests.session_settings import frames_module, show_frames_without_jvm


def test_settings_for_one_machine(tmp_path: Path) -> None:
    """A session binds to loopback, has no web page and uses UTC. It loads the connector without PySpark's own jars."""
    settings = spark_settings(app_name="flights", ivy_folder=tmp_path)
    assert settings["spark.app.name"] == "flights"
    assert settings["spark.master"] == "local[*]"
    assert settings["spark.driver.bindAddress"] == settings["spark.driver.host"] == "127.0.0.1"
    assert settings["spark.ui.enabled"] == "false"
    assert settings["spark.sql.session.timeZone"] == "UTC"
    for process in ("driver", "executor"):
        assert settings[f"spark.{process}.defaultJavaOptions"].count("-Dorg.apache.avro.limits.") == 3
    assert settings["spark.jars.packages"] == kafka_package()
    assert "hadoop-client-runtime" in settings["spark.jars.excludes"]
    assert "spark.jars" not in settings
    assert all(isinstance(value, str) for value in settings.values())


@pytest.fixture
def log_settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Return a function that finds the file with the settings of the JVM's log in the settings of a session."""
    for name in ("SPARK_HOME", "SPARK_CONF_DIR", *session.JAVA_VARIABLES):
        monkeypatch.delenv(name, raising=False)

    def file_in_settings(**extra: str) -> str | None:
        options = spark_settings(app_name="flights", extra=extra)["spark.driver.defaultJavaOptions"]
        found = re.search(r"-Dlog4j2\.configurationFile=file://(\S+)", options)
        return found and unquote(found[1])

    return file_in_settings


def test_the_log_of_a_local_session_has_settings(
    log_settings: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file that the JVM is to read exists. If this library is in an archive, there is no file."""
    found = log_settings()
    assert found is not None
    assert "rootLogger.level = warn" in Path(found).read_text()
    assert log_settings(**{"spark.master": "spark://host:7077"}) is None
    monkeypatch.setattr(session, "_LOG_SETTINGS", tmp_path / "library.zip" / "log4j2.properties")
    assert log_settings() is None


@pytest.mark.parametrize("file", ["log4j2.properties", "log4j2.xml", "log4j2.yaml", "log4j2.json", "log4j2-test.yml"])
@pytest.mark.parametrize("where", ["SPARK_HOME", "SPARK_CONF_DIR", "pyspark"])
def test_a_file_of_the_user_has_the_settings_of_the_log(
    log_settings: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, file: str
) -> None:
    """It may have any form that the JVM finds in the folder of Spark's configuration, be it PySpark's own."""
    folder = tmp_path / "conf"
    folder.mkdir()
    if where == "pyspark":
        monkeypatch.setattr(session, "find_spark", lambda: tmp_path)
    else:
        monkeypatch.setenv(where, str(tmp_path if where == "SPARK_HOME" else folder))
    (folder / "log4j2.properties.template").touch()
    assert log_settings() is not None
    (folder / file).touch()
    assert log_settings() is None


def test_options_of_the_user_name_the_settings_of_the_log(
    log_settings: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's options are in force, whichever of their two names and places they have."""
    for name in ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions"):
        assert log_settings(**{name: "-Dlog4j.configurationFile=file:/a.xml"}) is None
        assert log_settings(**{name: "-Da=b"}) is not None
    for name in session.JAVA_VARIABLES:
        monkeypatch.setenv(name, "-Dlog4j2.configurationFile=/a.xml")
        assert log_settings() is None
        monkeypatch.delenv(name)


def test_options_of_the_user_keep_the_limits_of_avro() -> None:
    """The user's options of Java come after the limits, so they may change them, but do not remove them."""
    names = [f"spark.{process}.defaultJavaOptions" for process in ("driver", "executor")]
    settings = spark_settings(app_name="flights", extra=dict.fromkeys(names, "-XX:+UseZGC"))
    for name in names:
        assert settings[name].count("-Dorg.apache.avro.limits.") == 3
        assert settings[name].rindex("-Dorg.apache.avro.limits.") < settings[name].index("-XX:+UseZGC")


@pytest.mark.parametrize(
    ("thread", "is_first"),
    [
        ("Thread[Executor task launch worker for task 10.0 in stage 3.0 (TID 4),5,main]", True),
        ("Thread[#31,Executor task launch worker for task 0.0 in stage 20.0 (TID 0),5,main]", True),
        ("Thread[Executor task launch worker for task 10.1 in stage 3.0 (TID 4),5,main]", False),
        ("Thread[Executor task launch worker for task 0.10 in stage 3.0 (TID 4),5,main]", False),
        ("Thread[Executor task launch worker for task 0.0 in stage 3.1 (TID 4),5,main]", False),
        ("Thread[Executor task launch worker for task 0.0 in stage 0.10 (TID 4),5,main]", False),
        ("Thread[main,5,main]", False),
    ],
)
def test_the_first_attempt_of_a_task_is_known_by_its_thread(thread: str, *, is_first: bool) -> None:
    """The first attempt of a task is recognised by Spark's name for its thread."""
    assert bool(re.search(task_attempts.FIRST_ATTEMPT, thread)) is is_first


def test_extra_settings_come_first_and_packages_add_up(tmp_path: Path) -> None:
    """A user's settings override the defaults, and further packages are added to the connector."""
    extra = {"spark.ui.enabled": "true", "spark.jars.packages": "a:b:1, c:d:2", "spark.jars.excludes": "e:f"}
    settings = spark_settings(app_name="x", connector="g:h:3", ivy_folder=tmp_path, extra=extra)
    assert settings["spark.ui.enabled"] == "true"
    assert settings["spark.jars.packages"] == "g:h:3,a:b:1,c:d:2"
    assert settings["spark.jars.excludes"].endswith(",e:f")
    assert settings["spark.jars.ivy"] == str(tmp_path / "ivy")
    assert extra["spark.jars.packages"] == "a:b:1, c:d:2"


@pytest.mark.parametrize("master", ["local[2]", "spark://host:7077"])
def test_a_lazy_resource_gets_the_connector_that_this_library_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    """Before a local session starts, jars replace the connector's coordinates. Other packages are left to Spark."""

    class Resource:
        def __init__(self) -> None:
            self.spark_config = spark_settings(
                app_name="x", ivy_folder=tmp_path, extra={"spark.master": master, "spark.jars.packages": "a:b:1"}
            )

        @property
        def spark_session(self) -> dict[str, str]:
            return dict(self.spark_config)

    monkeypatch.setattr(session, "fetch_connector", lambda *_, **__: (Path("/jars/kafka.jar"),))
    monkeypatch.setattr(session, "find_java", lambda: None)
    started = cast("dict[str, str]", session.session_of_resource(Resource()))
    if master.startswith("local"):
        assert (started["spark.jars"], started["spark.jars.packages"]) == ("/jars/kafka.jar", "a:b:1")
    else:
        assert "spark.jars" not in started
        assert started["spark.jars.packages"] == f"{kafka_package()},a:b:1"


class LazyResource:
    """A resource that starts Spark when its session is read, as `LazyPySparkResource` does."""

    def __init__(self, **settings: str) -> None:
        self.spark_config: dict[str, Any] = {"spark.jars.packages": kafka_package(), **settings}
        self._spark_session: dict[str, Any] | None = None

    @property
    def spark_session(self) -> dict[str, Any]:
        """The session."""
        self._spark_session = self._spark_session or dict(self.spark_config)
        return self._spark_session


@pytest.mark.parametrize("name", ["spark.jars.repositories", "spark.jars.ivySettings"])
def test_a_lazy_resource_downloads_from_the_repositories_of_its_settings(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Spark knows these settings, and the download of this library does not."""
    monkeypatch.setattr(session, "find_java", lambda: None)
    resource = LazyResource(**{name: "https://mirror"})
    started = cast("dict[str, str]", session.session_of_resource(resource))
    assert started == {"spark.jars.packages": kafka_package(), name: "https://mirror"}


def test_a_lazy_resource_uses_what_spark_downloaded_before_if_there_is_no_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If this library cannot download the connector, Spark tries it. The next batch does not try it again."""
    tries = []

    def fail(*_: object, **__: object) -> tuple[Path, ...]:
        tries.append(1)
        raise UnavailableError("no network")

    monkeypatch.setattr(session, "fetch_connector", fail)
    monkeypatch.setattr(session, "find_java", lambda: None)
    resource = LazyResource()
    for _ in range(2):
        started = cast("dict[str, str]", session.session_of_resource(resource))
        assert started == {"spark.jars.packages": kafka_package()}
    assert tries == [1]
    assert "no network" in caplog.text


def test_a_lazy_resource_never_lacks_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may start the session of the resource at any time."""

    class Watched(dict[str, Any]):
        def clear(self) -> None:
            raise AssertionError("the settings are empty for a moment")

    monkeypatch.setattr(session, "fetch_connector", lambda *_, **__: (Path("/jars/kafka.jar"),))
    monkeypatch.setattr(session, "find_java", lambda: None)
    resource = LazyResource()
    resource.spark_config = Watched(resource.spark_config)
    assert cast("dict[str, str]", session.session_of_resource(resource)) == {"spark.jars": "/jars/kafka.jar"}


FAKE_JAVA = """#!{python}
import json, os, sys, time, zipfile
arguments = sys.argv[1:]
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if "-version" in arguments:
    print('openjdk version "17.0.1"', file=sys.stderr)
    sys.exit()
if os.environ.get("FAKE_SAYS"):
    print(os.environ["FAKE_SAYS"])
    sys.exit(1)
time.sleep(float(os.environ.get("FAKE_TAKES_S", "0.3")))
pattern = arguments[arguments.index("-retrieve") + 1]
for name in ("spark-sql-kafka-0-10_2.13", "kafka-clients"):
    path = pattern.replace("[artifact]", name).replace("[revision]", "1").replace("(-[classifier])", "")
    with zipfile.ZipFile(path.replace("[ext]", "jar"), "w") as jar:
        jar.writestr("x", "x" * int(os.environ.get("FAKE_SIZE", "10")))
"""


@pytest.fixture
def ivy_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Replace Java by a script that acts as Ivy, and return a function that lists its calls."""
    launcher = tmp_path / "java" / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(FAKE_JAVA.format(python=sys.executable))
    launcher.chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    monkeypatch.setenv("FAKE_CALLS", str(calls))
    monkeypatch.setenv("MARSHAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MARSHAL_IVY_SETTINGS", raising=False)
    return lambda: [reported for line in calls.read_text().splitlines() if "-jar" in (reported := json.loads(line))]


@pytest.mark.thorough
def test_the_connector_is_fetched_once_by_many(ivy_runs: Callable[[], list[list[str]]]) -> None:
    """Processes that start together with an empty cache fetch it once in total. Later ones do not fetch it."""
    reports: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: fetch_connector(report=reports.append), range(4)))
    assert len(ivy_runs()) == len(reports) == 1
    assert set(found) == {connector_jars()}
    assert [jar.name for jar in found[0]] == ["kafka-clients-1.jar", "spark-sql-kafka-0-10_2.13-1.jar"]
    assert fetch_connector() == found[0]
    assert len(ivy_runs()) == 1
    settings = spark_settings(app_name="x", extra={"spark.jars": "/mine.jar"})
    assert settings["spark.jars"] == ",".join([*map(str, found[0]), "/mine.jar"])
    assert not {"spark.jars.packages", "spark.jars.excludes", "spark.jars.ivy"} & settings.keys()


@pytest.mark.thorough
def test_damage_is_mended(ivy_runs: Callable[[], list[list[str]]]) -> None:
    """A truncated or missing jar, and a missing manifest, cause a new download."""
    jar, _ = fetch_connector()
    for damage in (jar.unlink, lambda: jar.write_bytes(b"cut"), (jar.parent.parent / "manifest.json").unlink):
        damage()
        assert connector_jars() == ()
        assert len(fetch_connector()) == 2
    assert len(ivy_runs()) == 4


@pytest.mark.thorough
def test_a_session_is_given_files_in_place_of_coordinates(
    ivy_runs: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    """If the settings were built before the connector was cached, it is fetched now. Spark fetches other packages."""
    settings = spark_settings(app_name="x", extra={"spark.jars.packages": "a:b:1"})
    changed = session.with_connector(settings)
    assert changed["spark.jars.packages"] == "a:b:1"
    assert changed["spark.jars"] == ",".join(map(str, connector_jars()))
    assert len(ivy_runs()) == 1
    elsewhere = session.with_connector(spark_settings(app_name="x", ivy_folder=tmp_path / "else"))
    assert str(tmp_path / "else") in elsewhere["spark.jars"]
    assert "spark.jars.packages" not in elsewhere
    assert session.with_connector({"spark.app.name": "x"}) == {"spark.app.name": "x"}


@pytest.mark.thorough
def test_a_download_that_fails_is_one_line(
    ivy_runs: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error has Ivy's message, advice and the path of Ivy's output. The next call starts again."""
    monkeypatch.setenv("FAKE_SAYS", "loading\n:: unresolved dependency: g#h;1: not found\nBUILD FAILED")
    with pytest.raises(
        UnavailableError, match=r"unresolved dependency: g#h;1: not found.*MARSHAL_IVY_SETTINGS"
    ) as raised:
        fetch_connector()
    assert "\n" not in str(raised.value)
    (failed,) = (path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")
    assert str(failed / "ivy.log") in str(raised.value)
    monkeypatch.delenv("FAKE_SAYS")
    monkeypatch.setenv("MARSHAL_IVY_SETTINGS", "/mirror.xml")
    assert fetch_connector()
    assert ivy_runs()[1][ivy_runs()[1].index("-settings") + 1] == "/mirror.xml"
    assert not failed.exists()


@pytest.mark.slow
def test_a_download_takes_only_so_long(
    ivy_runs: Callable[[], list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that does not end, and one by another process, raise an error after the timeout."""
    monkeypatch.setenv("FAKE_TAKES_S", "10000")
    with pytest.raises(UnavailableError, match=r"took more than 0\.1 s"):
        fetch_connector(timeout_s=0.1)
    assert len(ivy_runs()) <= 1
    lock = next((tmp_path / "cache").glob("*.lock"))
    with lock.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match=r"another process has been fetching org.* for 0\.2 s"):
            fetch_connector(timeout_s=0.2)


@pytest.mark.parametrize("connector", ["", "a:b", "a:b:c:d", "a::c", "a:b:../c", "a:b: c"])
def test_coordinates_are_checked(connector: str) -> None:
    """Anything other than group:name:version is rejected."""
    with pytest.raises(ConfigurationError, match=r"^connector is "):
        fetch_connector(connector)


def test_settings_for_a_cluster_do_not_bind_to_loopback() -> None:
    """On a cluster the driver does not bind to loopback, because executors on other machines must reach it."""
    settings = spark_settings(app_name="x", extra={"spark.master": "spark://h:7077"})
    assert "spark.driver.host" not in settings
    assert settings["spark.master"] == "spark://h:7077"


def test_without_java_a_session_is_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without Java, one line replaces PySpark's own output."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="JAVA_HOME"):
        session.start_session(spark_settings(app_name="x"))


class Conf:
    """The settings of a context."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = settings

    def getAll(self) -> list[tuple[str, str]]:  # noqa: N802 - Spark's name
        """Return all settings."""
        return list(self._settings.items())


class Session:
    """The parts of a session that are used."""

    version = pyspark.__version__
    _jvm = MagicMock()

    def __init__(self, master: str, settings: Mapping[str, str] | None = None) -> None:
        self.master = master
        self.sparkContext = self
        self._settings = settings or {}

    def getConf(self) -> Conf:  # noqa: N802 - Spark's name
        """Return the settings."""
        return Conf(self._settings)


ONE_STAGE = {"spark.stage.maxConsecutiveAttempts": "1"}


@pytest.mark.parametrize(
    ("master", "settings"),
    [
        ("local", ONE_STAGE),
        ("local[*]", ONE_STAGE),
        ("local[4]", ONE_STAGE),
        ("local[4, 1]", ONE_STAGE),
        ("local[2]", ONE_STAGE | {"spark.task.maxFailures": "4"}),  # has no effect there
        ("spark://h:7077", SINGLE_EXECUTION),
        ("local-cluster[2,1,1024]", SINGLE_EXECUTION),
        ("yarn", SINGLE_EXECUTION),
    ],
)
def test_sessions_that_run_each_task_once(master: str, settings: Mapping[str, str]) -> None:
    """These sessions can be used for at-most-once delivery."""
    fake: Any = Session(master, settings)
    check_single_execution(fake)


@pytest.mark.parametrize(
    ("master", "settings", "why"),
    [
        ("local[2]", {}, r"spark\.stage\.maxConsecutiveAttempts is 4, must be 1"),
        ("local[2,3]", ONE_STAGE, r"local\[2,3\], must not set a number of allowed failures"),
        ("local[*, 2]", ONE_STAGE, r"must not set a number of allowed failures"),
        ("local[2]", ONE_STAGE | {"spark.speculation": "true"}, r"spark\.speculation is true, must be false"),
        ("spark://h:7077", ONE_STAGE, r"spark\.task\.maxFailures is 4, must be 1"),
        ("spark://h:7077", {**SINGLE_EXECUTION, "spark.task.maxFailures": "2"}, r"maxFailures is 2"),
        ("k8s://h", {**SINGLE_EXECUTION, "spark.dynamicAllocation.enabled": "true"}, "dynamicAllocation"),
        ("yarn", {**SINGLE_EXECUTION, "spark.decommission.enabled": "true"}, "decommission"),
        ("local-cluster[2,1,1024]", ONE_STAGE, r"spark\.task\.maxFailures is 4"),
    ],
)
def test_sessions_that_may_run_a_task_twice(master: str, settings: Mapping[str, str], why: str) -> None:
    """These sessions are rejected for at-most-once delivery. The error names the setting and its value."""
    fake: Any = Session(master, settings)
    with pytest.raises(ConfigurationError, match=f"at_most_once: .*{why}"):
        check_single_execution(fake)


def test_a_cluster_that_does_not_show_attempts_is_refused_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names what the session lacks. One machine repeats no task, so nothing has to be shown there."""
    monkeypatch.setattr(task_attempts, "attempt_source", lambda _: AttemptSource.TASK_CONTEXT)
    monkeypatch.setattr(Session, "_jvm", object())
    with pytest.raises(ConfigurationError, match=r"plans cannot call org\.apache\.spark\.TaskContext \(.*\)\. Use"):
        check_single_execution(cast("Any", Session("yarn", SINGLE_EXECUTION)))
    check_single_execution(cast("Any", Session("local[2]", ONE_STAGE)))


def test_sessions_of_this_library_run_each_task_once() -> None:
    """The library's settings for one machine work for each delivery mode."""
    settings = spark_settings(app_name="x")
    fake: Any = Session(settings["spark.master"], settings)
    check_single_execution(fake)


@pytest.mark.parametrize("version", ["3.4.4", "4.99.0", "40.0.1"])
def test_a_spark_that_differs_from_pyspark_is_refused(version: str) -> None:
    """PySpark calls the JVM's own methods, which differ between versions. The message shows both versions."""
    fake: Any = Session("local")
    fake.version = version
    with pytest.raises(
        ConfigurationError, match=rf"is Spark {version}, but PySpark is {re.escape(pyspark.__version__)}: install"
    ):
        check_session(fake)


def test_a_session_is_judged_by_its_connector_and_not_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Spark newer than all tested ones is accepted if the connector works in it."""
    monkeypatch.setattr("pyspark.__version__", "7.1.0")
    fake: Any = MagicMock(version="7.1.3")
    check_session(fake)
    broken: Any = MagicMock(version="7.1.3")
    broken.read.format.side_effect = RuntimeError("no such source")
    with pytest.raises(ConfigurationError, match=r"is known for Spark 7\.1\.3 \(Scala 2\.13\)"):
        check_session(broken)


@pytest.mark.parametrize(
    ("release", "scala", "connector"),
    [
        ("3.5.9", "2.12", "org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.3"),
        ("3.5.4-amzn-0", "2.12", "org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.3"),
        ("4.0.5", "2.13", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"),
        ("4.1.4", "2.13", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.1"),
        ("4.2.1", "2.13", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"),
    ],
)
def test_jars_are_chosen_by_the_version_and_the_scala_of_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, scala: str, connector: str
) -> None:
    """The connector, Avro and Delta Lake fit the Spark that PySpark starts, whose version is read from its jars."""
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / f"spark-core_{scala}-{release}.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert kafka_package() == connector
    assert spark_settings(app_name="x", ivy_folder=tmp_path)["spark.jars.packages"] == connector
    assert avro_package() == connector.replace("sql-kafka-0-10", "avro")
    if release < "4.1":
        assert delta_package().startswith(f"io.delta:delta-spark_{scala}:")
    if release < "4.2":
        assert iceberg_package().startswith(f"org.apache.iceberg:iceberg-spark-runtime-{release[:3]}_{scala}:")


@pytest.mark.parametrize("release", ["4.1.4", "4.2.1"])
def test_delta_lake_is_refused_where_it_cannot_read_checkpoints(release: str) -> None:
    """Delta Lake 4.1 and 4.2 load there and fail after ten commits."""
    with pytest.raises(ConfigurationError, match=rf"no io\.delta:delta-spark is known for Spark {release}"):
        delta_package(SparkBuild(release, "2.13"))


def test_iceberg_is_refused_where_it_has_no_runtime() -> None:
    """There is none for Spark 4.2."""
    with pytest.raises(
        ConfigurationError, match=r"no org\.apache\.iceberg:iceberg-spark-runtime is known for Spark 4\.2"
    ):
        iceberg_package(SparkBuild("4.2.0", "2.13"))


def test_a_spark_without_known_jars_is_one_line() -> None:
    """The message names the Spark, and what to do instead."""
    with pytest.raises(ConfigurationError, match=r"is known for Spark 3\.3\.1 \(Scala 2\.12\).*pass `connector`"):
        kafka_package(SparkBuild("3.3.1", "2.12"))


def test_what_java_raised_is_reported_in_one_line() -> None:
    """For an error of the JVM, the first line of Java's message is used, and not the name of the call."""
    from_java = RuntimeError("An error occurred while calling o1.x.\n: a.b.C: not enough memory\n\tat a.b.D")
    assert first_line(from_java) == "a.b.C: not enough memory"
    assert first_line(RuntimeError("\nplain\nmore")) == "plain"
    assert first_line(KeyError()) == "KeyError"


class _Session:
    """A session of which only the settings are used."""

    def __init__(self) -> None:
        self.settings = {"a": "1", "b": "2"}
        self.conf: Any = MagicMock(get=self.settings.get, set=self.settings.__setitem__)


def test_settings_that_threads_change_at_once_get_their_old_values() -> None:
    """The last block that ends sets the value from before the first one, whatever their order."""
    session: Any = _Session()
    first, second = changed_settings(session, {"a": "x"}), changed_settings(session, {"a": "x", "b": "y"})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert session.settings == {"a": "x", "b": "y"}
    second.__exit__(None, None, None)
    assert session.settings == {"a": "1", "b": "2"}
    with changed_settings(session, {"a": "z"}):
        assert session.settings == {"a": "z", "b": "2"}
    assert session.settings == {"a": "1", "b": "2"}


def test_a_report_shows_a_frame_without_its_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest's report of a failed test asks nothing of a JVM, which may be blocked."""
    frames, jvm = frames_module(), Mock()
    frame = frames.DataFrame(jvm, jvm)
    jvm.reset_mock()
    with suppress(Exception):
        repr(frame)
    assert jvm.mock_calls
    jvm.reset_mock()
    monkeypatch.setattr(frames.DataFrame, "__repr__", frames.DataFrame.__repr__)  # restores it
    show_frames_without_jvm()
    assert "DataFrame object" in repr(frame)
    assert not jvm.mock_calls
