"""The storage of a file output in an object store: S3 and stores like it, Google Cloud Storage, or Azure.

The run's process reaches the store with obstore, a client for all of them; Spark writes and reads rows through Hadoop.
A commit file is created by one conditional request (docs/contributing/decisions/0025-object-stores.md). Each process
first tries whether the store refuses a second one. If a response is lost, the content of the commit file shows whose it
is.

Files are never moved, because a store copies an object to give it another name.
"""

import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster.errors import AuthorizationError, ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.sinks.files.commit_log import FOLDER
from marshal_dagster.sinks.files.object_location import ObjectLocation, StoreOptions
from marshal_dagster.sinks.files.parquet_footer import rows_in_footer
from marshal_dagster.sinks.files.storage import PublishOutcomeUnknownError, Storage
from marshal_dagster.sinks.files.writer import NOT_SEEN, escaped
from marshal_dagster.sinks.hidden_secrets import text_without
from marshal_dagster.spark import connect

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from pyspark.sql import SparkSession

_TRIED: Final = f"{FOLDER}/tried"
_PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""The pauses between repetitions of a conditional request whose result is not known, in seconds."""
_LONGEST_S: Final = 60.0
"""After how many seconds no request is repeated."""
_AT_ONCE: Final = 16
_QUERY: Final = re.compile(r"\?[^\s)]*")
_NO_FILE_SYSTEM: Final = ("UnsupportedFileSystem", "ClassNotFound", "No FileSystem for scheme")


class ObjectStorage(Storage):
    """The files of one output in an object store. An object is durable and seen by all when its request is answered."""

    def __init__(self, uri: str, options: StoreOptions | None = None) -> None:
        """Configure the storage; it does not access the store before its first use.

        Args:
            uri: The URI of the output, such as `s3://bucket/orders`.
            options: Settings of the store's client, as for `FileSink`.

        Raises:
            ConfigurationError: The URI or an option is not valid.
        """
        self._location = ObjectLocation.parse(uri)
        self._uri = uri
        self._options = self._location.checked_options(options or {})
        self._secrets: list[str] = []
        self._stores: tuple[ObjectStore, ObjectStore] | None = None
        self._scheme = self._location.usual_scheme
        self._is_tried = False
        self._seen_by: WeakSet[SparkSession] = WeakSet()

    def check(self) -> None:
        """Try once whether the store refuses a second object of one name (`Storage.check`)."""
        if self._is_tried:
            return
        name = f"{_TRIED}/{secrets.token_hex(16)}"
        try:
            is_created = self._create(name, b"first")
            is_replaced = self._create(name, b"second")
        except PublishOutcomeUnknownError as error:  # nothing was committed: only the reason counts
            raise error.__cause__ or error from None
        content = self.read(name)
        # The result is known, whether the object goes or stays. S3 reports a missing right like an error of its own.
        with suppress(AuthorizationError, UnavailableError):
            self.remove(name)
        if not is_created or is_replaced or content != b"first":
            raise ConfigurationError(
                f"output {self._uri}: in a test a second object replaced the first, as a second commit would do, so "
                "nothing was written. Use a store that knows conditional writes, or write to an Iceberg or Delta table"
            )
        self._is_tried = True

    def use(self, session: "Callable[[], SparkSession]") -> None:
        """Keep `s3://` for Spark if the session's Hadoop has a file system for it (`Storage.use`)."""
        if self._location.scheme == "s3":
            self._scheme = "s3" if _knows_s3(session()) else self._location.usual_scheme

    def full(self, name: str) -> str:
        """Return the URI (`Storage.full`)."""
        return f"{self._uri}/{name}"

    def to_write(self, name: str) -> str:
        """Return the URI as Spark writes to it (`Storage.to_write`)."""
        return f"{self._scheme}:{self.full(name).partition(':')[2]}"

    def to_read(self, name: str) -> str:
        """Return the URI as Spark reads it (`Storage.to_read`)."""
        return escaped(self.to_write(name))

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder (`Storage.names`)."""
        store = self._store()
        prefix = self._key(folder)
        with self._known_errors(), self._bucket():
            found = store.list_with_delimiter(prefix)
        keys = [*found["common_prefixes"], *(item["path"] for item in found["objects"])]
        return [key.removeprefix(f"{prefix}/") for key in keys if key.startswith(f"{prefix}/")]

    def files_below(self, folder: str) -> list[str]:
        """Return the objects below a folder, relative to it; empty if there are none (`Storage.files_below`).

        Hadoop marks a folder by an empty object. The sink's own files are never empty.
        """
        return [name for name, size in self._listed(folder) if size]

    def read(self, name: str) -> bytes | None:
        """Read an object (`Storage.read`)."""
        store = self._store()
        try:
            with self._known_errors():
                return bytes(store.get(self._key(name)).bytes())
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """Return whether an object exists (`Storage.exists`)."""
        return self._size(name) is not None

    def rows(self, name: str) -> int:
        """Return the number of rows according to the file's footer (`Storage.rows`)."""
        store = self._store()

        def read(start: int, end: int) -> bytes:
            with self._known_errors():
                return bytes(store.get_range(self._key(name), start=start, end=end))

        return rows_in_footer(self.full(name), self._size(name) or 0, read)

    def rows_of(self, names: Sequence[str]) -> int:
        """Return the number of rows of several files, which are read at the same time (`Storage.rows_of`)."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return sum(pool.map(self.rows, names))

    def has_files(self, folder: str) -> bool:
        """Return whether there is an object below a folder that is no mark of Hadoop's (`Storage.has_files`)."""
        return bool(self.files_below(folder))

    def refresh_folder(self, folder: str) -> None:
        """Do nothing, because a store shows each object at once (`Storage.refresh_folder`)."""

    def write_whole(self, name: str, content: bytes) -> None:
        """Write an object (`Storage.write_whole`)."""
        store = self._store()
        with self._known_errors(), self._bucket():
            store.put(self._key(name), content, use_multipart=False)

    def publish(self, name: str, content: bytes, scratch: str) -> bool:  # noqa: ARG002
        """Create an object with a conditional request (`Storage.publish`)."""
        self.check()
        return self._create(name, content)

    def can_move(self) -> bool:
        """Return False, because a store copies an object to give it another name (`Storage.can_move`)."""
        return False

    def move(self, name: str, target: str) -> None:
        """Raise `NotImplementedError`: `FileSink` moves no files in an object store (`Storage.move`)."""
        raise NotImplementedError(f"{self.full(name)} cannot be moved to {target}")

    def remove(self, name: str) -> None:
        """Remove an object (`Storage.remove`)."""
        self._remove([self._key(name)])

    def remove_below(self, folder: str, keep: Collection[str]) -> None:
        """Remove objects (`Storage.remove_below`)."""
        kept = set(keep)
        self._remove([self._key(f"{folder}/{name}") for name, _ in self._listed(folder) if name not in kept])

    def check_seen(self, spark: "SparkSession", name: str) -> None:
        """Raise `ConfigurationError` if Spark does not read what this process wrote (`Storage.check_seen`).

        The endpoint and the credentials of Spark's connector are other settings than those of this process.
        """
        if spark in self._seen_by:
            return
        try:
            is_seen = bool(spark.read.text(self.to_read(name)).count())
        except Exception as error:
            if any(word in str(error) for word in _NO_FILE_SYSTEM):
                raise ConfigurationError(
                    f"output {self._uri}: Spark's session has no file system for {self._scheme}://. Add the connector "
                    "of the store to the session, such as hadoop-aws for s3a"
                ) from error
            if not any(word in str(error) for word in NOT_SEEN):
                raise
            is_seen = False
        if not is_seen:
            raise ConfigurationError(
                f"output {self._uri}: Spark does not find {self.to_write(name)}, which this process has written. Give "
                "the session and storage_options the same endpoint, or wait for a new bucket to be known everywhere"
            )
        self._seen_by.add(spark)

    def is_settled(self, error: BaseException) -> bool:
        """Return False after an interrupt, because the client may continue (`Storage.is_settled`)."""
        return isinstance(error, Exception) and not isinstance(error, PublishOutcomeUnknownError)

    def _create(self, name: str, content: bytes) -> bool:
        """Create an object, or return False if it exists with another content.

        The request is repeated while its result is not known. That creates no second object: the name can be taken
        only once, and the content of a commit has the name of its attempt.
        """
        give_up_at = time.monotonic() + _LONGEST_S
        is_sent, error = False, None
        for pause_s in (*_PAUSES_S, None):
            error = self._conditional_put(name, content)
            if error is None:
                return True
            is_refused = isinstance(error, (AuthorizationError, ConfigurationError))
            if is_refused and not is_sent:
                raise error
            is_sent = is_sent or not is_refused
            try:
                found = self.read(name)
            except UnavailableError as unread:
                error, found = unread, None
            except MarshalError as unread:
                raise self._unknown(name) from unread
            if found is not None:
                return found == content
            if pause_s is None or time.monotonic() > give_up_at:
                break
            time.sleep(pause_s)
        raise self._unknown(name) from error

    def _conditional_put(self, name: str, content: bytes) -> Exception | None:
        """Send one conditional request. Return its error, or None if the object was created."""
        store = self._store(retries=False)
        try:
            with self._known_errors(), self._bucket():
                store.put(self._key(name), content, mode="create")
        except (AuthorizationError, ConfigurationError, UnavailableError) as error:
            return error
        return None

    def _unknown(self, name: str) -> PublishOutcomeUnknownError:
        return PublishOutcomeUnknownError(
            f"{self.full(name)}: the store did not answer, so it is not known whether this commit file was created. "
            "Run the batch again, which skips ranges that were committed"
        )

    @contextmanager
    def _bucket(self) -> Iterator[None]:
        """Convert the error of a request that fails only if the bucket does not exist."""
        try:
            yield
        except FileNotFoundError:
            raise ConfigurationError(
                f"output {self._uri}: {self._location.bucket} does not exist in this store. Create it, or correct the "
                "URI and the endpoint"
            ) from None

    def _listed(self, folder: str) -> list[tuple[str, int]]:
        """Return the names and sizes of the objects below a folder."""
        store = self._store()
        prefix = self._key(folder)
        start = f"{prefix}/" if prefix else ""
        with self._known_errors(), self._bucket():
            items = [item for page in store.list(prefix or None) for item in page]
        return [(item["path"].removeprefix(start), item["size"]) for item in items if item["path"].startswith(start)]

    def _size(self, name: str) -> int | None:
        store = self._store()
        try:
            with self._known_errors():
                return int(store.head(self._key(name))["size"])
        except FileNotFoundError:
            return None

    def _remove(self, keys: Sequence[str]) -> None:
        store = self._store()
        if not keys:
            return
        with self._known_errors(), suppress(FileNotFoundError):
            store.delete(keys)
            return
        for key in keys:  # another process has removed one of them meanwhile
            with self._known_errors(), suppress(FileNotFoundError):
                store.delete(key)

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self._location.prefix, name) if part)

    def _store(self, *, retries: bool = True) -> "ObjectStore":
        """Return the client, which repeats failed requests or not."""
        if self._stores is None:
            require_extra(Extra.OBJECT_STORE, f"a file sink for {self._location.scheme}://")
            options = self._location.resolved(self._options)
            self._secrets = options.secrets()
            with self._known_errors():
                self._stores = options.open(retries=True), options.open(retries=False)
        return self._stores[0 if retries else 1]

    @contextmanager
    def _known_errors(self) -> Iterator[None]:
        """Convert the client's errors, without secrets; a missing object stays a `FileNotFoundError`."""
        try:
            yield
        except (FileNotFoundError, MarshalError):
            raise
        except Exception as error:
            if not _is_of_client(error):
                raise
            raise self._converted(error) from None

    def _converted(self, error: Exception) -> Exception:
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError, UnknownConfigurationKeyError

        text = _short(text_without(self._secrets, error))
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return AuthorizationError(
                f"output {self._uri}: the store has refused access ({text}). Correct the credentials, or grant the "
                "right to list, read, write and remove objects there"
            )
        if isinstance(error, (UnknownConfigurationKeyError, ValueError)) or self._stores is None:
            return ConfigurationError(
                f"output {self._uri}: its store cannot be opened ({text}). Correct storage_options, or the variables "
                "of the environment that the client reads"
            )
        return UnavailableError(
            f"output {self._uri}: the store did not carry out a request ({text}). Run the batch again when it does"
        )


def _is_of_client(error: Exception) -> bool:
    from obstore.exceptions import BaseError

    return isinstance(error, (BaseError, ValueError, OSError))


def _short(text: str) -> str:
    """Return the text of an error without the document that a store returned and without the queries of URLs."""
    return _QUERY.sub("", text.partition("<")[0]).rstrip(": ")


def _knows_s3(spark: "SparkSession | None") -> bool:
    """Return whether the session's Hadoop has a file system for `s3://`, as on EMR and Databricks."""
    if spark is None:
        return False
    if connect.is_connect(spark):
        return bool(spark.conf.get("spark.hadoop.fs.s3.impl", ""))
    return bool(spark._jsparkSession.sessionState().newHadoopConf().get("fs.s3.impl"))  # noqa: SLF001
