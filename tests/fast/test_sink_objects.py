"""The file sink in object stores: the rules of a sink, and what a store or the network to it does wrong.

The client is the real one; the store is `tests.object_store_server`. Rows are plain Python.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from obstore.exceptions import GenericError

from marshal_dagster import FileSink
from marshal_dagster.errors import AuthorizationError, ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks.conformance import Case
from marshal_dagster.sinks.files import commit_log, object_storage
from marshal_dagster.sinks.files.object_location import ObjectLocation
from marshal_dagster.sinks.files.object_storage import ObjectStorage
from marshal_dagster.sinks.files.parquet_footer import NotParquetError
from marshal_dagster.sinks.files.storage import PublishOutcomeUnknownError
from tests.object_outputs import AZURE_KEY, FOLDER, SECRET, ObjectOutput, options_of
from tests.object_store_server import BUCKET, Fault, Objects, running_store
from tests.sink_conformance import (
    CrashConformance,
    deliver,
    part,
    rows_of,
)
from tests.sink_kit import SHORT_CASES, OutputTarget

COMMIT = f"{FOLDER}/_marshal/commits/{1:020d}.json"


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """Return a store of this test's own. Repetitions do not wait."""
    monkeypatch.setattr(object_storage, "_PAUSES_S", (0.0, 0.0, 0.0))
    with running_store() as objects:
        yield objects


@pytest.fixture
def output(objects: Objects) -> ObjectOutput:
    """Return an empty output."""
    return ObjectOutput(objects)


# The rules of every sink


@pytest.mark.thorough
class TestCrashes(CrashConformance):
    """Writers that die, stall or run at the same time."""


@pytest.mark.thorough
@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_the_sink_conforms(case: Case, output: ObjectOutput) -> None:
    """Every short case of the kit for users passes."""
    case.check(OutputTarget(output))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "header"),
    [
        (f"s3a://{BUCKET}/{FOLDER}", ("if-none-match", "*")),
        (f"gs://{BUCKET}/{FOLDER}", ("x-goog-if-generation-match", "0")),
        (f"abfss://{BUCKET}@shop.dfs.core.windows.net/{FOLDER}", ("if-none-match", "*")),
    ],
)
def test_each_kind_of_store(objects: Objects, uri: str, header: tuple[str, str]) -> None:
    """A commit is one conditional request in the form of the store. Dead writers are cleared, and rows replaced."""
    output = ObjectOutput(objects, uri)
    assert CrashConformance.dies(output, "rows written", "dead", part(0, 0, 3))
    assert deliver(output, "a", part(0, 0, 3)).taken
    assert deliver(output, "b", part(0, 0, 3, epoch=20)).skipped
    deliver(output, "new", part(0, 1, 2, generation=20, epoch=21))
    assert output.rows() == sorted(rows_of("a", part(0, 0, 1), part(0, 2, 3)) + rows_of("new", part(0, 1, 2)))
    commits = [headers for key, headers in objects.conditional() if "/commits/" in key]
    assert len(commits) == 2
    assert all(headers[header[0]] == header[1] for headers in commits)
    sink = output.sink()
    assert sink.check() == []
    assert len(output.left()) == 2
    assert {each.startswith(uri) for each in sink.committed_uris()} == {True}
    assert [(stored.generation, stored.end) for stored in sink.describe().generations] == [(0, 3), (20, 2)]


# What can go wrong with a commit


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        [Fault.LOST_ANSWER],
        [Fault.TWICE],
        [Fault.LOST_REQUEST],
        [Fault.CONFLICT],
        [Fault.CONFLICT, Fault.LOST_ANSWER],
        [Fault.THROTTLED, Fault.THROTTLED, Fault.TWICE],
        [Fault.LATE],
    ],
    ids=str,
)
def test_a_commit_whose_answer_is_missing_or_wrong_counts_once(output: ObjectOutput, faults: list[Fault]) -> None:
    """The sink reads whose commit it is, and repeats the request if there is none."""
    output.objects.faults[:] = faults
    assert deliver(output, "a", part(0, 0, 3)).taken
    assert output.objects.let_late_ones_arrive() in ([], [False])
    assert deliver(output, "b", part(0, 0, 3, epoch=20)).skipped
    assert output.rows() == rows_of("a", part(0, 0, 3))
    assert len(output.left()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.LOST_REQUEST, Fault.CONFLICT, Fault.THROTTLED, Fault.LOST_ANSWER, Fault.LATE])
def test_another_commit_that_is_first_wins(output: ObjectOutput, fault: Fault) -> None:
    """A writer whose request fails, and whose number another writer takes, judges again and takes the rest."""
    mine, shared = part(0, 0, 3), part(1, 0, 3)
    steps: list[str] = []

    def reached(step: str) -> None:
        if step == "judged" and "judged" not in steps:
            deliver(output, "b", shared)
            output.objects.faults[:] = [fault]
        steps.append(step)

    outcome = deliver(output, "a", mine, shared, sink=output.sink(reached))
    assert (outcome.taken, outcome.skipped) == ((mine,), (shared,))
    output.objects.let_late_ones_arrive()
    assert output.rows() == rows_of("a", mine) + rows_of("b", shared)


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_that_may_come_yet_keeps_its_rows(output: ObjectOutput, arrives: bool) -> None:
    """If it is not known whether a commit was made, its rows stay until commits decide its ranges."""
    output.objects.faults[:] = [Fault.LATE, *[Fault.THROTTLED] * 9]
    with pytest.raises(PublishOutcomeUnknownError, match=f"{COMMIT[-25:]}: the store did not answer"):
        deliver(output, "a", part(0, 0, 3))
    output.objects.faults.clear()
    output.sweep()
    assert len(output.left()) == 1
    if arrives:
        assert output.objects.let_late_ones_arrive() == [True]
        assert deliver(output, "b", part(0, 0, 3, epoch=20)).skipped
    else:
        assert deliver(output, "b", part(0, 0, 3, epoch=20)).taken
        assert output.objects.let_late_ones_arrive() == [False]
    assert output.rows() == rows_of("a" if arrives else "b", part(0, 0, 3))
    output.sweep()
    assert len(output.left()) == 1


def test_a_commit_that_is_refused_is_not_repeated(output: ObjectOutput) -> None:
    """A right that is missing is reported at once, and the attempt's files are removed."""
    output.objects.faults[:] = [Fault.DENIED, Fault.DENIED]
    with pytest.raises(AuthorizationError, match=rf"output s3://{BUCKET}/shop.*the store has refused access .*403"):
        deliver(output, "a", part(0, 0, 3))
    assert output.objects.faults == [Fault.DENIED]
    assert output.left() == set()


def test_a_refusal_after_a_request_without_an_answer_proves_nothing(output: ObjectOutput) -> None:
    """The first request may still create the commit."""
    output.objects.faults[:] = [Fault.LATE, *[Fault.DENIED] * 9]
    with pytest.raises(PublishOutcomeUnknownError):
        deliver(output, "a", part(0, 0, 3))
    assert output.objects.let_late_ones_arrive() == [True]
    assert output.rows() == rows_of("a", part(0, 0, 3))


@pytest.mark.slow
def test_of_writers_at_once_one_makes_the_commit(objects: Objects) -> None:
    """All others are informed, also if the store answers some of them with a conflict."""
    uri = f"s3://{BUCKET}/{FOLDER}"
    storages = [ObjectStorage(uri, options_of(objects, uri)) for _ in range(4)]
    for storage in storages:
        storage.check()
    for turn in range(5):
        objects.faulty, objects.faults[:] = "race/", [Fault.CONFLICT, Fault.LOST_ANSWER]
        begin = threading.Barrier(4)

        def publish(number: int, turn: int = turn, begin: threading.Barrier = begin) -> bool:
            begin.wait()
            return storages[number].publish(f"race/{turn}", b"%d" % number, "")

        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(publish, range(4)))
        assert sum(made) == 1
        assert objects.content[f"{FOLDER}/race/{turn}"] == b"%d" % made.index(True)


# Before the first batch


@pytest.mark.slow
def test_a_store_that_only_pretends_is_refused(output: ObjectOutput) -> None:
    """A store that ignores the condition is found before the batch is processed. Nothing but the test is written."""
    output.objects.pretends = True
    for ask in (lambda: output.sink().verdicts([part(0, 0, 3)]), lambda: deliver(output, "a", part(0, 0, 3))):
        with pytest.raises(ConfigurationError, match="in a test a second object replaced the first"):
            ask()
    with pytest.raises(ConfigurationError, match="replaced the first"):
        output.sink().store.publish("_marshal/commits/1.json", b"x", "")
    assert output.objects.content == {}


@pytest.mark.slow
def test_a_store_is_tried_once(output: ObjectOutput) -> None:
    """Each process tries the store before its first batch, and removes the object."""
    sink = output.sink()
    for start in (0, 1, 2):
        deliver(output, "a", part(0, start, start + 1), sink=sink)
    assert len([key for key, _ in output.objects.conditional() if "/tried/" in key]) == 2
    assert not [key for key in output.objects.content if "/tried/" in key]
    output.objects.refuses.add("POST")
    output.sink().verdicts([part(0, 3, 4)])
    output.objects.refuses.clear()
    output.objects.keeps_all = True
    output.sink().verdicts([part(0, 3, 4)])


@pytest.mark.slow
def test_readers_need_no_right_to_write(output: ObjectOutput) -> None:
    """A reader neither tries the store nor writes to it."""
    deliver(output, "a", part(0, 0, 3))
    output.objects.refuses |= {"PUT", "POST", "DELETE"}
    sink = output.sink()
    assert len(sink.committed_uris()) == 2
    assert len(sink.describe().generations) == 1
    assert sink.check() == []
    with pytest.raises(AuthorizationError, match="grant the right"):
        output.sink().verdicts([part(0, 3, 4)])


@pytest.mark.slow
def test_a_listing_that_misses_a_note(output: ObjectOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may show the folder of an attempt in one listing without its note, if both were created meanwhile."""

    def reached(step: str) -> None:
        if step != "rows written":
            return
        other = output.sink()
        names, listings = other.store.names, list[list[str]]()

        def first_without_notes(folder: str) -> list[str]:
            listings.append(names(folder))
            return [name for name in listings[-1] if len(listings) > 1 or not name.endswith(".json")]

        monkeypatch.setattr(other.store, "names", first_without_notes)
        assert other.sweep() == 0
        assert len(listings[0]) == 2

    deliver(output, "a", part(0, 0, 3), sink=output.sink(reached))
    assert output.rows() == rows_of("a", part(0, 0, 3))


@pytest.mark.slow
def test_one_output_has_several_uris(output: ObjectOutput) -> None:
    """The commits of `s3://` and `s3a://`, with and without a slash at the end, are the same."""
    deliver(output, "a", part(0, 0, 3))
    for uri in (output.uri.replace("s3:", "s3a:"), f"{output.uri}/"):
        sink = FileSink(uri, "json", storage_options=options_of(output.objects, uri))
        assert sink.verdicts([part(0, 0, 3)]) == {part(0, 0, 3): Verdict.SKIP}


@pytest.mark.parametrize("name", ["endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"])
def test_an_endpoint_without_tls(objects: Objects, name: str) -> None:
    """An endpoint that begins with `http://` is reached under each of its names."""
    given = {**options_of(objects, "s3:"), "region": "us-east-1"}
    given[name] = given.pop("endpoint")
    ObjectStorage(f"s3://{BUCKET}/x", given).check()


@pytest.mark.thorough
def test_listings_of_several_pages(output: ObjectOutput) -> None:
    """All pages of a listing are read, of folders and of files."""
    output.objects.page_size = 2
    for start in range(5):
        deliver(output, "a", part(0, start, start + 1), part(1, start, start + 1), part(2, start, start + 1))
    sink = output.sink()
    assert len(sink.store.names("_marshal/attempts")) == 5
    assert len(sink.committed_uris()) == len(set(sink.committed_uris()))
    assert sink.check() == []
    assert CrashConformance.dies(output, "rows written", "dead", part(0, 5, 8), part(1, 5, 8))
    assert deliver(output, "a", part(0, 5, 8, epoch=20), part(1, 5, 8, epoch=20)).taken
    output.sweep()
    assert len(output.left()) == 6


def test_a_bucket_that_does_not_exist(output: ObjectOutput) -> None:
    """The error names it."""
    output.objects.is_missing = True
    with pytest.raises(ConfigurationError, match=f"{BUCKET} does not exist in this store. Create it"):
        output.sink().verdicts([part(0, 0, 3)])


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, objects: Objects) -> None:
    """The error comes soon, and has the reason."""
    monkeypatch.setattr("marshal_dagster.sinks.files.object_location._RETRIES", 0)
    nowhere = {**options_of(objects, "s3:"), "endpoint": "http://127.0.0.1:1"}
    with pytest.raises(UnavailableError, match=r"the store did not carry out a request .*127.0.0.1:1"):
        FileSink(f"s3://{BUCKET}/x", storage_options=nowhere).verdicts([part(0, 0, 3)])


@pytest.mark.slow
def test_no_text_has_a_secret(output: ObjectOutput, caplog: pytest.LogCaptureFixture) -> None:
    """Errors, their causes, logs and `repr` show no secret."""
    caplog.set_level(logging.DEBUG)
    store = output.sink().store
    store.check()
    texts = [repr(output.sink()), str(vars(output.sink().store)), str(store._converted(GenericError(f"key {SECRET}")))]
    output.objects.refuses.add("PUT")
    for uri in (output.uri, f"gs://{BUCKET}/x", f"abfss://{BUCKET}@shop.dfs.core.windows.net/x"):
        sink = FileSink(uri, storage_options=options_of(output.objects, uri))
        with pytest.raises(AuthorizationError) as raised:
            sink.verdicts([part(0, 0, 3)])
        error: BaseException | None = raised.value
        while error is not None:
            texts.append(str(error))
            assert error.__suppress_context__ or error.__context__ is None
            error = error.__cause__
    query = "https://shop.blob.core.windows.net/x?sv=1&sig=abc returned 403: <Error>"
    assert object_storage._short(query) == "https://shop.blob.core.windows.net/x returned 403"
    assert not [text for text in [*texts, caplog.text] if SECRET in text or AZURE_KEY in text]


# Objects that are not the sink's


@pytest.mark.slow
def test_marks_of_folders_are_no_attempts(output: ObjectOutput) -> None:
    """Hadoop's S3A leaves empty objects as marks of folders, which are neither files nor attempts."""
    deliver(output, "a", part(0, 0, 3))
    for mark in ("dead", "dead/_temporary/0"):
        output.objects.content[f"{FOLDER}/_marshal/attempts/{mark}/"] = b""
    output.objects.content[f"{FOLDER}/"] = b""
    sink = output.sink()
    assert sink.check() == []
    assert sink.vacuum(dry_run=True).obsolete == 0
    assert sink.sweep() == 0


@pytest.mark.slow
def test_files_of_no_attempt_are_removed(output: ObjectOutput) -> None:
    """A late task's files, whose attempt was cleared, are removed by the next vacuum."""
    deliver(output, "a", part(0, 0, 3))
    output.objects.content[f"{FOLDER}/_marshal/attempts/dead/marshal_range=0/part-0.json"] = b"{}"
    assert output.sink().vacuum(dry_run=True).obsolete == 1
    assert output.sink().vacuum(dry_run=False).obsolete == 1
    assert len(output.left()) == 1
    assert output.rows() == rows_of("a", part(0, 0, 3))


@pytest.mark.slow
def test_a_committed_object_that_is_missing(output: ObjectOutput) -> None:
    """`check` names it."""
    deliver(output, "a", part(0, 0, 3))
    (uri, _) = output.sink().committed_uris()
    del output.objects.content[uri.removeprefix(f"s3://{BUCKET}/")]
    assert output.sink().check() == [f"commit 1, t/0 [0, 3): file {uri} is missing"]


@pytest.mark.slow
def test_checkpoints(output: ObjectOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints replace the commits before them."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 2)
    for start in range(7):
        deliver(output, "a", part(0, start, start + 1))
    names = sorted(key.rpartition("/")[2] for key in output.objects.content if "/checkpoints/" in key)
    assert names == [f"{number:020d}.json" for number in (4, 6)]
    del output.objects.content[COMMIT]
    assert output.sink().verdicts([part(0, 7, 8)]) == {part(0, 7, 8): Verdict.TAKE}


@pytest.mark.slow
def test_an_output_that_was_copied_from_elsewhere_is_not_extended(output: ObjectOutput) -> None:
    """Its files were moved to visible places, which is not possible here."""
    deliver(output, "a", part(0, 0, 3))
    text = output.objects.content[COMMIT].replace(b'"version":1', b'"version":3,"partition_by":[]')
    output.objects.content[COMMIT] = text
    with pytest.raises(SinkRejectedError, match=r"was copied from a file system .* Begin a new output"):
        output.sink().verdicts([part(0, 3, 5)])


@pytest.mark.thorough
def test_rows_of_a_parquet_file(output: ObjectOutput, tmp_path: Any) -> None:  # noqa: ANN401
    """The footers of several objects are read at the same time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    storage = output.sink().store
    names = [f"rows/{count}.parquet" for count in range(1, 6)]
    for count, name in enumerate(names, start=1):
        pq.write_table(pa.table({"value": list(range(count))}), tmp_path / "file")
        storage.write_whole(name, (tmp_path / "file").read_bytes())
    assert storage.rows_of(names) == 15
    with pytest.raises(NotParquetError, match=r"none\.parquet is not a Parquet file: it has only 0 bytes"):
        storage.rows("none.parquet")


# Configuration


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3://", r"must be of the form s3://bucket/path"),
        ("gs:///", r"must be of the form gs://bucket/path"),
        ("s3:///orders", r"must be of the form s3://bucket/path"),
        ("s3://bucket@host/orders", r"must be of the form s3://bucket/path"),
        ("abfss://lake/orders", r"must be of the form abfss://container@account.dfs.core.windows.net/path"),
        ("abfss://lake@shop/orders", r"its host must be of the form"),
        ("gs://lake/a//b", r"must not be empty"),
        ("gs://lake/a/../b", r"must not be empty, '.' or '..'"),
    ],
)
def test_a_uri_of_another_form(uri: str, why: str) -> None:
    """The error names the form."""
    with pytest.raises(ConfigurationError, match=why):
        FileSink(uri)


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://key:{SECRET}@lake/x",
        f"s3a://key:ab/{SECRET}@lake/x",
        f"abfss://key:{SECRET}@shop.dfs.core.windows.net/x",
    ],
)
def test_a_uri_with_credentials_is_refused_without_showing_them(uri: str) -> None:
    """Credentials belong into variables or `storage_options`."""
    with pytest.raises(ConfigurationError, match="it must be of the form") as raised:
        FileSink(uri)
    assert SECRET not in str(raised.value)


class Rows:
    """A session that reads one object, or fails."""

    def __init__(self, answer: int | Exception) -> None:
        self.read, self.paths, self._answer = self, list[str](), answer

    def text(self, path: str) -> "Rows":
        """Remember the path."""
        self.paths.append(path)
        return self

    def count(self) -> int:
        """Return the number of lines."""
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (0, r"Spark does not find s3a://lake/x/note, which this process has written"),
        (ValueError("[PATH_NOT_FOUND] none"), r"Spark does not find s3a://lake/x/note"),
        (ValueError('No FileSystem for scheme "s3a"'), r"has no file system for s3a://. Add the connector"),
        (ValueError("ClassNotFoundException: S3AFileSystem"), r"Add the connector of the store"),
    ],
)
def test_spark_must_find_what_the_process_has_written(answer: int | Exception, why: str) -> None:
    """The connector and the client have settings of their own."""
    with pytest.raises(ConfigurationError, match=why):
        ObjectStorage("s3://lake/x").check_seen(Rows(answer), "note")  # type: ignore[arg-type]


def test_each_session_gets_one_request() -> None:
    """Other errors of Spark are raised as they are. After one success a session is not asked again, but another is."""
    storage, session = ObjectStorage("s3://lake/x"), Rows(1)
    with pytest.raises(ValueError, match="403"):
        storage.check_seen(Rows(ValueError("403")), "note")  # type: ignore[arg-type]
    storage.check_seen(session, "note")  # type: ignore[arg-type]
    storage.check_seen(session, "other")  # type: ignore[arg-type]
    assert session.paths == ["s3a://lake/x/note"]
    with pytest.raises(ConfigurationError, match="Spark does not find"):
        storage.check_seen(Rows(0), "note")  # type: ignore[arg-type]


def test_the_parts_of_a_uri() -> None:
    """The account of Azure is part of the host; other clouds have other hosts."""
    found = ObjectLocation.parse("abfss://data@shop.dfs.core.chinacloudapi.cn/orders/new")
    assert (found.bucket, found.prefix, found.usual_scheme) == ("data", "orders/new", "abfss")
    assert found.resolved({})._of_account() == {
        "account_name": "shop",
        "endpoint": "https://shop.blob.core.chinacloudapi.cn",
    }
    assert ObjectLocation.parse("s3://lake").prefix == ""


def test_options_that_are_refused(objects: Objects) -> None:
    """An option that the sink sets, of another kind, unknown, or for another path."""
    with pytest.raises(ConfigurationError, match="'aws_conditional_put', which the sink sets itself"):
        FileSink("s3://lake/x", storage_options={"AWS_CONDITIONAL_PUT": "disabled"})
    for name in ("account_name", "AZURE_STORAGE_ACCOUNT_NAME"):  # the URI has it, which Spark uses
        with pytest.raises(ConfigurationError, match="which the sink sets itself"):
            FileSink("abfss://lake@shop.dfs.core.windows.net/x", storage_options={name: "other"})
    with pytest.raises(ConfigurationError, match="'region' with a int"):
        FileSink("s3://lake/x", storage_options={"region": 1})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"its store cannot be opened .*colour"):
        FileSink("s3://lake/x", storage_options={"colour": "red"}).verdicts([part(0, 0, 3)])
    for path, others in (("/data/x", {}), ("s3a://lake/x", {"exclusive": "create"})):
        with pytest.raises(ConfigurationError, match="storage_options are only for object stores"):
            FileSink(path, storage_options={"endpoint": objects.url}, **others)  # type: ignore[arg-type]
    divided = FileSink(f"s3://{BUCKET}/x", partition_by=["day"], storage_options=options_of(objects, "s3:"))
    with pytest.raises(ConfigurationError, match="partition_by: files of s3://lake/x cannot be moved to folders"):
        divided.verdicts([part(0, 0, 3)])


def test_options_can_name_where_they_are(output: ObjectOutput, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:  # noqa: ANN401
    """A value can be in a variable or in a file."""
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    monkeypatch.setenv("LAKE", output.objects.url)
    given = {"endpoint": "env:LAKE", "access_key_id": "writer", "secret_access_key": f"file:{tmp_path}/secret"}
    assert FileSink(output.uri, storage_options=given).verdicts([part(0, 0, 3)])
    with pytest.raises(ConfigurationError, match=r"storage_options\['region'\] names the environment variable NONE"):
        FileSink(output.uri, storage_options={"region": "env:NONE"}).verdicts([part(0, 0, 3)])


class Conf(dict[str, str]):
    """Hadoop's settings in a session."""

    def __getattr__(self, _: str) -> Any:  # noqa: ANN401 - the way to them
        return self

    def __call__(self) -> "Conf":
        """Return the settings."""
        return self


@pytest.mark.parametrize(("settings", "scheme"), [({}, "s3a"), ({"fs.s3.impl": "EmrFileSystem"}, "s3")])
def test_spark_gets_a_scheme_that_it_knows(settings: dict[str, str], scheme: str) -> None:
    """Spark reads `s3://` by S3A, unless its Hadoop has a file system for it."""
    storage = ObjectStorage("s3://lake/x")
    session: Any = type("Session", (), {"_jsparkSession": Conf(settings)})()
    storage.use(lambda: session)
    assert storage.to_write("rows") == f"{scheme}://lake/x/rows"
