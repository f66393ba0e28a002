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
    answer: Future[T] = Future()
    threading.Thread(target=settle, args=(answer, call), name="wait for an answer", daemon=True).start()
    return answer.result(timeout_s)


def settle(answer: Future[T], call: Callable[[], T]) -> None:
    """Give a future what `call` gives or raises."""
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        answer.set_exception(error)
