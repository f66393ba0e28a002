"""What a file output needs of its file system, and the local one; `hadoop_storage` is that of Hadoop's layer.

Files are named below one folder, with slashes. What the promise rests on is `Storage.publish` alone.
"""

import contextlib
import errno
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.files.parquet_footer import parquet_rows
from marshal_dagster.sinks.files.writer import check_all_see, path_to_read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SYNCS_AT_ONCE = 16


class Storage(ABC):
    """The files below one folder. Errors of the file system are `OSError`.

    What does nothing here is overridden where a file system needs it.
    """

    def check(self) -> None:  # noqa: B027 - a default
        """Raise `ConfigurationError` where `publish` cannot be relied on."""

    def use(self, session: "Callable[[], SparkSession]") -> None:  # noqa: B027 - a default
        """Work through this session, where none is known yet and one is needed."""

    @abstractmethod
    def full(self, name: str) -> str:
        """Return the whole name, for readers and messages."""

    def to_write(self, name: str) -> str:
        """Return the path by which Spark writes there."""
        return self.full(name)

    @abstractmethod
    def to_read(self, name: str) -> str:
        """Return the path by which Spark reads this file and no other."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, none if it is not there."""

    @abstractmethod
    def files_below(self, folder: str) -> list[str] | None:
        """Return the files below a folder, relative to it, or None if it is not there."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return what is in a file, None if there is none."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Say whether there is a file."""

    @abstractmethod
    def rows(self, name: str) -> int:
        """Return how many rows a Parquet file has."""

    @abstractmethod
    def refresh_folder(self, folder: str) -> None:
        """Make sure that what others have done in a folder before this call is seen."""

    @abstractmethod
    def write_whole(self, name: str, content: bytes) -> None:
        """Write a file that is seen whole or not at all, and held; no other writes one of this name."""

    @abstractmethod
    def publish(self, name: str, content: bytes, scratch: str) -> bool:
        """Make a file that is seen whole or not at all, or return False if there is one of that name.

        Of writers that do so at once, anywhere, one makes it. `scratch` is a folder of this writer's own.
        """

    def hold(self, folder: str, *, with_above: bool) -> None:  # noqa: B027 - a default
        """Have what is in a folder, and the folders above `with_above`, outlive a loss of power."""

    def hold_below(self, folder: str) -> None:  # noqa: B027 - a default
        """Have all that is below a folder outlive a loss of power."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def remove_below(self, folder: str, keep: Collection[str]) -> None:
        """Remove what is below a folder but the files `keep`, named relative to it; the folder too if none is kept."""

    def check_seen(self, spark: "SparkSession", name: str) -> None:  # noqa: B027 - a default
        """Raise `ConfigurationError` when an executor does not see a file."""

    def is_settled(self, error: BaseException) -> bool:  # noqa: ARG002 - another file system asks
        """Return whether what was begun before `error` has ended, so that nothing is published any more."""
        return True


class LocalStorage(Storage):
    """A folder that this machine and all executors have under the same path, on a file system with hard links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def full(self, name: str) -> str:
        """Return the path (`Storage.full`)."""
        return f"{self._folder}/{name}"

    def to_write(self, name: str) -> str:
        """Return the path on the local file system, whatever Spark's default is (`Storage.to_write`)."""
        return f"file:{self.full(name)}"

    def to_read(self, name: str) -> str:
        """Return Spark's path (`Storage.to_read`)."""
        return path_to_read(self._folder / name)

    def names(self, folder: str) -> list[str]:
        """List a folder (`Storage.names`)."""
        try:
            return [path.name for path in (self._folder / folder).iterdir()]
        except FileNotFoundError:
            return []

    def files_below(self, folder: str) -> list[str] | None:
        """List files (`Storage.files_below`)."""
        top = self.full(folder)
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
        """Look for a file (`Storage.exists`)."""
        return (self._folder / name).exists()

    def rows(self, name: str) -> int:
        """Count rows by the footer (`Storage.rows`)."""
        return parquet_rows(self._folder / name)

    def refresh_folder(self, folder: str) -> None:
        """Have a network file system ask its server for what is there: it remembers until a folder is opened."""
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(self._folder / folder, os.O_RDONLY))

    def write_whole(self, name: str, content: bytes) -> None:
        """Write a file (`Storage.write_whole`)."""
        path = self._folder / name
        with _written(path.parent, content) as temporary:
            temporary.replace(path)
        sync(path.parent)

    def publish(self, name: str, content: bytes, scratch: str) -> bool:
        """Link a whole file to its name, which fails when that is taken (`Storage.publish`)."""
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _written(self._folder / scratch, content) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                # A file server may carry a link out and lose the answer.
                return _is_same(temporary, target)
            except OSError as error:
                if error.errno in {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}:
                    raise ConfigurationError(
                        f"path: the file system of {target.parent} has no hard links, by which commits are "
                        "made: use another"
                    ) from error
                raise
        return True

    def hold(self, folder: str, *, with_above: bool) -> None:
        """Sync folders (`Storage.hold`)."""
        sync(self._folder / folder)
        for above in _above(self._folder / folder) if with_above else ():
            with contextlib.suppress(PermissionError):  # may be passed through, not read
                sync(above)

    def hold_below(self, folder: str) -> None:
        """Sync all files, then the folders; many at once share their trips to the disk (`Storage.hold_below`)."""
        top = self._folder / folder
        folders, files = [top.parent], []
        for parent, _, names in os.walk(top):
            folders.append(Path(parent))
            files += [Path(parent, name) for name in names]
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
            for paths in (files, folders):
                for _ in pool.map(sync, paths):
                    pass

    def remove(self, name: str) -> None:
        """Remove a file (`Storage.remove`)."""
        (self._folder / name).unlink(missing_ok=True)

    def remove_below(self, folder: str, keep: Collection[str]) -> None:
        """Remove files (`Storage.remove_below`)."""
        top = self._folder / folder
        if not keep:
            shutil.rmtree(top, ignore_errors=True)
            return
        kept = {top / name for name in keep}
        for parent, _, names in os.walk(top, topdown=False):
            for name in names:
                path = Path(parent, name)
                if path not in kept and not _is_checksum_of(path, kept):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                Path(parent).rmdir()

    def check_seen(self, spark: "SparkSession", name: str) -> None:
        """Raise `ConfigurationError` when an executor does not see a file."""
        check_all_see(spark, self._folder / name)


def sync(path: Path) -> None:
    """Have the storage hold what was written to the file or folder at `path`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _written(folder: Path, content: bytes) -> Iterator[Path]:
    """Give a synced file of this content that goes away at the end, unless it was renamed."""
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
    """Return the folders above `folder` on its file system, any of which its first writer may have made."""
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


def _is_checksum_of(path: Path, keep: Collection[Path]) -> bool:
    """Hadoop keeps `.name.crc` beside `name`."""
    return path.name.startswith(".") and path.name.endswith(".crc") and path.with_name(path.name[1:-4]) in keep
