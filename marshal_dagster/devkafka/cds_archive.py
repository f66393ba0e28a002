"""A class data sharing (CDS) archive of Kafka's classes, with which a broker starts in half the time.

The archive fits one Java and one set of jars. A broker that is started and stopped only for this creates it, once. Its
formatted data folder saves later brokers a JVM that formats theirs. Without an archive, or with one that the JVM
rejects, brokers start more slowly. The archive is stored beside the jars, so that it is deleted together with them.
"""

import hashlib
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from marshal_dagster._internal import processes
from marshal_dagster._internal.file_lock import locked
from marshal_dagster._internal.jars import Report
from marshal_dagster._internal.ports import free_port
from marshal_dagster.devkafka.errors import DevKafkaError
from marshal_dagster.devkafka.launch import CHECKPOINT, BrokerFolder, Launcher
from marshal_dagster.devkafka.properties import Node
from marshal_dagster.devkafka.readiness import brokers_known_to
from marshal_dagster.devkafka.state import new_uuid

_MADE_WITHIN_S = 60.0


def with_archive(launcher: Launcher, *, report: Report | None = None) -> Launcher:
    """Return `launcher` with a class archive; create the archive first if there is none (about 5 s, once)."""
    parts = [CHECKPOINT, str(launcher.java.executable.resolve()), launcher.java.version, *map(str, launcher.jars)]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    archive = launcher.jars[0].parent.with_name("class-archives") / f"{key}.jsa"
    try:
        if not archive.exists():
            with locked(archive.with_suffix(".lock"), _MADE_WITHIN_S):
                if not archive.exists():
                    _make(archive, launcher, report)
        # An empty file records that creating it failed, so that it is not tried again at each start.
        usable = archive.stat().st_size > 0
    except OSError:
        usable = False
    if not usable:
        return launcher
    checkpoint = archive.with_suffix(".checkpoint")
    return replace(
        launcher,
        archive_flag=f"-XX:SharedArchiveFile={archive}",
        checkpoint=checkpoint if checkpoint.exists() else None,
    )


def _make(archive: Path, launcher: Launcher, report: Report | None) -> None:
    if report is not None:
        report("preparing Kafka for faster starts (5 s, once)")
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="making-") as place:
        made = Path(place) / archive.name
        with suppress(DevKafkaError):
            _run_once(Path(place), launcher, f"-XX:ArchiveClassesAtExit={made}")
        if made.is_file():
            with suppress(FileNotFoundError):
                (_folder_in(Path(place)).data / CHECKPOINT).replace(archive.with_suffix(".checkpoint"))
            made.replace(archive)
        else:
            archive.touch()


def _folder_in(place: Path) -> BrokerFolder:
    return BrokerFolder(place / "broker")


def _run_once(place: Path, launcher: Launcher, flag: str) -> None:
    port = free_port()
    node = Node(1, port, free_port({port}))
    folder = _folder_in(place)
    bare = Launcher(launcher.java, launcher.jars)
    bare.prepare(folder, node, [node], new_uuid())
    mark = replace(bare, archive_flag=flag).start(folder)
    try:
        deadline = time.monotonic() + _MADE_WITHIN_S
        while not brokers_known_to(port) and processes.is_alive(mark) and time.monotonic() < deadline:
            time.sleep(processes.POLL_S)
    finally:
        processes.stop([mark], _MADE_WITHIN_S)
