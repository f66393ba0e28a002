"""The night rehearsed: five faults on a running deployment, each found from its alert and ended by the runbook.

The alert rules of observability/ judge the real /metrics of an exporter and a harvester. Each alert leads to its
section of docs/operate/runbook.md, whose commands a stand-in of an operator carries out. So a changed rule, metric,
command or section breaks this test.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import psycopg
import pytest
import yaml  # type: ignore[import-untyped]
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from prometheus_client.parser import text_string_to_metric_families

from marshal_dagster.batches import BatchRequest, BatchSession, IdleReason
from marshal_dagster.cli.connections import open_reader
from marshal_dagster.cli.service import health_server, http_server
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.exporter.exporter import Exporter
from marshal_dagster.exporter.topic_reader import TopicReader
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox import metrics as outbox_metrics
from marshal_dagster.outbox.writer import OutboxRecord
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.protocol.open_plans import exhausted
from tests.cli import Answer, call
from tests.conditions import WITHIN_S, wait_until
from tests.outbox_fixtures import Site
from tests.real.conftest import MakeTopic
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side, read_messages
from tests.real.log_time import let_claims_become_stale

REPOSITORY: Final = Path(__file__).parents[2]
RULES: Final = REPOSITORY / "observability" / "alerts.yml"
INTERVAL_MS: Final = 60_000
LATER_MS: Final = 8 * 60_000
"""When the operator looks after the faults. A claim is stale after two minutes; its alert fires five minutes later."""
DAY_MS: Final = 86_400_000
LONG: Final = "7h"
"""How long the metrics keep their values in the rehearsal: longer than each alert waits."""
MINUTES: Final = 7 * 60
STALE, PLAN, PAUSE = "MarshalStaleClaim", "MarshalExhaustedPlan", "MarshalForgottenPause"
RETENTION, OUTBOX = "MarshalRetentionNearsUnread", "MarshalOutboxDoesNotDrain"
FOUND_WITHIN_S: Final = 60
"""The most processor seconds of a command that finds a fault: a slow machine takes longer."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert as its receiver sees it."""

    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        """The name of its rule."""
        return self.labels["alertname"]


_PAIRS = r'((?:\w+="(?:[^"\\]|\\.)*"(?:, )?)*)'


def firing(metrics: str, folder: Path) -> dict[str, Alert]:
    """Return the alerts that fire after the metrics had these values for some hours, by promtool.

    promtool compares alerts with expected ones and prints those that differ, so no alert is expected here.
    """
    series = [
        {
            "series": sample.name + "{" + ", ".join(f'{name}="{value}"' for name, value in sample.labels.items()) + "}",
            "values": f"{sample.value:.3f}x{MINUTES}",
        }
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.startswith("marshal_")
    ]
    names = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    cases = [{"alertname": name, "eval_time": LONG, "exp_alerts": []} for name in names]
    unit = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": cases}],
    }
    file = folder / "night.yml"
    file.write_text(yaml.safe_dump(unit))
    done = subprocess.run(
        [promtool(), "test", "rules", file], capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    printed = done.stdout + done.stderr
    found = [
        Alert(pairs(labels), pairs(annotations))
        for labels, annotations in re.findall(rf"Labels:{{{_PAIRS}}}\s+Annotations:{{{_PAIRS}}}", printed)
    ]
    assert (done.returncode == 0) == (not found), printed
    assert len({alert.name for alert in found}) == len(found), printed
    return {alert.name: alert for alert in found}


def pairs(text: str) -> dict[str, str]:
    """Return the labels that promtool printed."""
    return {
        name: value.replace('\\"', '"').replace("\\\\", "\\")
        for name, value in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', text)
    }


def promtool() -> str:
    """Return the program, which `make promtool` fetches."""
    path = os.environ.get("PROMTOOL") or shutil.which("promtool") or REPOSITORY / "build" / "prometheus" / "promtool"
    assert Path(path).exists(), "promtool is needed: run `make promtool`"
    return str(path)


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the runbook, as the operator reads it after an alert."""

    points: dict[str, str]

    @classmethod
    def of(cls, alert: Alert) -> "Section":
        """Return the section that an alert links to."""
        path, _, anchor = alert.annotations["runbook_url"].partition("#")
        parts = re.split(r"^### (\w+)$", (REPOSITORY / path).read_text(), flags=re.MULTILINE)
        texts = dict(zip(map(str.lower, parts[1::2]), parts[2::2], strict=True))
        text = re.split(r"^## ", texts[anchor], flags=re.MULTILINE)[0]
        return cls(dict(re.findall(r"^- \*\*(.+?)\.\*\* (.*)$", text, re.MULTILINE)))

    def commands(self, point: str) -> list[str]:
        """Return the commands of a point, such as `Find it`."""
        return re.findall(r"`(marshal-dagster [^`]+)`", self.points[point])


@dataclass(slots=True)
class Deployment:
    """The groups of the rehearsal, each with a data topic of its own, and the operator."""

    connection: KafkaConnection
    coordination_topic: str
    topics: dict[str, str]
    capsys: pytest.CaptureFixture[str]
    found_s: dict[str, float] = field(default_factory=dict)

    def group(self, name: str) -> str:
        """Return a group's name, which a shell would split without quotes."""
        return f"night {name}"

    def session(self, name: str) -> BatchSession:
        """Open a run of a group."""
        return BatchSession.open(
            self.connection,
            self.group(name),
            settings=GroupSettings(INTERVAL_MS),
            coordination_topic=self.coordination_topic,
        )

    def work(self, name: str, most: int | None = None, *, fails: bool = False) -> bool:
        """Run the job of a group: one batch of at most `most` records, or batches until nothing is left to do.

        Returns whether the topic is drained.
        """
        with self.session(name) as session, suppress(ZeroDivisionError):
            for claimed in session.batches(BatchRequest(topic=self.topics[name], max_records=most)):
                with claimed as batch:
                    if batch.idle is not None:
                        return batch.idle.reason is IdleReason.DRAINED
                    batch.begin_processing()
                    read_messages(self.connection, batch.ranges)
                    if fails:
                        raise ZeroDivisionError
                if most is not None:
                    break
        return False

    def exhausted(self, name: str) -> int:
        """Return the number of plans that members no longer retry."""
        with self.session(name) as session:
            return len(exhausted(session.open_plans(self.topics[name], read_on=True)))

    def die(self, name: str) -> None:
        """Claim and plan a batch, and end without a release, as a process that is killed."""
        session = self.session(name)
        log = session.log = KillableLog(session.log, KillPoint(Side.BEFORE, "no such record"))
        claimed = session.claimed_batch(BatchRequest(topic=self.topics[name]))
        with closing(log.log), closing(session.data), suppress(KilledError), claimed as batch:
            batch.begin_processing()
            log.dead = True
            raise KilledError

    def run(self, command: str, alert: Alert) -> Answer:
        """Run a command of the runbook for the group and topic of the alert."""
        names = {"shops": alert.labels.get("group"), "orders": alert.labels.get("topic")}
        program, *arguments = [names.get(word) or word for word in shlex.split(command)]
        assert program == "marshal-dagster"
        return call(self.capsys, *arguments)

    def find(self, alert: Alert) -> str:
        """Run the command with which the runbook finds the fault, and return what it shows."""
        began_s, worked_s = time.monotonic(), time.process_time()
        answer = self.run(Section.of(alert).commands("Find it")[0], alert)
        self.found_s[alert.name] = time.monotonic() - began_s
        assert time.process_time() - worked_s < FOUND_WITHIN_S
        return answer.out


@pytest.fixture
def deployment(
    connection: KafkaConnection,
    coordination_topic: str,
    topic: MakeTopic,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Deployment:
    """Four groups that have each read two of ten records, two days before the records of one of them are deleted."""
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", connection.bootstrap_servers)
    monkeypatch.setenv("MARSHAL_COORDINATION_TOPIC", coordination_topic)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    topics = {
        name: topic(2, {"retention.ms": str(7 * DAY_MS)} if name == RETENTION else None)
        for name in (STALE, PLAN, PAUSE, RETENTION)
    }
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    now_ms = time.time_ns() // 1_000_000
    for name, data in topics.items():
        for number in range(10):
            age_ms = 5 * DAY_MS if name == RETENTION else 0
            producer.produce(data, f"{number}", partition=number % 2, timestamp=now_ms - age_ms)
    assert producer.flush(WITHIN_S) == 0
    deployment = Deployment(connection, coordination_topic, topics, capsys)
    for name in (STALE, PAUSE, RETENTION):
        deployment.work(name, 2)
    return deployment


def alter_topic(connection: KafkaConnection, command: str) -> None:
    """Do what a `kafka-configs` command does."""
    words = shlex.split(command)
    given = dict(pairwise(words))
    name, _, value = given["--add-config"].partition("=")
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, given["--entity-name"], incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": connection.bootstrap_servers})  # it must live until the answer
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(WITHIN_S)


@contextmanager
def harvester_of(site: Site) -> Iterator[str]:
    """Run a harvester of an outbox, and yield the address of its metrics."""
    harvester = site.harvester()
    with health_server(harvester.health, "0") as server:
        assert server is not None
        thread = threading.Thread(target=harvester.run, name="harvester")
        thread.start()
        try:
            yield server.address
        finally:
            harvester.stop()
            thread.join()


def read(address: str) -> str:
    """Return the metrics of a service."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WITHIN_S) as answer:
        return str(answer.read().decode())


def create_faults(deployment: Deployment, site: Site) -> None:
    """A run dies, a batch fails six times, a pause is forgotten, and rows wait. The old records are there already."""
    deployment.die(STALE)
    wait_until(
        lambda: deployment.work(PLAN, fails=True) or deployment.exhausted(PLAN) == 2, "members gave both plans up"
    )
    paused = call(deployment.capsys, "pause", deployment.group(PAUSE), "--for", "12h", "--reason", "the database moves")
    assert paused.code == 0, paused
    site.stash(*(OutboxRecord(deployment.topics[PAUSE], f"row {number}", key="k") for number in range(3)))
    with psycopg.connect(site.dsn) as session:
        session.execute("UPDATE outbox SET create_time = now() - interval '6 minutes'")


def check_alerts(seen: dict[str, Alert], deployment: Deployment) -> None:
    """Each alert names its group and topic, or its outbox."""
    assert set(seen) == {STALE, PLAN, PAUSE, RETENTION, OUTBOX}
    for name in (STALE, PLAN, RETENTION):
        assert seen[name].labels["group"] == deployment.group(name)
        assert seen[name].labels["topic"] == deployment.topics[name]
        assert deployment.topics[name] in seen[name].annotations["summary"]
    assert deployment.group(PAUSE) in seen[PAUSE].annotations["summary"]
    assert "outbox outbox" in seen[OUTBOX].annotations["summary"]


def check_commands(shown: dict[str, str], deployment: Deployment) -> None:
    """Each output names group, topic and partitions, and what to do."""
    data, group = deployment.topics, deployment.group
    first, second, *_ = shown[STALE].splitlines()
    assert first.startswith(f"stale claim: {data[STALE]}/0, {data[STALE]}/1 of group {group(STALE)!r}, stale for ")
    assert "start a run of the group, which takes it over" in second
    *plans, retry = shown[PLAN].splitlines()[:3]
    assert [f"exhausted: {data[PLAN]}/{number} [0, 5) of group" in plans[number] for number in (0, 1)] == [True, True]
    assert retry.strip() == f"fix the cause and run `marshal-dagster retry {shlex.quote(group(PLAN))} {data[PLAN]}`"
    assert "the database moves" in shown[PAUSE]
    assert f"`marshal-dagster resume {shlex.quote(group(PAUSE))}` ends it now" in shown[PAUSE]
    assert f"data topic {data[RETENTION]}: group {group(RETENTION)}: partitions 0-1 have 8 unread" in shown[RETENTION]
    assert "blocked by process" in shown[OUTBOX]


def end_faults(seen: dict[str, Alert], shown: dict[str, str], deployment: Deployment, dsn: str) -> None:
    """Do what the section of each alert states, in its order."""
    sections = {name: Section.of(alert) for name, alert in seen.items()}
    assert "run the statement that `outbox status` prints" in sections[OUTBOX].points["End it"]
    (statement,) = re.findall(r"SELECT pg_terminate_backend\(\d+\);", shown[OUTBOX])
    with psycopg.connect(dsn) as session:
        session.execute(statement)
    for name in (PAUSE, PLAN):
        (command,) = sections[name].commands("End it")
        assert deployment.run(command, seen[name]).code == 0
        assert deployment.work(name)
    assert "First run the command that `doctor` prints" in sections[RETENTION].points["End it"]
    data = deployment.topics[RETENTION]
    (alter,) = re.findall(rf"kafka-configs .*? --entity-name {data} --add-config [^\s;]+", shown[RETENTION])
    alter_topic(deployment.connection, alter)
    assert f"data topic {data}" not in deployment.find(seen[RETENTION])
    (command,) = sections[RETENTION].commands("End it")
    assert deployment.run(command, seen[RETENTION]).code == 0
    assert deployment.work(RETENTION)
    assert sections[STALE].points["End it"].startswith("Start a run of the job")
    let_claims_become_stale(deployment.connection, deployment.coordination_topic, INTERVAL_MS)
    assert deployment.work(STALE)


def test_five_faults_of_a_night(
    deployment: Deployment, topics: Topics, database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each fault fires its alert, one command finds it, and the steps of the runbook end it."""
    site = Site(database, deployment.connection, "outbox")
    monkeypatch.setenv("MARSHAL_OUTBOX_DSN", database)
    monkeypatch.setattr(outbox_metrics, "LOOK_EACH_S", 0.0)
    create_faults(deployment, site)
    with ExitStack() as night:
        forgotten = night.enter_context(closing(psycopg.connect(database, application_name="psql")))
        forgotten.execute("SELECT * FROM outbox FOR UPDATE")
        harvesting = night.enter_context(harvester_of(site))
        exporter = Exporter(
            lambda: open_reader(deployment.connection, deployment.coordination_topic), TopicReader(topics)
        )
        exporting = night.enter_context(http_server(exporter.health, "0", "--listen", exporter.render))
        night.callback(exporter._close_log)

        def alerts() -> dict[str, Alert]:
            exporter.refresh()
            return firing(read(exporting.address) + read(harvesting), tmp_path)

        wait_until(lambda: 'backlog{outbox="outbox"} 3' in read(harvesting), "the harvester measured the backlog")
        with monkeypatch.context() as later:
            later.setattr(SystemClock, "wall_ms", lambda _: time.time_ns() // 1_000_000 + LATER_MS)
            seen = alerts()
            check_alerts(seen, deployment)
            shown = {name: deployment.find(alert) for name, alert in seen.items()}
        found_s = {name: round(seconds, 2) for name, seconds in deployment.found_s.items()}
        check_commands(shown, deployment)
        end_faults(seen, shown, deployment, database)
        wait_until(lambda: site.rows() == [], "the outbox is drained")
        wait_until(lambda: not alerts(), lambda: f"no alert fires: {alerts()}")
        ended = {name: deployment.find(alert) for name, alert in seen.items()}
    finding = {
        STALE: "stale claim",
        PLAN: "exhausted",
        PAUSE: "paused",
        RETENTION: f"data topic {deployment.topics[RETENTION]}",
    }
    for name, text in (finding | {OUTBOX: "blocked by"}).items():
        assert text not in ended[name]
    sys.stdout.write(f"seconds of the commands that found the faults: {found_s}\n")
