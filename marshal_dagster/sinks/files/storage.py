"""The file system interface of a file output, and its implementation for local folders.

`hadoop_storage` implements it for Hadoop's file systems. File names are relative to one folder and use slashes. The
guarantee that each range is stored once depends only on `Storage.publish`.
"""

import contextlib
import errno
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.files.parquet_footer import parquet_rows
from marshal_dagster.sinks.files.writer import check_all_see, path_to_read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SYNCS_AT_ONCE = 16


class PublishOutcomeUnknownError(OSError):
    """It is not known whether a commit file was created, and it may still be created.

    No data is lost: when the batch is delivered again, ranges that were committed are skipped.
    """


class Storage(ABC):
    """The files below one folder. Errors of the file system are raised as `OSError`.

    Methods that do nothing by default are overridden for file systems that need them.
    """

    def check(self) -> None:  # noqa: B027 - a default
        """Raise `ConfigurationError` if this file system does not support `publish`."""

    def use(self, session: "Callable[[], SparkSession]") -> None:  # noqa: B027 - a default
        """Use this session if the storage needs one and has none yet."""

    @abstractmethod
    def full(self, name: str) -> str:
        """Return the full path or URI, for readers and messages."""

    def to_write(self, name: str) -> str:
        """Return the path with which Spark writes to `name`."""
        return self.full(name)

    @abstractmethod
    def to_read(self, name: str) -> str:
        """Return the path with which Spark reads exactly this file."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; empty if it does not exist."""

    @abstractmethod
    def files_below(self, folder: str) -> list[str] | None:
        """Return the files below a folder, relative to it, or None if it does not exist."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether a file exists."""

    @abstractmethod
    def rows(self, name: str) -> int:
        """Return the number of rows of a Parquet file."""

    def rows_of(self, names: Sequence[str]) -> int:
        """Return the number of rows of Parquet files together."""
        return sum(map(self.rows, names))

    def has_files(self, folder: str) -> bool:  # noqa: ARG002 - needed by stores without folders
        """Return whether there is something to remove in a folder that `names` returned."""
        return True

    @abstractmethod
    def refresh_folder(self, folder: str) -> None:
        """Make changes that other processes made to a folder before this call visible to this process."""

    @abstractmethod
    def write_whole(self, name: str, content: bytes) -> None:
        """Write a file atomically and durably. No other writer uses this name."""

    @abstractmethod
    def publish(self, name: str, content: bytes, scratch: str) -> bool:
        """Create a file atomically, or return False if a file with that name exists.

        If several writers on any machines do so at once, exactly one succeeds.

        Args:
            name: The name of the file.
            content: Its content.
            scratch: A folder that only this writer uses.
        """

    def hold(self, folder: str, *, with_above: bool) -> None:  # noqa: B027 - a default
        """Make the entries of a folder durable, and `with_above` also the folders above it."""

    def hold_below(self, folder: str) -> None:  # noqa: B027 - a default
        """Make all files and folders below a folder durable."""

    def can_move(self) -> bool:
        """Return whether `move` is one atomic step here."""
        return True

    @abstractmethod
    def move(self, name: str, target: str) -> None:
        """Move a file to another name, atomically. Do nothing if it does not exist: another process may have moved it.

        No file is ever created in another way at `target`, and its folder is created if it is missing.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def remove_below(self, folder: str, keep: Collection[str]) -> None:
        """Remove everything below a folder except the files `keep`, and the folder itself if `keep` is empty.

        The names in `keep` are relative to the folder.
        """

    def check_seen(self, spark: "SparkSession", name: str) -> None:  # noqa: B027 - a default
        """Raise `ConfigurationError` if an executor does not see a file."""

    def is_settled(self, error: BaseException) -> bool:  # noqa: ARG002 - needed by other file systems
        """Return whether all operations begun before `error` have ended, so that no file can be published later."""
        return True


class LocalStorage(Storage):
    """A folder that this machine and all executors see under the same path, on a file system with hard links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def full(self, name: str) -> str:
        """Return the path (`Storage.full`)."""
        return f"{self._folder}/{name}"

    def to_write(self, name: str) -> str:
        """Return the path as a `file:` URI, which does not depend on Spark's default file system."""
        return f"file:{self.full(name)}"

    def to_read(self, name: str) -> str:
        """Return the path as Spark reads it (`Storage.to_read`)."""
        return path_to_read(self._folder / name)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder (`Storage.names`)."""
        try:
            return [path.name for path in (self._folder / folder).iterdir()]
        except FileNotFoundError:
            return []

    def files_below(self, folder: str) -> list[str] | None:
        """Return the files below a folder (`Storage.files_below`)."""
        top = self.full(folder).rstrip("/")
        if not Path(top).is_dir():
            return None
        return [f"{parent}/{name}"[len(top) + 1 :] for parent, _, names in os.walk(top) for name in names]

    def read(self, name: str) -> bytes | None:
        """Read a file (`Storage.read`)."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """Return whether a file exists (`Storage.exists`)."""
        return (self._folder / name).exists()

    def rows(self, name: str) -> int:
        """Return the number of rows according to the file's footer (`Storage.rows`)."""
        return parquet_rows(self._folder / name)

    def refresh_folder(self, folder: str) -> None:
        """Open the folder, which makes a network file system drop its cached listing (`Storage.refresh_folder`)."""
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(self._folder / folder, os.O_RDONLY))

    def write_whole(self, name: str, content: bytes) -> None:
        """Write a file (`Storage.write_whole`)."""
        path = self._folder / name
        with _written(path.parent, content) as temporary:
            temporary.replace(path)
        sync(path.parent)

    def publish(self, name: str, content: bytes, scratch: str) -> bool:
        """Write a temporary file and hard-link it to its name, which fails if that exists (`Storage.publish`)."""
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _written(self._folder / scratch, content) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                # A file server can create the link and lose the response; the client then tries again.
                return _is_same(temporary, target)
            except OSError as error:
                if error.errno in {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}:
                    raise ConfigurationError(
                        f"the file system of {target.parent} has no hard links, which a file sink needs for its "
                        "commits. Use another file system"
                    ) from error
                raise
        return True

    def hold(self, folder: str, *, with_above: bool) -> None:
        """Sync folders (`Storage.hold`)."""
        sync(self._folder / folder)
        for above in _above(self._folder / folder) if with_above else ():
            with contextlib.suppress(PermissionError):  # a folder that can be entered but not read
                sync(above)

    def hold_below(self, folder: str) -> None:
        """Sync all files, then the folders, in parallel because that is faster (`Storage.hold_below`)."""
        top = self._folder / folder
        folders, files = [top.parent], []
        for parent, _, names in os.walk(top):
            folders.append(Path(parent))
            files += [Path(parent, name) for name in names]
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
            for paths in (files, folders):
                for _ in pool.map(sync, paths):
                    pass

    def move(self, name: str, target: str) -> None:
        """Rename a file, and before it Hadoop's checksum file (`Storage.move`)."""
        source, goal = self._folder / name, self._folder / target
        goal.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            _checksum_of(source).rename(_checksum_of(goal))
        try:
            source.rename(goal)
        except FileNotFoundError:
            if source.exists():  # the folder was removed again
                raise

    def remove(self, name: str) -> None:
        """Remove a file and Hadoop's checksum file (`Storage.remove`)."""
        path = self._folder / name
        path.unlink(missing_ok=True)
        _checksum_of(path).unlink(missing_ok=True)

    def remove_below(self, folder: str, keep: Collection[str]) -> None:
        """Remove files (`Storage.remove_below`)."""
        top = self._folder / folder
        if not keep:
            shutil.rmtree(top, ignore_errors=True)
            return
        kept = {top / name for name in keep}
        kept |= set(map(_checksum_of, kept))
        for parent, _, names in os.walk(top, topdown=False):
            for name in names:
                path = Path(parent, name)
                if path not in kept:
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                Path(parent).rmdir()

    def check_seen(self, spark: "SparkSession", name: str) -> None:
        """Raise `ConfigurationError` if an executor does not see a file (`Storage.check_seen`)."""
        check_all_see(spark, self._folder / name)


def sync(path: Path) -> None:
    """Sync the file or folder at `path` to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _written(folder: Path, content: bytes) -> Iterator[Path]:
    """Yield a synced temporary file with this content; remove it at the end unless it was renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{secrets.token_hex(8)}.json"
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _above(folder: Path) -> list[Path]:
    """Return the folders above `folder` on its file system; the first writer may have created any of them."""
    above: list[Path] = []
    below = folder.resolve()
    while not below.is_mount():
        below = below.parent
        above.append(below)
    return above


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def _checksum_of(path: Path) -> Path:
    """Return the path of Hadoop's checksum file `.name.crc` of a file `name`."""
    return path.with_name(f".{path.name}.crc")
