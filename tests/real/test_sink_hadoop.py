"""The file sink through Hadoop's file system layer, on a real HDFS. Most rows are written without Spark."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JError

from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks import FileSink
from marshal_dagster.sinks.conformance import Case
from marshal_dagster.sinks.files import commit_log, hadoop_storage
from marshal_dagster.sinks.files.commit_log import CommitLog
from marshal_dagster.sinks.files.hadoop_storage import Exclusive, HadoopStorage
from marshal_dagster.sinks.files.storage import PublishOutcomeUnknownError
from tests.conditions import WITHIN_S
from tests.sink_conformance import CrashConformance, deliver, never, part, rows_of
from tests.sink_kit import SHORT_CASES, OutputTarget
from tests.sink_outputs import FILE_STEPS, FakeFileSink, FileOutput, counting, hook, visible_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


OF_FILES = ("subset_replayed_by_others", "foreign_rows", "judged_when_written", "some_rows_without_offsets")
"""The cases in which files are recognised, replaced and rejected. The rules of the others depend on no storage."""

LOCAL = "file:"


class HadoopSink(FakeFileSink):
    """A sink whose replacement for Spark also writes through Hadoop, except to local files."""

    @property
    def hadoop(self) -> HadoopStorage:
        """The storage of the sink."""
        assert isinstance(self._storage, HadoopStorage)
        return self._storage

    def _put(self, name: str, text: str) -> None:
        if name.endswith(".crc"):
            return
        uri = self._storage.full(name)
        if not uri.startswith(LOCAL):
            self._storage.write_whole(name, text.encode())
            return
        path = Path(uri.removeprefix(LOCAL))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class HadoopOutput(FileOutput):
    """A folder in HDFS, or in another file system that `exclusive` declares safe."""

    def __init__(self, spark: "SparkSession", uri: str, exclusive: Exclusive | None = None) -> None:
        self.spark, self.uri, self.exclusive = spark, uri, exclusive
        self._reader = self.storage()

    def storage(self) -> HadoopStorage:
        """Return a storage, as another process opens it."""
        return HadoopStorage(self.uri, lambda: self.spark, self.exclusive)

    def sink(self, reached: Callable[[str], None] | None = None) -> HadoopSink:
        """Return a sink, as another process opens it."""
        sink = HadoopSink("hdfs://host/output")
        sink.path, sink._storage = self.uri, self.storage()
        sink._log = CommitLog(sink._storage)
        hook(sink, reached)
        return sink

    def read(self, name: str) -> str:
        """Return a file's text."""
        if self.uri.startswith(LOCAL):
            return (Path(self.uri.removeprefix(LOCAL)) / name).read_text()
        content = self._reader.read(name)
        assert content is not None
        return content.decode()

    def counted(self) -> list[Any]:
        """Return the committed files."""
        folder = "_marshal/commits"
        names = [f"{folder}/{name}" for name in sorted(self._reader.names(folder)) if name[:1] != "."]
        return [(self.place(name), others) for name, others in counting([self.read(name) for name in names])]

    def place(self, name: str) -> str:
        """Return where a committed file is."""
        visible = visible_name(name)
        return visible if self._reader.exists(visible) else f"_marshal/{name}"

    def content(self, place: Any) -> str:  # noqa: ANN401 - a name here
        """Return a file of rows."""
        return self.read(str(place))

    def attempts(self) -> list[str]:
        """Return all remaining attempts."""
        return sorted(self._reader.names("_marshal/attempts"))


@pytest.fixture
def output(spark: "SparkSession", hdfs: str) -> HadoopOutput:
    """A folder that does not exist yet, whose name must be escaped in a URI."""
    return HadoopOutput(spark, f"{hdfs}/{new_instance_id('out')}/a b%20[1],c")


@pytest.mark.parametrize("case", [case for case in SHORT_CASES if str(case) in OF_FILES], ids=str)
def test_the_sink_conforms(case: Case, spark: "SparkSession", tmp_path: Path) -> None:
    """Cases of the kit pass through Hadoop's layer over the local file system, where a rename makes a commit."""
    case.check(OutputTarget(HadoopOutput(spark, f"file:{tmp_path}/out", "rename")))


@pytest.mark.parametrize("case", [case for case in SHORT_CASES if str(case) in OF_FILES], ids=str)
def test_the_sink_conforms_on_hdfs(case: Case, output: HadoopOutput) -> None:
    """They pass on HDFS."""
    case.check(OutputTarget(output))


def test_through_spark(spark: "SparkSession", hdfs: str) -> None:
    """Spark's files are written, counted, replaced and read, in a folder whose name has special characters."""
    uri = f"{hdfs}/{new_instance_id('out')}/a b%20[1],c"
    sink = FileSink(uri, session=lambda: spark)
    ranges = [part(0, 0, 2), part(1, 0, 2)]
    assert set(sink.verdicts(ranges).values()) == {Verdict.REPLACE}
    frame = spark.createDataFrame(
        [(0, 0, "a"), (0, 1, "a"), (1, None, "b")], "partition int, offset long, value string"
    )
    assert sink.write(frame, ranges, never).rows == {0: 2, 1: 1}
    newer = part(0, 1, 2, generation=20, epoch=21)
    rows = frame.where("offset = 1").replace("a", "new")
    assert FileSink(uri).write(rows, [newer], lambda: {0: [(1, 2)]}).taken == (newer,)
    assert sorted(map(tuple, FileSink(uri).read(spark).collect()), key=str) == [
        (0, 0, "a"),
        (0, 1, "new"),
        (1, None, "b"),
    ]
    assert "have no column" in str(sink.can_replace([part(1, 0, 2, generation=20)]))
    assert {each.rpartition("/")[0] for each in sink.committed_uris()} == {uri}
    with pytest.raises(ConfigurationError, match="call `committed_uris`"):
        sink.committed_files()


def test_checkpoints(output: HadoopOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints replace the commits before them."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 2)
    for start in range(7):
        deliver(output, "a", part(0, start, start + 1))
    assert output._reader.names("_marshal/checkpoints") == [f"{number:020d}.json" for number in (4, 6)]
    output._reader.remove(f"_marshal/commits/{1:020d}.json")
    assert output.sink().verdicts([part(0, 7, 8)]) == {part(0, 7, 8): Verdict.TAKE}
    output._reader.remove(f"_marshal/commits/{7:020d}.json")
    deliver(output, "b", part(0, 6, 7))


def test_dying_at_each_step(output: HadoopOutput) -> None:
    """After a repetition each row exists once, and the files of the dead writer are deleted."""
    for number, step in enumerate(FILE_STEPS):
        mine = part(number, 0, 3)
        assert CrashConformance.dies(output, step, "dead", mine)
        outcome = deliver(output, "new", mine)
        assert bool(outcome.skipped) == (step in {"linked", "file moved", "cleared"})
        value = "dead" if outcome.skipped else "new"
        assert [row for row in output.rows() if row[0] == number] == rows_of(value, mine)
    output.sweep()
    assert output.attempts() == []
    assert all("/" not in place for place, _ in output.counted())


def test_of_writers_at_once_one_makes_the_file(output: HadoopOutput, spark: "SparkSession") -> None:
    """All other writers are informed, and the file is complete."""
    storages = [HadoopStorage(output.uri, lambda: spark, None) for _ in range(4)]
    for turn in range(5):
        begin = threading.Barrier(4)

        def publish(number: int, turn: int = turn, begin: threading.Barrier = begin) -> bool:
            begin.wait()
            return storages[number].publish(f"race/{turn}", b"%d" % number, f"scratch{number}")

        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(publish, range(4)))
        assert sum(made) == 1
        assert storages[0].read(f"race/{turn}") == b"%d" % made.index(True)


class Answers:
    """An HDFS that reports an error for the rename of a commit, which was done before or may be done later."""

    def __init__(self, output: HadoopOutput, *, before: bool) -> None:
        self.sink = output.sink()
        self._real, self._before = self.sink.hadoop._by_rename, before
        self.late: list[Callable[[], None]] = []
        self.sink.hadoop._by_rename = self._renamed  # type: ignore[method-assign]

    def _renamed(self, name: str, content: bytes, scratch: str) -> None:
        if self._before:
            self._real(name, content, scratch)
        else:
            self.late.append(lambda: self._real(name, content, scratch))
        raise Py4JError("connection lost")


def test_a_commit_whose_answer_was_lost_counts_once(output: HadoopOutput) -> None:
    """The sink reads the file to find out whose commit it is."""
    assert deliver(output, "a", part(0, 0, 3), sink=Answers(output, before=True).sink).taken
    assert output.rows() == rows_of("a", part(0, 0, 3))


def test_a_commit_that_may_come_yet_keeps_its_rows(output: HadoopOutput) -> None:
    """If it is unknown whether a commit was made, no files are deleted. If it succeeds later, it is complete."""
    answers = Answers(output, before=False)
    with pytest.raises(PublishOutcomeUnknownError, match="connection lost"):
        deliver(output, "a", part(0, 0, 3), sink=answers.sink)
    output.sweep()
    answers.late[0]()
    assert deliver(output, "b", part(0, 0, 3, epoch=20)).skipped
    assert output.rows() == rows_of("a", part(0, 0, 3))


def test_a_commit_that_comes_too_late_adds_nothing(output: HadoopOutput) -> None:
    """The number of the late commit is already used, and the files that it names are deleted."""
    answers = Answers(output, before=False)
    with pytest.raises(PublishOutcomeUnknownError):
        deliver(output, "a", part(0, 0, 3), sink=answers.sink)
    assert deliver(output, "b", part(0, 0, 3, epoch=20)).taken
    with pytest.raises(Py4JError, match="FileAlreadyExists"):
        answers.late[0]()
    assert output.rows() == rows_of("b", part(0, 0, 3))


def test_an_interrupt_while_the_jvm_commits(output: HadoopOutput) -> None:
    """The JVM continues. The files of its possible commit are kept, and the next call gets its own answer."""
    sink = output.sink()
    began, go_on = threading.Event(), threading.Event()
    real, mine = sink.hadoop._by_rename, part(0, 0, 3)

    def slow(name: str, content: bytes, scratch: str) -> None:
        began.set()
        assert go_on.wait(WITHIN_S)
        real(name, content, scratch)

    def interrupted(*_: object) -> bool:
        # An interrupt of the waiting thread looks like this.
        assert began.wait(WITHIN_S)
        raise KeyboardInterrupt

    sink.hadoop._by_rename = slow  # type: ignore[method-assign]
    real_publish = sink.hadoop.publish
    with ThreadPoolExecutor(1) as pool:

        def publish(name: str, content: bytes, scratch: str) -> bool:
            pool.submit(real_publish, name, content, scratch)
            return interrupted()

        sink.hadoop.publish = publish  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            deliver(output, "a", mine, sink=sink)
        go_on.set()
    assert deliver(output, "b", mine, sink=sink).skipped
    assert output.rows() == rows_of("a", mine)


# Other file systems


@pytest.fixture
def elsewhere(spark: "SparkSession", tmp_path: Any) -> Callable[..., HadoopStorage]:  # noqa: ANN401
    """Storages of a file system without known guarantees for concurrent writers: Hadoop's local file system."""

    def opened(exclusive: Any = None) -> HadoopStorage:  # noqa: ANN401
        return HadoopStorage(f"file:{tmp_path}/out", lambda: spark, exclusive)

    return opened


def test_a_file_system_of_which_nothing_is_known_is_refused(elsewhere: Callable[..., HadoopStorage]) -> None:
    """The error comes before any processing and states what to do. No file is created."""
    for ask in (lambda: elsewhere().check(), lambda: elsewhere().publish("a", b"", "s")):
        with pytest.raises(ConfigurationError, match=r"LocalFileSystem.* does not declare .* declare it"):
            ask()
    assert elsewhere().names("") == []


@pytest.mark.parametrize("way", ["rename", "create"])
def test_one_that_is_vouched_for_is_tried(
    elsewhere: Callable[..., HadoopStorage], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Such a file system works, but it is rejected if a test file can be replaced by a second one."""
    storage = elsewhere(way)
    assert storage.publish("a", b"1", "s")
    assert not storage.publish("a", b"2", "s")
    assert storage.read("a") == b"1"
    assert storage.names("s") == []

    monkeypatch.setattr(HadoopStorage, f"_by_{way}", _overwrites)
    with pytest.raises(ConfigurationError, match=f"exclusive is '{way}'.* a second file replaced the first"):
        elsewhere(way).publish("b", b"1", "s")
    assert elsewhere().read("b") is None


def test_one_that_vouches_for_itself_is_tried(
    elsewhere: Callable[..., HadoopStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file system declares conditional writes but its store does not support them, nothing is committed."""
    monkeypatch.setattr(hadoop_storage, "_CONDITIONAL", "fs.capability.paths.permissions")  # declared here
    monkeypatch.setattr(HadoopStorage, "_by_conditional_create", HadoopStorage._by_create)
    storage = elsewhere()
    assert storage.publish("a", b"1", "s")
    assert not storage.publish("a", b"2", "s")
    assert storage.names("s") == []
    monkeypatch.setattr(HadoopStorage, "_by_conditional_create", _overwrites)
    with pytest.raises(ConfigurationError, match=r"its file system declares .* a second file replaced the first"):
        elsewhere().publish("b", b"1", "s")
    assert elsewhere().read("b") is None
    assert elsewhere().names("s") == []


def _overwrites(self: HadoopStorage, name: str, content: bytes, scratch: str) -> None:  # noqa: ARG001
    stream = self._opened().create(self._path(name), True)
    stream.write(content)
    stream.close()


def test_one_that_is_not_there(spark: "SparkSession") -> None:
    """Each error is one clear line."""
    for uri in ("wasb://box@host/x", "nowhere://host/x"):
        with pytest.raises(ConfigurationError, match=f"{uri}: .*does not support its file system. Add its jars"):
            FileSink(uri, session=lambda: spark).verdicts([part(0, 0, 3)])
    with pytest.raises(ConfigurationError, match="exclusive is 'link'"):
        FileSink("hdfs://host/x", exclusive="link")  # type: ignore[arg-type]
    with pytest.raises(SinkRejectedError, match="is damaged"):
        commit_log.load(_Damaged(), "x")  # type: ignore[arg-type]


class _Damaged:
    def read(self, _: str) -> bytes:
        return b"{"

    def full(self, name: str) -> str:
        return name
