"""Telling another process of this user what must not be on a disk: through a named pipe, which holds nothing itself.

Who begins to listen may get the end of what another one left there, so each telling has its length and marks at both
ends, and is repeated until it was heard whole.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from marshal_dagster.errors import UnavailableError

_POLL_S: Final = 0.05
_TOLD_WITHIN_S: Final = 30.0
_TOLD: Final = re.compile(rb"\x02(\d+):([^\x02\x03]*)\x03")


@contextmanager
def telling(pipe: Path, text: str) -> Iterator[None]:
    """Make `pipe`, for this user alone, and tell `text` to each who listens there, one at a time, in the block.

    It has no control characters, as JSON has none.
    """
    told = b"\x02%d:%s\x03" % (len(text.encode()), text.encode())
    os.mkfifo(pipe, 0o600)
    over = threading.Event()
    thread = threading.Thread(target=_report, args=(pipe, told, over), name="tell", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _POLL_S)  # it may wait for a listener that stalls


def listen(pipe: Path, check: Callable[[], object]) -> str:
    """Give the text that is told at `pipe`.

    `check` is called while nobody tells it: it raises when nobody will. Raises `FileNotFoundError` without a pipe, and
    `UnavailableError` when it takes too long.
    """
    end_s = time.monotonic() + _TOLD_WITHIN_S
    heard = b""
    source = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            part = _read(source)
            heard += part
            for length, text in _TOLD.findall(heard if b"\x03" in part else b""):
                if len(text) == int(length):
                    return str(text, "utf-8")
            if part:
                continue
            check()
            if time.monotonic() > end_s:
                raise UnavailableError(f"nobody told what {pipe} is for, within {_TOLD_WITHIN_S:g} s")
            time.sleep(_POLL_S)
    finally:
        os.close(source)


def _read(source: int) -> bytes:
    try:
        return os.read(source, 65_536)
    except BlockingIOError:  # somebody has opened it, and told nothing yet
        return b""


def _report(pipe: Path, told: bytes, over: threading.Event) -> None:
    while not over.wait(_POLL_S):
        with contextlib.suppress(OSError):  # nobody listens, or went away
            target = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(target, True)
            with open(target, "wb") as file:  # noqa: PTH123 - it is open
                file.write(told)
