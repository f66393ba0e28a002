"""Telling another process of this user what must not be on a disk: through a named pipe, which holds nothing itself."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from marshal_dagster.errors import UnavailableError

_POLL_S: Final = 0.05
_TOLD_WITHIN_S: Final = 30.0


@contextmanager
def telling(pipe: Path, line: str) -> Iterator[None]:
    """Make `pipe`, for this user alone, and tell `line` to each who listens there, one at a time, in the block."""
    os.mkfifo(pipe, 0o600)
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(pipe, f"{line}\n".encode(), over), name="tell", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _POLL_S)  # it may wait for a listener that stalls


def listen(pipe: Path, check: Callable[[], object]) -> str:
    """Give the line that is told at `pipe`.

    `check` is called while nobody tells it: it raises when nobody will. Raises `FileNotFoundError` without a pipe, and
    `UnavailableError` when it takes too long.
    """
    end_s = time.monotonic() + _TOLD_WITHIN_S
    heard = b""
    source = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while b"\n" not in heard:
            part = _read(source)
            heard += part
            if part:
                continue
            check()
            if time.monotonic() > end_s:
                raise UnavailableError(f"nobody told what {pipe} is for, within {_TOLD_WITHIN_S:g} s")
            time.sleep(_POLL_S)
    finally:
        os.close(source)
    return heard.partition(b"\n")[0].decode()


def _read(source: int) -> bytes:
    try:
        return os.read(source, 65_536)
    except BlockingIOError:  # somebody has opened it, and told nothing yet
        return b""


def _tell(pipe: Path, line: bytes, over: threading.Event) -> None:
    while not over.wait(_POLL_S):
        with contextlib.suppress(OSError):  # nobody listens, or went away
            target = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(target, True)
            with open(target, "wb") as file:  # noqa: PTH123 - it is open
                file.write(line)
