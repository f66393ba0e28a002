"""Members of two versions in a group: the wheel of an earlier commit and this code (docs/how-to/upgrading.md)."""

import io
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import RANGES
from tests.conditions import WITHIN_S
from tests.real.conftest import MakeTopic
from tests.real.test_kill_points_sinks import Files
from tests.real.test_takeover_sinks import (
    HEARTBEAT_INTERVAL_MS,
    MESSAGES,
    PARTITIONS,
    Site,
    Worker,
    input_rows,
)

PREVIOUS = "39e7505408499453429311620dcaa5b12422e922"
"""The last commit without range claims: it knows neither their records nor the settings' features."""
ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-P")
"""Python that imports nothing from its working directory."""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> bytes:
    """Run a command. If it fails, show its stderr."""
    result = subprocess.run(command, env=environment, capture_output=True, timeout=WITHIN_S, check=False)
    assert result.returncode == 0, f"{command}: {result.stderr.decode()}"
    return result.stdout


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from: the earlier commit's library, installed from its wheel, and its own tests."""
    if run("git", "-C", ROOT, "rev-parse", "--is-shallow-repository") != b"false\n":
        pytest.skip(f"this clone lacks the history that holds {PREVIOUS}: git fetch --unshallow")
    folder = tmp_path_factory.mktemp("previous")
    source, wheel, installed = folder / "source", folder / "wheel", folder / "installed"
    with tarfile.open(fileobj=io.BytesIO(run("git", "-C", ROOT, "archive", PREVIOUS))) as archive:
        archive.extractall(source, filter="data")
    run(*PYTHON, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", wheel, source)
    pip = (*PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", installed, *wheel.iterdir())
    (source / "tests").rename(installed / "tests")
    where = run(*PYTHON, "-c", "import marshal_dagster as m; print(m.__file__)", environment=importing(installed))
    assert Path(where.decode().strip()).is_relative_to(installed)
    return installed


def importing(folder: Path) -> dict[str, str]:
    """Return an environment in which Python imports from `folder` first."""
    return {**os.environ, "PYTHONPATH": str(folder)}


class Group(Site):
    """A group whose members may have different versions."""

    def start_version(self, folder: Path, output: Files, **orders: object) -> Worker:
        """Start a member whose library and worker code are imported from `folder`."""
        reported = self.orders(output, with_spark=False, max_records=MESSAGES // 4, **orders)
        process = subprocess.Popen(
            [*PYTHON, "-m", "tests.real.sink_worker", reported],
            env=importing(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return Worker(process)


@pytest.fixture
def group(
    connection: KafkaConnection,
    coordination_topic: str,
    topics: Topics,
    topic: MakeTopic,
    fill: Callable[[str, int, int], None],
) -> Iterator[Group]:
    """A group without members yet, and a filled data topic."""
    name = topic(PARTITIONS)
    fill(name, PARTITIONS, MESSAGES)
    group = Group(connection, coordination_topic, topics, name)
    yield group
    group.close()


def ranges(line: str) -> set[str]:
    """Return the ranges that a member reports as claimed."""
    found = set(re.findall(r"\S+ \[\d+, \d+\)", line))
    assert found
    return found


def test_each_version_takes_over_from_the_other(previous: Path, group: Group, tmp_path: Path) -> None:
    """Each version replays the other's open plan, treats its rows as written, and continues after its commits."""
    output = Files(tmp_path / "output")
    left: set[str] = set()
    for folder in (previous, ROOT):
        member = group.start_version(folder, output, halt_when_written=True)
        if left:
            assert ranges(member.wait_until_reported("claimed")) == left
            member.wait_until_reported("halted")
            member.go_on()
            member.wait_until_reported("committed")
        left = ranges(member.wait_until_reported("claimed"))
        member.wait_until_reported("halted")
        member.signal(signal.SIGKILL)
        member.wait()
        group.let_claims_become_stale()
    last = group.start_version(previous, output)
    assert ranges(last.wait_until_reported("claimed")) == left
    assert last.wait() == 0
    assert output.rows() == input_rows()


def test_the_earlier_version_leaves_a_group_alone_whose_settings_it_does_not_know(
    previous: Path, group: Group, tmp_path: Path
) -> None:
    """The earlier version does not claim in a group with a later feature, and its error names the feature."""
    settings = GroupSettings(HEARTBEAT_INTERVAL_MS, RuleSet.NATIVE, DeliveryMode.EFFECTIVELY_ONCE, (RANGES,))
    with closing(KafkaLog(group.connection, group.coordination_topic, HEARTBEAT_INTERVAL_MS)) as log:
        member = Member(group.group, "new", new_instance_id("new"))
        Claimer(Rationalizer(log), member, group.topic, settings).ensure_group_settings()
    earlier = group.start_version(previous, Files(tmp_path / "output"))
    assert "ranges" in earlier.wait_until_reported("failed SettingsDiffer")
    assert earlier.wait() == 1
