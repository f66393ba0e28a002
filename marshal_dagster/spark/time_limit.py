"""Calls with a time limit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return the result of `call`, or raise its error; raise `TimeoutError` after `timeout_s` and let it run on.

    It is stricter than the timeout of a socket, which starts again with each byte and each address of a host.
    """
    answer: Future[T] = Future()
    threading.Thread(target=settle, args=(answer, call), name="wait for an answer", daemon=True).start()
    return answer.result(timeout_s)


def settle(answer: Future[T], call: Callable[[], T]) -> None:
    """Store the result or the error of `call` in a future."""
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
        answer.set_exception(error)
