"""The test run reports a service that has ended, and gives files with the same services to one worker."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conditions import wait_until
from tests.real.conftest import FolderScheduling, own_ports
from tests.real.services import ended_services, watched

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_service_that_has_ended_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    """A service that runs is not named."""
    log = tmp_path / "broker.log"
    log.write_text("out of memory\n")
    with subprocess.Popen(SLEEP) as process, watched("the broker", process.pid, log, tmp_path / "missing.log"):
        assert ended_services() == []
        process.kill()
        wait_until(ended_services, "the end is noticed")
        [(title, text)] = ended_services()
    assert title == f"the broker (process {process.pid}) has ended"
    assert text == f"{log}:\nout of memory\n"
    assert ended_services() == []


@pytest.mark.parametrize(
    ("test", "scope"),
    [
        ("tests/real/test_admin.py::test_pause[1]", "tests/real/test_admin.py"),
        ("tests/real/test_sink_kafka.py::TestKills::test_one", "sink_kafka"),
        ("tests/real/test_sink_kafka_tasks.py::test_a_task", "sink_kafka"),
        ("tests/real/test_sink_hadoop.py::test_checkpoints", "HDFS"),
        ("tests/real/test_takeover_sinks.py::test_a_member", "HDFS"),
        ("tests/real/faults/test_faults.py::test_a_group", "tests/real/faults"),
        ("tests/real/faults/test_outbox_faults.py::test_an_outbox", "tests/real/faults"),
        ("tests/fast/test_docs.py::test_page", "tests/fast/test_docs.py"),
    ],
)
def test_files_with_the_same_services_run_in_one_worker(test: str, scope: str) -> None:
    """These are the files of a folder within `tests/real`, of a sink, and of HDFS."""
    scheduling = FolderScheduling.__new__(FolderScheduling)
    assert scheduling._split_scope(test) == scope


def test_workers_and_a_run_beside_them_have_ports_of_their_own() -> None:
    """So the port of a broker that a test has killed stays free for it."""
    found = range(20_000, 32_768)
    shares = [own_ports(found, worker, 3) for worker in range(3)] + [own_ports(found, None, 0)]
    assert len(set().union(*shares)) == sum(map(len, shares)) == len(found)
