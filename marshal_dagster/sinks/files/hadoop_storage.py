"""The storage of a file output on Hadoop file systems such as HDFS, through the driver's JVM.

How a commit file is created depends on the file system (docs/contributing/decisions/0011-hadoop-files.md):

- HDFS: write a temporary file and rename it without overwriting, which the NameNode does atomically.
- A file system with the capability `fs.option.create.conditional.overwrite`: create the file conditionally; it appears
  when it is closed, if no file with that name exists.
- Any other: in the way that the user selects with `exclusive`; without it the file system is refused.

What a file system or a user declares is tested before the first commit of each process. If the response to a commit is
lost, the result is determined by reading the commit file.
"""

import contextlib
import functools
import secrets
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.files.storage import PublishOutcomeUnknownError, Storage
from marshal_dagster.sinks.files.writer import escaped
from marshal_dagster.spark import connect
from marshal_dagster.spark.session import active_session
from marshal_dagster.spark.time_limit import settle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Exclusive = Literal["rename", "create"]
"""How a file system lets only one of several writers create a file, as declared by the user.

`rename`: `FileContext.rename` without overwriting is atomic. `create`: a file created without overwriting appears to
others only when it is closed, with its whole content, and only one of several writers succeeds.
"""

_RENAMING = frozenset({"hdfs"})
_CONDITIONAL = "fs.option.create.conditional.overwrite"
_PARQUET = "org.apache.parquet.hadoop"
# Arguments of Java methods.
_ALL_BELOW, _ONE = True, False
_OVERWRITE = False
_IS_SET = True

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _apart(
    method: Callable[Concatenate["HadoopStorage", _P], _R],
) -> Callable[Concatenate["HadoopStorage", _P], _R]:
    """Run a method in the storage's own thread, and raise Java's errors as `OSError`.

    If the calling thread called Java itself, an interrupt would leave a response in py4j's connection, and the next
    call would receive it as its own.
    """

    @functools.wraps(method)
    def call(self: "HadoopStorage", /, *args: _P.args, **others: _P.kwargs) -> _R:
        if self._fs is None and self._spark is None:
            # In the caller's thread, because the active session belongs to a thread.
            self._spark = self._session() if self._session else active_session(f"output {self._uri}")
        return self._thread().carry_out(lambda: _translated(method, self, *args, **others))

    return call


def _translated(method: Callable[_P, _R], /, *args: _P.args, **others: _P.kwargs) -> _R:
    try:
        return method(*args, **others)
    except _java_errors() as error:
        raise OSError(_text(error)) from error


class HadoopStorage(Storage):
    """The files below the URI of a Hadoop file system.

    A change to a folder is durable when the call returns. A closed file is as durable as its file system makes it. All
    executors use the same URI, in which no character is escaped.
    """

    def __init__(self, uri: str, session: "Callable[[], SparkSession] | None", exclusive: Exclusive | None) -> None:
        """Configure the storage; it does not access the file system before its first use.

        Args:
            uri: The URI of the folder.
            session: Returns the Spark session, by default the active one.
            exclusive: How the file system lets only one of several writers create a file, if it does not declare it.

        Raises:
            ConfigurationError: `exclusive` has another value.
        """
        if exclusive not in {None, "rename", "create"}:
            raise ConfigurationError(f"exclusive is {exclusive!r}; it must be 'rename' or 'create'")
        self._uri = uri
        self._session = session
        self._vouched: Exclusive | None = exclusive
        self._tried = False
        self._lock = threading.Lock()
        self._own: _OwnThread | None = None
        self._gateway: Any = None
        self._classes: dict[str, Any] = {}
        self._fs: Any = None
        self._root = ""
        self._spark: SparkSession | None = None

    @_apart
    def check(self) -> None:
        """Raise `ConfigurationError` if this file system does not support `publish` (`Storage.check`)."""
        self._way()

    def use(self, session: "Callable[[], SparkSession]") -> None:
        """Use this session if none is known yet (`Storage.use`)."""
        if self._spark is None and self._session is None:
            self._spark = session()

    def full(self, name: str) -> str:
        """Return the URI (`Storage.full`)."""
        return f"{self._root or self._uri}/{name}"

    def to_read(self, name: str) -> str:
        """Return the URI as Spark reads it (`Storage.to_read`)."""
        return escaped(self.full(name))

    @_apart
    def names(self, folder: str) -> list[str]:
        """Return the names in a folder (`Storage.names`)."""
        return self._listed(folder)

    @_apart
    def files_below(self, folder: str) -> list[str] | None:
        """Return the files below a folder (`Storage.files_below`)."""
        fs, path = self._opened(), self._path(folder)
        if not fs.exists(path):
            return None
        prefix = f"{self._named(path)}/"
        names: list[str] = []
        files = fs.listFiles(path, _ALL_BELOW)
        while files.hasNext():
            names.append(self._named(files.next().getPath()).removeprefix(prefix))
        return names

    @_apart
    def read(self, name: str) -> bytes | None:
        """Read a file (`Storage.read`)."""
        return self._content(name)

    @_apart
    def exists(self, name: str) -> bool:
        """Return whether a file exists (`Storage.exists`)."""
        return bool(self._opened().exists(self._path(name)))

    @_apart
    def rows(self, name: str) -> int:
        """Return the number of rows according to the file's footer (`Storage.rows`)."""
        fs = self._opened()
        source = self._java(f"{_PARQUET}.util.HadoopInputFile").fromPath(self._path(name), fs.getConf())
        reader = self._java(f"{_PARQUET}.ParquetFileReader").open(source)
        try:
            return int(reader.getRecordCount())
        finally:
            reader.close()

    @_apart
    def refresh_folder(self, folder: str) -> None:  # noqa: ARG002
        """Wait until an observer NameNode, if reads go to one, has caught up (`Storage.refresh_folder`)."""
        from pyspark.errors import UnsupportedOperationException

        with contextlib.suppress(UnsupportedOperationException):
            self._opened().msync()

    @_apart
    def write_whole(self, name: str, content: bytes) -> None:
        """Write a file under another name and rename it (`Storage.write_whole`)."""
        folder, _, own = name.rpartition("/")
        temporary = f"{folder}/.{secrets.token_hex(8)}.{own}"
        self._write(temporary, content)
        if not self._opened().rename(self._path(temporary), self._path(name)):
            raise OSError(f"{self.full(name)}: the file could not be renamed to this name from {temporary}")

    @_apart
    def publish(self, name: str, content: bytes, scratch: str) -> bool:
        """Create a file in the way that this file system supports (`Storage.publish`)."""
        put = self._way()
        fs, folder = self._opened(), self._path(name.rpartition("/")[0])
        fs.mkdirs(folder)
        # HDFS needs no test here: its rename was verified by real tests.
        is_known = self._vouched is None and fs.getScheme() in _RENAMING
        if not self._tried and not is_known:
            self._try(put, scratch)
        try:
            put(name, content, scratch)
        except _java_errors() as error:
            # The file may exist already, or be ours with the response lost, or still be created later.
            unknown = PublishOutcomeUnknownError(
                f"{self.full(name)}: whether this commit file was created is not known ({_text(error)}). Run the batch "
                "again, which skips ranges that were committed"
            )
            try:
                published = self._content(name)
            except _java_errors() as unread:
                raise unknown from unread
            if published is None:
                raise unknown from error
            return published == content
        return True

    @_apart
    def can_move(self) -> bool:
        """Return whether a rename is atomic, as HDFS and `exclusive="rename"` promise (`Storage.can_move`)."""
        return self._way() == self._by_rename

    @_apart
    def move(self, name: str, target: str) -> None:
        """Rename a file (`Storage.move`)."""
        fs = self._opened()
        fs.mkdirs(self._path(target.rpartition("/")[0]))
        try:
            self._rename(name, target)
        except _java_errors():
            if fs.exists(self._path(name)):
                raise

    @_apart
    def remove(self, name: str) -> None:
        """Remove a file (`Storage.remove`)."""
        self._opened().delete(self._path(name), _ONE)

    @_apart
    def remove_below(self, folder: str, keep: Collection[str]) -> None:
        """Remove files (`Storage.remove_below`)."""
        self._remove_below(folder, keep)

    def is_settled(self, error: BaseException) -> bool:
        """Return False after an interrupt, because the JVM continues with its call (`Storage.is_settled`)."""
        return isinstance(error, Exception) and not isinstance(error, PublishOutcomeUnknownError)

    # The following methods run in the storage's own thread.

    def _way(self) -> Callable[[str, bytes, str], None]:
        """Return the method that creates a file, and that fails if a file with that name exists."""
        fs = self._opened()
        if self._vouched is not None:
            return self._by_rename if self._vouched == "rename" else self._by_create
        if fs.getScheme() in _RENAMING:
            return self._by_rename
        if fs.hasPathCapability(self._path(""), _CONDITIONAL):
            return self._by_conditional_create
        raise ConfigurationError(
            f"output {self._uri}: its file system ({fs.getClass().getName()}) does not declare that only one of "
            "several writers can create a file, which commits need, so nothing was written. Use HDFS, a local path, or "
            "S3A of Hadoop 3.4.2 or newer; or declare it yourself with `exclusive` (docs/how-to/sinks.md)"
        )

    def _by_rename(self, name: str, content: bytes, scratch: str) -> None:
        temporary = f"{scratch}/.{secrets.token_hex(8)}.json"
        self._write(temporary, content)
        try:
            self._rename(temporary, name)
        except _java_errors():
            self._opened().delete(self._path(temporary), _ONE)
            raise

    def _rename(self, name: str, target: str) -> None:
        """Rename a file; it fails if the file does not exist, or if one with the name `target` does."""
        rename = self._java("org.apache.hadoop.fs.Options$Rename")
        plain = self._gateway.new_array(rename, 1)
        plain[0] = rename.valueOf("NONE")
        context = self._java("org.apache.hadoop.fs.FileContext").getFileContext(
            self._path(target).toUri(), self._opened().getConf()
        )
        context.rename(self._path(name), self._path(target), plain)

    def _remove_below(self, folder: str, keep: Collection[str]) -> None:
        if not keep:
            self._opened().delete(self._path(folder), _ALL_BELOW)
            return
        for name in self._listed(folder):
            below = [each.removeprefix(f"{name}/") for each in keep if each.startswith(f"{name}/")]
            if name not in keep:
                self._remove_below(f"{folder}/{name}", below)

    def _by_create(self, name: str, content: bytes, scratch: str) -> None:  # noqa: ARG002
        self._write(name, content)

    def _by_conditional_create(self, name: str, content: bytes, scratch: str) -> None:  # noqa: ARG002
        builder = self._opened().createFile(self._path(name))
        builder.must(_CONDITIONAL, _IS_SET)
        _fill(builder.build(), content)

    def _try(self, put: Callable[[str, bytes, str], None], scratch: str) -> None:
        """Create a test file twice, and refuse the file system if the second one replaces the first."""
        name = f"{scratch}/.{secrets.token_hex(8)}.tried"
        put(name, b"first", scratch)
        try:
            put(name, b"second", scratch)
        except _java_errors():
            refused = True
        else:
            refused = False
        content = self._content(name)
        self._opened().delete(self._path(name), _ONE)
        if not refused or content != b"first":
            declared = (
                f"its file system declares {_CONDITIONAL}"
                if self._vouched is None
                else f"exclusive is {self._vouched!r}"
            )
            raise ConfigurationError(
                f"output {self._uri}: {declared}, but in a test a second file replaced the first, as a second "
                "commit would do, so nothing was written. Use another file system"
            )
        self._tried = True

    def _content(self, name: str) -> bytes | None:
        stream = _unless_missing(lambda: self._opened().open(self._path(name)))
        if stream is None:
            return None
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def _write(self, name: str, content: bytes) -> None:
        _fill(self._opened().create(self._path(name), _OVERWRITE), content)

    def _listed(self, folder: str) -> list[str]:
        """Return the names in a folder, with few calls to Java however many names there are."""
        path = self._path(folder)
        statuses = _unless_missing(lambda: self._opened().listStatus(path))
        if statuses is None:
            return []
        paths = self._java("org.apache.hadoop.fs.FileUtil").stat2Paths(statuses)
        text = str(self._java("org.apache.commons.lang3.ArrayUtils").toString(paths))[1:-1]
        return f",{text}".split(f",{self._named(path)}/")[1:]

    def _path(self, name: str) -> Any:  # noqa: ANN401 - Java's
        self._opened()
        return self._java("org.apache.hadoop.fs.Path")(f"{self._root}/{name}".rstrip("/"))

    def _named(self, path: Any) -> str:  # noqa: ANN401 - Java's
        return str(path.toString())

    def _java(self, name: str) -> Any:  # noqa: ANN401 - Java's
        """Return a Java class. It is looked up once, because py4j asks the JVM for each part of its name."""
        if name not in self._classes:
            self._classes[name] = functools.reduce(getattr, name.split("."), self._gateway.jvm)
        return self._classes[name]

    def _opened(self) -> Any:  # noqa: ANN401 - Java's
        if self._fs is not None:
            return self._fs
        spark = self._spark
        assert spark is not None  # noqa: S101 - set by `_apart`
        if connect.is_connect(spark):
            raise ConfigurationError(
                f"output {self._uri}: over Spark Connect there is no JVM here to access Hadoop file systems. Use a "
                "session in the run's process or spark-submit, or mount the file system and use a local path"
            )
        from py4j.protocol import Py4JJavaError

        self._gateway = spark.sparkContext._gateway  # noqa: SLF001 - pyspark has no other
        root = self._java("org.apache.hadoop.fs.Path")(self._uri)
        try:
            fs = root.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001
        except Py4JJavaError as error:
            if not any(name in str(error) for name in ("UnsupportedFileSystem", "ClassNotFound")):
                raise
            raise ConfigurationError(
                f"output {self._uri}: this session's Hadoop does not support its file system. Add its jars and "
                "settings to the session"
            ) from error
        self._root = self._named(fs.makeQualified(root))
        self._fs = fs
        return fs

    def _thread(self) -> "_OwnThread":
        with self._lock:
            if self._own is None:
                self._own = _OwnThread()
                weakref.finalize(self, self._own.end)
            return self._own


class _OwnThread:
    """A daemon thread that runs calls one after another; a call that hangs does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_carry_out, args=(self._calls,), name="marshal-files", daemon=True).start()

    def carry_out(self, call: Callable[[], _R]) -> _R:
        """Run `call` in the thread, wait for it, and return or raise its result."""
        answer: Future[_R] = Future()
        self._calls.put(lambda: settle(answer, call))
        return answer.result()

    def end(self) -> None:
        """End the thread after all calls are done."""
        self._calls.put(None)


def _carry_out(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call


def _fill(stream: Any, content: bytes) -> None:  # noqa: ANN401 - Java's
    """Write `content` to a Java stream and close it; sync it to disk first if the file system supports that."""
    stream.write(content)
    if stream.hasCapability("hsync"):
        stream.hsync()
    stream.close()


def _java_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions as which pyspark raises Java's errors; it converts some of them to its own classes."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return Py4JError, PySparkException


def _unless_missing(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - Java's
    """Return the result of a Java `call`, or None if it fails because a file does not exist."""
    from py4j.protocol import Py4JJavaError

    try:
        return call()
    except Py4JJavaError as error:
        if str(error.java_exception.getClass().getName()) == "java.io.FileNotFoundException":
            return None
        raise


def _text(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    return str(error if java is None else java.toString()).partition("\n")[0]
