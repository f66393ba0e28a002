"""Waiting for an answer no longer than one wants to."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Give what `call` gives or raises, if it does so in time; else raise `TimeoutError`, and leave it at it.

    A socket's own time-out starts anew with each byte, and with each address of a host.
    """
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            result.set_exception(error)

    threading.Thread(target=work, name="wait for an answer", daemon=True).start()
    return result.result(timeout_s)
