"""Pass secrets to another process of the same user through a named pipe (FIFO), so they are never written to disk.

A reader may first receive the rest of a message that another reader left in the pipe. Therefore each message has its
length and a mark at both ends, and the writer repeats it until a reader has received a complete message.
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
    """Create `pipe` for this user only, and send `text` to each reader, one at a time, inside the block.

    The text must not have control characters. JSON has none.
    """
    told = b"\x02%d:%s\x03" % (len(text.encode()), text.encode())
    os.mkfifo(pipe, 0o600)
    over = threading.Event()
    thread = threading.Thread(target=_report, args=(pipe, told, over), name="send a secret", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _POLL_S)  # it may wait for a reader that does not read


def listen(pipe: Path, check: Callable[[], object]) -> str:
    """Read and return the text that another process sends through `pipe`.

    While no text arrives, `check` is called repeatedly. It raises an error if no text will come. Raises
    `FileNotFoundError` without a pipe, and `UnavailableError` after 30 s.
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
                raise UnavailableError(
                    f"no text came through {pipe} within {_TOLD_WITHIN_S:g} s: check that the script's run is alive"
                )
            time.sleep(_POLL_S)
    finally:
        os.close(source)


def _read(source: int) -> bytes:
    try:
        return os.read(source, 65_536)
    except BlockingIOError:  # a writer has opened it, but has sent nothing yet
        return b""


def _report(pipe: Path, told: bytes, over: threading.Event) -> None:
    while not over.wait(_POLL_S):
        with contextlib.suppress(OSError):  # there is no reader, or it closed the pipe
            target = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(target, True)
            with open(target, "wb") as file:  # noqa: PTH123 - it is open
                file.write(told)
