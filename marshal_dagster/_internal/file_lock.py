"""A file lock between processes on one machine. The kernel releases it when the process that holds it dies."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.05


@contextmanager
def locked(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` while the block runs.

    The file is created if it is missing. The process that holds the lock may delete it.

    Args:
        path: The lock file. Its folder is created too.
        timeout_s: How many seconds to wait for the lock; without a limit if None.

    Raises:
        TimeoutError: Another process held the lock for `timeout_s`.
    """
    start_s = time.monotonic()
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if timeout_s is None:
                fcntl.flock(handle, fcntl.LOCK_EX)
            else:
                _wait_for(handle, path, start_s + timeout_s)
            if _is_current(handle, path):
                yield
                return
        finally:
            os.close(handle)


def _wait_for(handle: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EACCES}:
                raise
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process holds {path}") from error
            time.sleep(_POLL_S)


def _is_current(handle: int, path: Path) -> bool:
    """Return whether `path` still is the locked file. The last holder may have deleted it and another created it."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
