"""Check the download of Kafka's jars with a fake Ivy: it is complete or fails, runs once, and reports clearly."""

import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from marshal_dagster._internal.java import Java
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.devkafka import KAFKA_VERSION, ensure_jars
from marshal_dagster.errors import ConfigurationError, UnavailableError
from tests.conditions import WITHIN_S

NAMES = (
    f"kafka-clients-{KAFKA_VERSION}.jar",
    f"kafka_2.13-{KAFKA_VERSION}.jar",
    "log4j-slf4j-impl-2.25.4.jar",
    "slf4j-api-1.7.36.jar",
)
# A fake Java: it records its arguments, then copies the sample jar to each name, where Ivy would put it.
FETCH = """
echo "$@" >> {calls}
while [ "$1" != "-retrieve" ]; do shift; done
for name in {names}; do cp {sample} "$(dirname "$2")/$name"; done
"""


class FakeIvy:
    """A fake `java` that runs a given script instead of Ivy, and records its runs."""

    def __init__(self, folder: Path) -> None:
        """Create the script's folder and one small real jar."""
        folder.mkdir()
        self.calls = folder / "calls"
        self.sample = folder / "sample.jar"
        with zipfile.ZipFile(self.sample, "w") as jar:
            jar.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\n")
        self.launcher = folder / "java"
        self.java = Java(self.launcher, "17.0.1", 17)
        self.does(self.fetching())

    def fetching(self, names: tuple[str, ...] = NAMES) -> str:
        """Return a script that fetches jars of these names."""
        return FETCH.format(calls=self.calls, names=" ".join(names), sample=self.sample)

    def does(self, script: str) -> None:
        """Let the next runs execute this script."""
        self.launcher.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        self.launcher.chmod(0o755)

    def runs(self) -> list[str]:
        """Return the arguments of each run that fetched."""
        return self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []


@pytest.fixture
def ivy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIvy:
    """Return a fake Java with an empty cache."""
    monkeypatch.setenv("MARSHAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MARSHAL_IVY_SETTINGS", raising=False)
    return FakeIvy(tmp_path / "fake")


def kafka_folder() -> Path:
    """Return the folder that will contain the jars."""
    return cache_folder() / f"kafka-{KAFKA_VERSION}"


def failure(ivy: FakeIvy, timeout_s: float = 60.0) -> str:
    """Fetch the jars, and return the message of the failure, which is a single line."""
    with pytest.raises(UnavailableError) as failed:
        ensure_jars(ivy.java, timeout_s=timeout_s)
    message = str(failed.value)
    assert "\n" not in message
    return message


def test_jars_are_fetched_once_and_reported_once(ivy: FakeIvy) -> None:
    """A second call uses the jars of the first one, starts nothing and reports nothing."""
    said: list[str] = []
    first = ensure_jars(ivy.java, report=said.append)
    second = ensure_jars(ivy.java, report=said.append)
    assert [jar.name for jar in first] == list(NAMES)
    assert all(jar.parent == kafka_folder() / "jars" for jar in first)
    assert first == second
    assert len(ivy.runs()) == 1
    assert said == [f"fetching Kafka {KAFKA_VERSION} (44 MB, once)"]


def test_ivy_is_given_coordinates_and_keeps_its_own_cache_out_of_the_users(ivy: FakeIvy) -> None:
    """The module file only has Maven coordinates; Ivy's folders are in the cache, and are deleted afterwards."""
    ensure_jars(ivy.java)
    (arguments,) = ivy.runs()
    partial = rf"{cache_folder()}/kafka-{KAFKA_VERSION}\.partial-\w+"
    assert re.match(rf"-Divy\.default\.ivy\.user\.dir=({partial}/ivy) -jar .* -cache \1 ", arguments)
    assert "-settings" not in arguments
    module = (kafka_folder() / "ivy.xml").read_text(encoding="utf-8")
    assert f'org="org.apache.kafka" name="kafka_2.13" rev="{KAFKA_VERSION}"' in module
    assert "://" not in module
    assert not (kafka_folder() / "ivy").exists()
    assert sorted(path.name for path in cache_folder().iterdir()) == [
        f"kafka-{KAFKA_VERSION}",
        f"kafka-{KAFKA_VERSION}.lock",
    ]


def test_a_mirror_can_be_named_by_an_ivy_settings_file(ivy: FakeIvy, monkeypatch: pytest.MonkeyPatch) -> None:
    """MARSHAL_IVY_SETTINGS is passed on to Ivy."""
    monkeypatch.setenv("MARSHAL_IVY_SETTINGS", "/etc/mirror.xml")
    ensure_jars(ivy.java)
    assert " -settings /etc/mirror.xml " in ivy.runs()[0]


def test_the_manifest_lists_each_jar_with_its_size(ivy: FakeIvy) -> None:
    """The jars can be checked later by name and size."""
    jars = ensure_jars(ivy.java)
    manifest = json.loads((kafka_folder() / "manifest.json").read_text(encoding="utf-8"))
    assert manifest == {"jars": {jar.name: jar.stat().st_size for jar in jars}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "jars" / NAMES[0]).write_bytes(b"PK"), f"{NAMES[0]} has 2 bytes instead of "),
        (lambda folder: (folder / "jars" / NAMES[3]).unlink(), f"{NAMES[3]} is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "its manifest is missing or incomplete"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "its manifest is missing or incomplete"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "its manifest is missing or incomplete"),
        (lambda folder: (folder / "manifest.json").write_text('{"jars": {}}'), "its manifest is missing or"),
    ],
)
def test_a_damaged_cache_is_said_and_fetched_anew(ivy: FakeIvy, damage: Callable[[Path], object], words: str) -> None:
    """Jars that do not match the manifest are replaced, and one line reports the reason."""
    ensure_jars(ivy.java)
    damage(kafka_folder())
    said: list[str] = []
    jars = ensure_jars(ivy.java, report=said.append)
    assert all(zipfile.is_zipfile(jar) for jar in jars)
    assert len(jars) == len(NAMES)
    assert len(ivy.runs()) == 2
    assert len(said) == 1
    assert said[0].startswith(f"{kafka_folder()} is damaged ({words}")


def test_a_damaged_cache_that_cannot_be_fetched_anew_is_an_error(ivy: FakeIvy) -> None:
    """Damaged jars are never returned."""
    ensure_jars(ivy.java)
    (kafka_folder() / "jars" / NAMES[0]).write_bytes(b"PK")
    ivy.does("echo 'java.net.ConnectException: Connection refused'; exit 1")
    assert "java.net.ConnectException: Connection refused" in failure(ivy)


def test_a_failing_ivy_is_reported_by_its_own_words_and_its_log(ivy: FakeIvy) -> None:
    """The message has the most informative line, and what to try; the final folder does not exist."""
    ivy.does(
        "echo ':: loading settings'; echo '\tmodule not found: org.apache.kafka#kafka_2.13'\n"
        "echo '\tServer access error at url x (java.net.UnknownHostException: x)'; exit 1"
    )
    message = failure(ivy)
    assert message.startswith(
        f"Kafka {KAFKA_VERSION} could not be fetched (Server access error at url x (java.net.UnknownHostException: x));"
    )
    assert "check the network and try again, or set MARSHAL_IVY_SETTINGS" in message
    log = Path(message.rpartition(": ")[2])
    assert "module not found" in log.read_text(encoding="utf-8")
    assert not kafka_folder().exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [("exit 3", "Ivy ended with exit code 3"), ("echo one; echo two; exit 1", "two"), ("kill -9 $$", "code -9")],
)
def test_an_ivy_that_says_little_still_gives_a_reason(ivy: FakeIvy, script: str, words: str) -> None:
    """Without an informative line, the message has the last line, or the exit code."""
    ivy.does(script)
    assert words in failure(ivy)


def test_a_failed_fetch_can_be_tried_again(ivy: FakeIvy) -> None:
    """The remains of a failed or killed download do not affect the next one."""
    ivy.does(ivy.fetching(NAMES[:2]) + "exit 1")
    failure(ivy)
    ivy.does(ivy.fetching())
    assert len(ensure_jars(ivy.java)) == len(NAMES)
    assert list(cache_folder().glob("*.partial-*")) == []


def test_a_success_without_the_needed_jars_is_not_whole(ivy: FakeIvy) -> None:
    """Ivy's exit code is not enough: all jars must exist."""
    ivy.does(ivy.fetching(NAMES[:2]))
    assert f"the download of Kafka {KAFKA_VERSION} is incomplete ({NAMES[2]} is missing)" in failure(ivy)
    assert not kafka_folder().exists()


def test_a_jar_cut_short_is_not_whole(ivy: FakeIvy) -> None:
    """An incomplete zip file is refused before it gets its final name."""
    ivy.sample.write_bytes(ivy.sample.read_bytes()[:40])
    assert f"({NAMES[0]} is not a complete jar)" in failure(ivy)
    assert not kafka_folder().exists()


@pytest.mark.slow
def test_a_fetch_that_hangs_ends_at_its_time_out(ivy: FakeIvy) -> None:
    """A download that does not end is stopped, and the message shows the timeout."""
    ivy.does("exec sleep 60")
    assert "took more than 0.3 s" in failure(ivy, timeout_s=0.3)


@pytest.mark.slow
def test_many_at_once_fetch_once(ivy: FakeIvy) -> None:
    """Simultaneous calls wait for the one that downloads, in this process and in others."""
    ivy.does("sleep 0.3" + ivy.fetching())
    program = (
        "import sys; from pathlib import Path\n"
        "from marshal_dagster.devkafka import ensure_jars; from marshal_dagster._internal.java import Java\n"
        "print(len(ensure_jars(Java(Path(sys.argv[1]), '17', 17))))"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", program, ivy.launcher], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(ensure_jars(ivy.java)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.communicate(timeout=WITHIN_S)[0].strip() for other in others] == [str(len(NAMES))] * 2
    assert found == [len(NAMES)] * 3
    assert len(ivy.runs()) == 1


def test_a_cache_that_cannot_be_written_is_said(ivy: FakeIvy, tmp_path: Path) -> None:
    """If a file is in the place of the cache folder, the one-line message has the variable that moves the cache."""
    (tmp_path / "cache").write_text("in the way", encoding="utf-8")
    assert "set MARSHAL_CACHE" in failure(ivy)


def test_without_pyspark_the_missing_ivy_is_said(ivy: FakeIvy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message shows what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'marshal-dagster\[spark\]'"):
        ensure_jars(ivy.java)


@pytest.mark.slow
def test_looking_for_ivy_does_not_import_pyspark() -> None:
    """PySpark's folder is found without an import."""
    program = (
        "import sys; import marshal_dagster.devkafka\n"
        "from marshal_dagster._internal import jars; print(jars._ivy().name)\n"
        "sys.exit('pyspark' in sys.modules or 'confluent_kafka' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ivy-")
