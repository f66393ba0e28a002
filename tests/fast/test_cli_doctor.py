"""`doctor` finds each possible problem and reports why it matters and how to fix it."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.cli import doctor
from marshal_dagster.cli.connections import misspelled_variables
from marshal_dagster.cli.doctor_checks import machine
from marshal_dagster.cli.doctor_checks.coordination_log import check_world, read_log
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.cli.doctor_checks.machine import check_machine
from marshal_dagster.cli.doctor_checks.snapshots import Retention, check_snapshots
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshot_writer import renew_snapshots
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import UnavailableError
from marshal_dagster.protocol.messages import ClaimingPartition, ReleaseGroup, coordination_partition, render
from marshal_dagster.spark.packages import kafka_package
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog, MemorySnapshotTopic
from tests.cli import call

HOME = coordination_partition("orders", 4)
CLAIM = render(ClaimingPartition(instance="i", client="c", group="g", topic="orders", partition=0, time_s=1))


def fake_java(home: Path, version: str) -> dict[str, str]:
    """Create a fake Java of that version, and return the environment that names it."""
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n", encoding="utf-8")
    launcher.chmod(0o755)
    return {"JAVA_HOME": str(home)}


def fake_spark(home: Path, core: str) -> dict[str, str]:
    """Create a fake Spark whose core jar has that name, and return the environment that names it."""
    (home / "jars").mkdir(parents=True)
    (home / "jars" / core).touch()
    return {"SPARK_HOME": str(home)}


def on_machine(name: str, environ: Mapping[str, str]) -> Finding:
    """Return the finding of one check of this machine."""
    (finding,) = (each for each in check_machine(environ) if each.name == name)
    return finding


def in_log(broker: MemoryBroker, clock: ManualClock) -> dict[str, Finding]:
    """Return the findings of the checks of the log, by name."""
    read = read_log(MemoryLog(broker), "__marshal", timeout_s=1, clock=clock)
    findings = [read] if isinstance(read, Finding) else list(check_world(read.identity, read.world, clock.wall_ms()))
    assert len({each.name for each in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


@pytest.fixture
def clock() -> ManualClock:
    """A clock that does not run."""
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> MemoryBroker:
    """A coordination topic with one claim, whose broker uses that clock."""
    broker = MemoryBroker(4, now_ms=clock.wall_ms)
    broker.append(HOME, CLAIM)
    return broker


def is_complete(finding: Finding) -> bool:
    """Return whether a finding is a problem with a description, a reason and a fix."""
    return finding.state is CheckState.PROBLEM and all((finding.found, finding.why, finding.fix))


def test_a_java_that_fits_is_named(tmp_path: Path) -> None:
    """Java 17 or newer is accepted and reported with its path."""
    finding = on_machine("java", fake_java(tmp_path, "21.0.2"))
    assert (finding.state, finding.found) == (CheckState.OK, f"Java 21.0.2 at {tmp_path}/bin/java")


def test_a_java_that_is_too_old_or_missing_is_a_problem(tmp_path: Path) -> None:
    """An old Java is reported with its version, a missing one with the path searched."""
    old = on_machine("java", fake_java(tmp_path, "11.0.2"))
    assert is_complete(old)
    assert "11.0.2" in old.found
    missing = on_machine("java", {"JAVA_HOME": str(tmp_path / "nowhere")})
    assert is_complete(missing)
    assert "nowhere" in missing.found


def test_the_installed_spark_fits_the_connector() -> None:
    """PySpark's own Spark is found without importing it, and its connector is named."""
    finding = on_machine("spark", {})
    assert finding.state is CheckState.OK
    assert kafka_package() in finding.found


def test_the_connectors_jar_is_looked_for(tmp_path: Path) -> None:
    """The finding reports whether the connector is in the cache or must be fetched."""
    environ = {"MARSHAL_CACHE": str(tmp_path)}
    assert "to be fetched" in on_machine("spark", environ).found
    _, artifact, version = kafka_package().split(":")
    folder = tmp_path / f"{artifact}-{version}"
    folder.mkdir()
    (folder / "connector.jar").write_bytes(b"jar")
    (folder / "manifest.json").write_text('{"connector.jar": 3}')
    assert f"fetched to {tmp_path}" in on_machine("spark", environ).found


@pytest.mark.parametrize(
    "core", ["spark-core_2.12-4.0.1.jar", "spark-core_2.12-3.3.4.jar", "spark-core_2.13-9.1.0.jar"]
)
def test_a_spark_without_a_known_connector_is_a_problem(tmp_path: Path, core: str) -> None:
    """SPARK_HOME may name another Spark; one without a connector is reported before a batch fails with it."""
    finding = on_machine("spark", fake_spark(tmp_path, core))
    assert is_complete(finding)
    assert (str(tmp_path) in finding.found, finding.fix) == (True, "unset SPARK_HOME")


def test_the_connector_fits_the_spark_that_is_found(tmp_path: Path) -> None:
    """Spark 3.5 has a connector for its own Scala."""
    finding = on_machine("spark", fake_spark(tmp_path, "spark-core_2.12-3.5.9.jar"))
    assert finding.state is CheckState.OK
    assert "spark-sql-kafka-0-10_2.12:3.5.3" in finding.found


def test_a_spark_home_without_spark_is_a_problem(tmp_path: Path) -> None:
    """If SPARK_HOME names a folder without Spark, the finding reports it."""
    finding = on_machine("spark", {"SPARK_HOME": str(tmp_path)})
    assert is_complete(finding)
    assert finding.found == f"no Spark in {tmp_path}"


def test_a_process_without_spark_has_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that only claims needs neither Spark nor Java; the finding names the extra."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    environ = {"PATH": "/nowhere"}
    findings = {finding.name: finding for finding in machine.check_machine(environ)}
    assert (findings["spark"].state, findings["java"].state) == (CheckState.NOT_CHECKED, CheckState.NOT_CHECKED)
    assert "pip install 'marshal-dagster[spark]'" in findings["spark"].found


def test_versions_are_reported_and_missing_packages_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """All versions are in one line; a package that is not installed is named."""
    assert "confluent-kafka" in on_machine("versions", {}).found
    monkeypatch.setattr(machine, "_PACKAGES", ("marshal-dagster", "not-there-at-all"))
    finding = on_machine("versions", {})
    assert is_complete(finding)
    assert "not-there-at-all" in finding.found


def test_a_log_in_order_has_no_problem(broker: MemoryBroker, clock: ManualClock) -> None:
    """A complete log whose time matches the clock has no problem, and the topic's id is reported."""
    findings = in_log(broker, clock)
    assert {finding.state for finding in findings.values()} == {CheckState.OK}
    assert broker.identity.topic_id in findings["coordination topic"].found


def test_an_empty_log_has_no_problem(clock: ManualClock) -> None:
    """A topic without records has no log time, which is not a problem."""
    findings = in_log(MemoryBroker(2), clock)
    assert {finding.state for finding in findings.values()} == {CheckState.OK}
    assert findings["log time"].found == "the log has no record yet"


def test_a_missing_topic_is_a_problem(broker: MemoryBroker, clock: ManualClock) -> None:
    """If the coordination topic is missing, the command that creates it is named."""
    broker.delete()
    (finding,) = in_log(broker, clock).values()
    assert is_complete(finding)
    assert finding.fix == "marshal-dagster topic create --name __marshal"


def test_a_log_without_its_beginning_is_a_problem(broker: MemoryBroker, clock: ManualClock) -> None:
    """Partitions that can only be observed are named, with the reason why nothing can be claimed there."""
    broker.append(HOME, CLAIM)
    broker.retain_from(HOME, 1)
    finding = in_log(broker, clock)["certain"]
    assert is_complete(finding)
    assert f"coordination partitions {HOME} do not begin at offset 0" in finding.found
    assert finding.fix.endswith("marshal-dagster recover --coordination-topic __marshal"), "it keeps positions"


@pytest.mark.parametrize(
    ("ahead_ms", "state"), [(5_000, CheckState.OK), (5_001, CheckState.PROBLEM), (-90_000, CheckState.OK)]
)
def test_log_time_ahead_of_the_clock_is_a_problem(
    broker: MemoryBroker, clock: ManualClock, ahead_ms: int, state: CheckState
) -> None:
    """A difference of a few seconds is accepted; more means a wrong clock. A silent log is not a problem."""
    broker.append(0, b"junk", clock.wall_ms() + ahead_ms)
    finding = in_log(broker, clock)["log time"]
    assert finding.state is state
    assert is_complete(finding) == (state is CheckState.PROBLEM)
    assert ("(coordination partitions 0)" in finding.found) == (state is CheckState.PROBLEM)


def test_records_that_lie_elsewhere_are_reported(broker: MemoryBroker, clock: ManualClock) -> None:
    """Records in the wrong partition show that partitions were added, or that a writer uses a different count."""
    broker.append((HOME + 1) % 4, CLAIM)
    finding = in_log(broker, clock)["partition count"]
    assert (finding.state, bool(finding.why), bool(finding.fix)) == (CheckState.WARNING, True, True)
    assert finding.found.startswith("1 records are not in the coordination partition of their topic")


def test_what_is_half_written_is_a_problem(broker: MemoryBroker, clock: ManualClock) -> None:
    """A pause in one of four coordination partitions is reported with the group."""
    until_s = clock.wall_ms() // 1_000 + 60
    pause = render(ReleaseGroup(instance="p", client="c", group="g", time_s=1, expiry_s=until_s))
    broker.append(HOME, pause)
    finding = in_log(broker, clock)["groups"]
    assert is_complete(finding)
    assert finding.found.startswith("group g: paused until ")


def test_a_paused_group_is_a_warning_with_the_command_that_resumes_it(broker: MemoryBroker, clock: ManualClock) -> None:
    """The finding names who paused; it is gone once the pause has ended."""
    assert in_log(broker, clock)["pauses"].state is CheckState.OK
    until_s = clock.wall_ms() // 1_000 + 60
    for partition in range(4):
        pause = ReleaseGroup(instance="operator.p", client="jane@host", group="g", time_s=1, expiry_s=until_s)
        broker.append(partition, render(pause))
    finding = in_log(broker, clock)["pauses"]
    assert (finding.state, finding.fix) == (CheckState.WARNING, "marshal-dagster resume g")
    assert finding.found == f"group 'g' is paused until {utc_to_second(until_s)} by jane@host"
    clock.advance(61_000)
    assert in_log(broker, clock)["pauses"].state is CheckState.OK


@pytest.fixture
def snapshots(broker: MemoryBroker, clock: ManualClock) -> Snapshots:
    """Snapshots of the topic, after which one more record was written."""
    snapshots = Snapshots(MemorySnapshotTopic(4))
    rationalizer = Rationalizer(MemoryLog(broker), clock=clock)
    assert renew_snapshots(rationalizer, snapshots, clock) == [HOME]
    broker.append(HOME, CLAIM)
    return snapshots


def of_snapshots(broker: MemoryBroker, snapshots: Snapshots, retention: Retention, at_ms: int = 0) -> Finding:
    """Return the finding of the check of the snapshots."""
    (finding,) = check_snapshots(MemoryLog(broker), snapshots, retention, at_ms)
    return finding


def test_without_a_snapshot_topic_the_command_that_creates_one_is_shown(broker: MemoryBroker) -> None:
    """A deployment created before snapshots existed gets a warning."""
    finding = of_snapshots(broker, Snapshots(MemorySnapshotTopic(0)), Retention())
    assert finding.state is CheckState.WARNING
    assert finding.fix == "marshal-dagster topic create --name __marshal"


def test_without_the_coordination_topic_nothing_more_is_said(broker: MemoryBroker) -> None:
    """A missing coordination topic is reported only once."""
    broker.delete()
    assert list(check_snapshots(MemoryLog(broker), Snapshots(MemorySnapshotTopic(4)), Retention(), 0)) == []


def test_a_log_that_is_kept_whole_is_in_no_danger(broker: MemoryBroker, snapshots: Snapshots) -> None:
    """With unlimited retention a snapshot may be missing or old."""
    finding = of_snapshots(broker, snapshots, Retention(), 2**60)
    assert (finding.state, "at most 1 records" in finding.found) == (CheckState.OK, True)
    finding = of_snapshots(broker, Snapshots(MemorySnapshotTopic(4)), Retention())
    assert (finding.state, f"none yet of coordination partitions {HOME}" in finding.found) == (CheckState.OK, True)


@pytest.mark.parametrize(("age_ms", "state"), [(500, CheckState.OK), (501, CheckState.PROBLEM)])
def test_an_old_snapshot_of_a_log_that_will_be_cut_is_a_problem(
    broker: MemoryBroker, snapshots: Snapshots, clock: ManualClock, age_ms: int, state: CheckState
) -> None:
    """A snapshot is a problem once half of the retention time has passed since."""
    finding = of_snapshots(broker, snapshots, Retention(time_ms=1_000), clock.wall_ms() + age_ms)
    assert finding.state is state
    assert is_complete(finding) == (state is CheckState.PROBLEM)
    assert (f"coordination partitions {HOME} " in finding.found) == (state is CheckState.PROBLEM)


def test_a_snapshot_of_the_present_state_does_not_age(broker: MemoryBroker, clock: ManualClock) -> None:
    """If no record follows the snapshot, retention may delete any record."""
    snapshots = Snapshots(MemorySnapshotTopic(4))
    renew_snapshots(Rationalizer(MemoryLog(broker), clock=clock), snapshots, clock)
    assert of_snapshots(broker, snapshots, Retention(time_ms=1, size_bytes=1), 2**60).state is CheckState.OK


@pytest.mark.parametrize(("records", "state"), [(0, CheckState.OK), (1, CheckState.PROBLEM)])
def test_a_snapshot_in_the_older_half_of_a_log_of_limited_size_is_a_problem(
    broker: MemoryBroker, snapshots: Snapshots, records: int, state: CheckState
) -> None:
    """If the size is limited, the distance from the start is measured in records."""
    for _ in range(records):
        broker.append(HOME, CLAIM)
    assert of_snapshots(broker, snapshots, Retention(size_bytes=1_000)).state is state


def test_a_log_far_below_its_limit_is_in_no_danger(broker: MemoryBroker, snapshots: Snapshots) -> None:
    """A young log is not cut before it is large, however few of its records the snapshot covers."""
    for _ in range(100):
        broker.append(HOME, CLAIM)
    assert of_snapshots(broker, snapshots, Retention(size_bytes=2**30)).state is CheckState.OK


def test_a_snapshot_that_the_log_has_left_behind_is_a_problem(broker: MemoryBroker, snapshots: Snapshots) -> None:
    """A log that begins after its newest snapshot is a problem, and so is a cut log without a snapshot."""
    broker.retain_from(HOME, 2)
    assert is_complete(of_snapshots(broker, snapshots, Retention(time_ms=10**15)))
    assert is_complete(of_snapshots(broker, Snapshots(MemorySnapshotTopic(4)), Retention(time_ms=10**15)))


def test_a_snapshot_beyond_the_end_is_a_problem(broker: MemoryBroker, clock: ManualClock) -> None:
    """If a log was truncated to before its snapshot, no snapshot can be used."""
    snapshots = Snapshots(MemorySnapshotTopic(4))
    broker.append(HOME, CLAIM)
    renew_snapshots(Rationalizer(MemoryLog(broker), clock=clock), snapshots, clock)
    broker.truncate(HOME, 1)
    assert is_complete(of_snapshots(broker, snapshots, Retention(time_ms=10**15)))


@pytest.mark.slow
def test_wrong_settings_are_corrected_not_replaced_by_a_new_kafka(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fix of a wrong combination is not another cluster."""
    for name, value in {"BOOTSTRAP_SERVERS": "127.0.0.1:1", "SECURITY_PROTOCOL": "SSL", "USERNAME": "me"}.items():
        monkeypatch.setenv(f"MARSHAL_{name}", value)
    text = call(capsys, "doctor").out
    assert "MARSHAL_USERNAME would not be used with MARSHAL_SECURITY_PROTOCOL SSL: choose SASL_SSL" in text
    assert "  fix: correct what is reported, then: marshal-dagster doctor" in text
    assert "kafka up" not in text


@pytest.mark.slow
def test_a_misspelled_variable_is_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be ignored silently."""
    monkeypatch.delenv("MARSHAL_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setenv("MARSHAL_SASL_MECHANISMS", "PLAIN")
    text = call(capsys, "doctor").out
    assert "variables: no setting of a connection is named MARSHAL_SASL_MECHANISMS" in text
    assert "  fix: export MARSHAL_SASL_MECHANISM=...; unset MARSHAL_SASL_MECHANISMS" in text


def test_variables_of_others_are_not_misspelled() -> None:
    """Those of the library, of a second cluster and of other programs have no similar name."""
    named = "COORDINATION_TOPIC COORDINATOR_TOPIC CACHE KAFKA_DIR IVY_SETTINGS OUTBOX_DSN OUTPUT MAX_RECORDS PASSWORD"
    others = {f"MARSHAL_{name}": "" for name in named.split()} | {"MARSHAL_DATA_PASSWORD": "", "PASWORD": ""}
    assert misspelled_variables(others) == {}
    assert misspelled_variables({"MARSHAL_DATA_PASWORD": ""}) == {"MARSHAL_DATA_PASWORD": "MARSHAL_DATA_PASSWORD"}


@pytest.mark.slow
def test_no_kafka_at_all_is_found_not_raised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a connection the command reports how to specify one, and exits with 1."""
    monkeypatch.delenv("MARSHAL_BOOTSTRAP_SERVERS", raising=False)
    answer = call(capsys, "doctor", "--json")
    assert (answer.code, answer.err, answer.json["ok"]) == (1, "", False)
    states = {each["name"]: each["state"] for each in answer.json["findings"]}
    assert (states["connection"], states["coordination topic"]) == ("problem", "not checked")
    text = call(capsys, "doctor").out
    assert "PROBLEM      connection: no Kafka cluster is specified" in text
    assert "  why: " in text
    assert "  fix: marshal-dagster kafka up" in text


@pytest.mark.slow
def test_brokers_that_go_away_meanwhile_are_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that ended early are not reported as a deployment without a problem."""

    def gone(*_: object) -> None:
        raise UnavailableError("the brokers do not answer")

    inspector = nullcontext(SimpleNamespace(throttled_s=0.0))
    monkeypatch.setattr(doctor, "check_reachable", lambda *_, **__: None)
    monkeypatch.setattr(doctor, "KafkaInspector", lambda *_, **__: inspector)
    monkeypatch.setattr(doctor, "check_deployment", gone)
    answer = call(capsys, "doctor", "--json", "-b", "somewhere:1")
    assert (answer.code, answer.json["ok"]) == (1, False)
    (found,) = [finding for finding in answer.json["findings"] if finding["name"] == "coordination topic"]
    assert (found["state"], found["found"]) == ("problem", "the brokers do not answer")
