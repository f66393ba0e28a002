"""What other users can see of a Spark session: its pages and its REST API, and the functions that its tasks run."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch
from urllib.request import urlopen

import psutil
from pyspark.serializers import CloudPickleSerializer

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks import KafkaSink, PostgresSink, Sink
from tests.conditions import WITHIN_S
from tests.kafka_outputs import KafkaOutput, committed
from tests.real.batch_function import values
from tests.real.spark_driver import Work, claimed, messages, session
from tests.real.test_kill_points_sinks import Table
from tests.sink_outputs import TABLE

_PAGES: Final = ("environment/", "SQL/", "jobs/", "stages/", "executors/")
_ANSWERS: Final = ("environment", "stages?details=true", "allexecutors")
_PAGES_OF_EACH: Final = 20
"""The executions and jobs of one test."""
_PASSPHRASE: Final = "sasl.oauthbearer.assertion.private.key.passphrase"
"""A secret that a connection without authentication may have too."""
_VARIABLE: Final = "TEST_PASSPHRASE"
_KEPT: Final = {
    "functions": (b"_CopyTask", b"_RangeTask", b"TaskSecret"),
    "pages": (b"MapInArrow", b"spark.driver.memory"),
    "explained": (b"Physical Plan",),
    "processes": (b"org.apache.spark.deploy",),
}
"""Texts that each file has, so that an empty one is noticed."""
_EXECUTIONS: Final = "sql?details=true&planDescription=true&length=10000"


def seen_on_pages(site: str, *more: str) -> bytes:
    """Return the pages and the REST API's answers of a session's web site, and the pages `more`.

    The answers have all executions of SQL and all jobs. The newest ones have pages of their own.
    """
    api = f"{site}/api/v1/applications"
    (application,) = json.loads(_get(api))
    api += f"/{application['id']}"
    executions, jobs = _get(f"{api}/{_EXECUTIONS}"), _get(f"{api}/jobs")
    addresses = [
        *(f"{site}/{page}" for page in (*_PAGES, *more)),
        *(f"{site}/SQL/execution/?id={number}" for number in _newest(executions, "id")),
        *(f"{site}/jobs/job/?id={number}" for number in _newest(jobs, "jobId")),
        *(f"{api}/{answer}" for answer in _ANSWERS),
    ]
    return b"\n".join([executions, jobs, *map(_get, addresses)])


def _newest(answer: bytes, name: str) -> list[int]:
    return sorted(int(entry[name]) for entry in json.loads(answer))[-_PAGES_OF_EACH:]


def _get(address: str) -> bytes:
    with urlopen(address, timeout=WITHIN_S) as answer:  # noqa: S310 - the URL of the test's own session
        return bytes(answer.read())


def arguments_of_processes() -> str:
    """Return the command lines of all processes."""
    return "\n".join(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


@dataclass(frozen=True)
class SecretOutputs:
    """A table and a topic that are reached with secrets, and a folder for what other users can see."""

    table: Table
    topic: KafkaOutput
    folder: Path
    password: str = field(default_factory=lambda: f"canary-{os.urandom(6).hex()}")
    passphrase: str = field(default_factory=lambda: f"canary-{os.urandom(6).hex()}")

    def sinks(self) -> list[Sink]:
        """Return the sinks of the table and the topic."""
        os.environ[_VARIABLE] = self.passphrase
        settings = {_PASSPHRASE: f"env:{_VARIABLE}"}
        connection = KafkaConnection(
            bootstrap_servers=self.topic.connection.bootstrap_servers, client_settings=settings
        )
        dsn = f"{self.table.dsn}&password={self.password}"
        return [PostgresSink(dsn, TABLE, schema=self.table.schema), KafkaSink(connection, self.topic.topic)]

    def check(self, *folders: Path) -> None:
        """Raise an error if a secret is in these folders or in what was kept of a session, or if rows are missing."""
        found = leaks([self.password, self.passphrase], [self.folder, *folders])
        assert not found, found
        for name, texts in _KEPT.items():
            content = (self.folder / name).read_bytes()
            assert [text for text in texts if text not in content] == [], name
        assert self.table.rows() == messages()
        assert len(committed(self.topic.connection, self.topic.topic)) == len(messages())


@contextmanager
def functions_kept(path: Path) -> Iterator[None]:
    """Append each function that Spark pickles for its tasks inside the block to a file, with all that it contains."""
    pickled: Any = CloudPickleSerializer.dumps

    def dumps(serializer: CloudPickleSerializer, function: Any) -> bytes:  # noqa: ANN401 - what Spark pickles
        content = bytes(pickled(serializer, function))
        with path.open("ab") as file:
            file.write(content)
        return content

    with patch.object(CloudPickleSerializer, "dumps", dumps):
        yield


def has_executions(folder: Path) -> bool:
    """Return whether the folder has an event log with an execution of SQL."""
    logs = (path for path in folder.rglob("*") if path.is_file() and b"SparkListenerLogStart" in path.read_bytes())
    return any(b"SparkListenerSQLExecutionStart" in path.read_bytes() for path in logs)


def leaks(secrets: Iterable[str], folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the files of some folders that contain a secret, each with the secret."""
    secrets = list(secrets)
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    found = []
    for file in files:
        content = file.read_bytes()
        found += [(file, secret) for secret in secrets if secret.encode() in content]
    return found


def write_with_secrets(work: Work, outputs: SecretOutputs, site: str | None) -> None:
    """Write the messages to PostgreSQL and to Kafka from Spark's tasks, and keep in a folder what others can see.

    Args:
        work: The group's work.
        outputs: The outputs, and the folder.
        site: The web site of a Connect server; None for that of this process's session.
    """
    spark, kept = session(work.where), outputs.folder
    with (kept / "explained").open("w") as explained, functions_kept(kept / "functions"), redirect_stdout(explained):
        for number, sink in enumerate(outputs.sinks()):
            with claimed(replace(work, group=f"{work.group}-{number}"), sink) as batch:
                rows = values(batch.read(spark))
                batch.write(rows)
            rows.explain(extended=True)
    pages = seen_on_pages(str(spark.sparkContext.uiWebUrl)) if site is None else seen_on_pages(site, "connect/")
    (kept / "pages").write_bytes(pages)
    (kept / "processes").write_text(arguments_of_processes())
