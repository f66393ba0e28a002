"""Check the class archive that makes brokers start faster: it is created once, and is optional."""

from dataclasses import replace
from pathlib import Path

import pytest

from marshal_dagster._internal.java import Java
from marshal_dagster.devkafka.cds_archive import with_archive
from marshal_dagster.devkafka.errors import BrokerFailedError
from marshal_dagster.devkafka.launch import CHECKPOINT, BrokerFolder, Launcher
from marshal_dagster.devkafka.properties import Node

# A fake Java: it formats a data folder; as a broker, it writes the requested archive and ends at once.
MAKES_ARCHIVE = """
echo run >> {calls}
for argument in "$@"; do
  case "$argument" in
    */server.properties)
      data="${{argument%/*}}/data"
      mkdir -p "$data"
      echo formatted > "$data/bootstrap.checkpoint" ;;
    -XX:ArchiveClassesAtExit=*) echo archive > "${{argument#*=}}" ;;
    -XX:SharedArchiveFile=*) exit 9 ;;
  esac
done
"""


class FakeJava:
    """A fake `java` that runs a given script and counts its runs."""

    def __init__(self, folder: Path) -> None:
        """Set the paths of the script and of its counter."""
        self.folder = folder
        self.calls = folder / "calls"
        self.path = folder / "java"

    def launcher(self, version: str = "17.0.1") -> Launcher:
        """Return a launcher with this Java in the given version."""
        jars = self.folder / "jars"
        jars.mkdir(exist_ok=True)
        return Launcher(Java(self.path, version, 17), (jars / "a.jar", jars / "b.jar"))

    def does(self, script: str) -> None:
        """Let the next runs execute this script."""
        self.path.write_text(f"#!/bin/sh\n{script.format(calls=self.calls)}\n", encoding="utf-8")
        self.path.chmod(0o755)

    def runs(self) -> int:
        """Return the number of runs."""
        return len(self.calls.read_text(encoding="utf-8").splitlines()) if self.calls.exists() else 0


@pytest.fixture
def java(tmp_path: Path) -> FakeJava:
    """Return a Java that creates archives."""
    fake = FakeJava(tmp_path)
    fake.does(MAKES_ARCHIVE)
    return fake


def test_an_archive_is_made_once_and_used(java: FakeJava) -> None:
    """The first launcher creates the archive and reports it; later launchers use the file and start nothing."""
    said: list[str] = []
    first = with_archive(java.launcher(), report=said.append)
    runs = java.runs()
    second = with_archive(java.launcher(), report=said.append)
    assert first == second
    assert first.archive_flag is not None
    archive = Path(first.archive_flag.removeprefix("-XX:SharedArchiveFile="))
    assert archive.read_text(encoding="utf-8") == "archive\n"
    assert runs == java.runs() == 2  # to format a data folder, and to run the broker
    assert said == ["preparing Kafka for faster starts (5 s, once)"]
    assert sorted(path.suffix for path in archive.parent.iterdir()) == [".checkpoint", ".jsa", ".lock"]


def test_later_brokers_need_no_process_that_formats_their_data(java: FakeJava, tmp_path: Path) -> None:
    """They get the first one's checkpoint and ids of their own. Those with settings are formatted by Kafka."""
    launcher = with_archive(java.launcher())
    before = java.runs()
    nodes = [Node(broker, 9090 + broker, 9190 + broker) for broker in (1, 2)]
    folders = [BrokerFolder(tmp_path / f"broker-{node.broker_id}") for node in nodes]
    for folder, node in zip(folders, nodes, strict=True):
        launcher.prepare(folder, node, nodes, "the-cluster")
        launcher.prepare(folder, node, nodes, "the-cluster")
    assert java.runs() == before
    assert {(folder.data / CHECKPOINT).read_text(encoding="utf-8") for folder in folders} == {"formatted\n"}
    written = [dict(line.split("=") for line in folder.meta.read_text().splitlines()) for folder in folders]
    assert [(meta["version"], meta["cluster.id"], meta["node.id"]) for meta in written] == [
        ("1", "the-cluster", "1"),
        ("1", "the-cluster", "2"),
    ]
    assert len({meta["directory.id"] for meta in written}) == 2

    with_settings = replace(launcher, settings={"num.partitions": "many"})
    with pytest.raises(BrokerFailedError, match="could not be set up"):  # this Java rejects the archive
        with_settings.prepare(BrokerFolder(tmp_path / "another"), nodes[0], nodes[:1], "another")
    assert java.runs() == before + 1


def test_another_java_has_an_archive_of_its_own(java: FakeJava) -> None:
    """An archive belongs to one version of Java."""
    flags = {with_archive(java.launcher(version)).archive_flag for version in ("17.0.1", "25.0.3")}
    assert len(flags - {None}) == 2


@pytest.mark.parametrize("script", ["echo run >> {calls}; exit 1", "echo run >> {calls}"])
def test_without_an_archive_brokers_start_as_they_are(java: FakeJava, script: str) -> None:
    """If the archive cannot be created, the launcher stays as it is, and later starts do not try again."""
    java.does(script)
    launcher = java.launcher()
    assert with_archive(launcher) == launcher
    runs = java.runs()
    assert runs > 0
    assert with_archive(launcher) == launcher
    assert java.runs() == runs


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(java: FakeJava) -> None:
    """If an archive cannot be stored, brokers start without it."""
    launcher = java.launcher()
    (java.folder / "class-archives").write_text("in the way", encoding="utf-8")
    assert with_archive(launcher) == launcher
    assert java.runs() == 0
