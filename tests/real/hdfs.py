"""A real HDFS: a NameNode and a DataNode, each in its own process, from PySpark's jars and Hadoop's server jars."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import pyspark

from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.ports import free_port
from marshal_dagster.spark.connector import fetch_connector
from tests.conditions import wait_until
from tests.real.services import watched
from tests.spark_archive import QUICK

SERVER = "org.apache.hadoop:hadoop-client-minicluster:3.4.1"
"""The version is that of the Hadoop that PySpark ships."""
_NODES = "org.apache.hadoop.hdfs.server"
_DEADLINE_S = 120


@contextmanager
def running_hdfs(folder: Path) -> Iterator[str]:
    """Start an HDFS in `folder`, yield its URI, then stop and remove it."""
    port = free_port()
    settings = {
        "fs.defaultFS": f"hdfs://127.0.0.1:{port}",
        "dfs.replication": "1",
        "dfs.permissions.enabled": "false",
        "dfs.namenode.name.dir": (folder / "name").as_uri(),
        "dfs.namenode.http-address": "127.0.0.1:0",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.safemode.extension": "0",
        "dfs.namenode.edits.noeditlogchannelflush": "true",  # the machine does not crash, so no edit waits for the disk
        "dfs.datanode.data.dir": (folder / "data").as_uri(),
        **{f"dfs.datanode.{name}": "127.0.0.1:0" for name in ("address", "http.address", "ipc.address")},
    }
    (folder / "conf").mkdir(parents=True)
    for name in ("core-site.xml", "hdfs-site.xml"):
        (folder / "conf" / name).write_text(_site(settings))
    started: list[subprocess.Popen[bytes]] = []
    try:
        formatting = _start(folder, "namenode.NameNode", "-format", "-nonInteractive")
        assert formatting.wait(_DEADLINE_S) == 0, (folder / "namenode.NameNode.log").read_text()[-2000:]
        started.append(_start(folder, "namenode.NameNode"))
        _wait_for(port, started[0])
        started.append(_start(folder, "datanode.DataNode"))
        _wait_for_a_data_node(folder, started[1])
        with ExitStack() as stack:
            for name, process in zip(("NameNode", "DataNode"), started, strict=True):
                log = folder / f"{name.lower()}.{name}.log"
                stack.enter_context(watched(f"the {name} of HDFS", process.pid, log))
            yield settings["fs.defaultFS"]
    finally:
        for each in reversed(started):
            each.send_signal(signal.SIGKILL)
            each.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, node: str, *arguments: str) -> subprocess.Popen[bytes]:
    jars = [*map(str, fetch_connector(SERVER)), str(Path(pyspark.__file__).parent / "jars" / "*")]
    with (folder / f"{node}.log").open("ab") as log:
        classes = ":".join([str(folder / "conf"), *jars])
        return subprocess.Popen(
            [str(find_java().executable), "-Xmx256m", *QUICK, "-cp", classes, f"{_NODES}.{node}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _site(settings: Mapping[str, str]) -> str:
    entries = (
        f"<property><name>{name}</name><value>{escape(value)}</value></property>" for name, value in settings.items()
    )
    return f"<configuration>{''.join(entries)}</configuration>"


def _wait_for(port: int, node: subprocess.Popen[bytes]) -> None:
    def is_up() -> bool:
        assert node.poll() is None, "the NameNode has ended"
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_up, "the NameNode is up", _DEADLINE_S, pause_s=0.1)


def _wait_for_a_data_node(folder: Path, node: subprocess.Popen[bytes]) -> None:
    def is_up() -> bool:
        assert node.poll() is None, "the DataNode has ended"
        return any((folder / "data").glob("current/BP-*/current"))

    wait_until(is_up, "the DataNode is up", _DEADLINE_S, pause_s=0.1)
