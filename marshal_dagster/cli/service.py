"""Work that goes on until a signal ends it: of a harvester, of a coordinator."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from marshal_dagster._internal.health_server import HealthServer, address_of
from marshal_dagster.errors import ConfigurationError, UnavailableError

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LOOK_S: Final = 0.1
_END_WITHIN_S: Final = 25.0
"""Less than the 30 s after which Kubernetes kills what does not end."""


def run_until_signal(
    work: Callable[[], object], stop: Callable[[], object], look: Callable[[], None] = lambda: None
) -> bool:
    """Have a thread work until it is done, or a signal stops it; tell whether one did. Raises what the work does.

    Meanwhile it is looked at, now and then. The handler only notes the signal: what it would call may be in the midst
    of the same lock. A second signal ends the process as it otherwise would. Work that does not end in time after a
    signal is left as it is, which raises `UnavailableError`: the process can go, as nothing rests on an end in order.
    """
    raised: list[BaseException] = []

    def carry_out() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            raised.append(error)

    thread = threading.Thread(target=carry_out, name="work", daemon=True)
    try:
        with _recorded_signals() as came:
            thread.start()
            while thread.is_alive() and not came:
                look()
                thread.join(_LOOK_S)
    finally:
        stop()
        thread.join(_END_WITHIN_S)
    if thread.is_alive():
        raise UnavailableError(
            f"what was under way did not end within {_END_WITHIN_S:g} s and is left as it is; another process goes on"
        )
    if raised:
        raise raised[0]
    return bool(came)


def health_server(tell: Callable[[], dict[str, Any]], given: str | None) -> AbstractContextManager[HealthServer | None]:
    """Give what answers at the address of `--health`, if one is given. Raises `ConfigurationError`."""
    if given is None:
        return nullcontext()
    try:
        host, port = address_of(given)
    except ConfigurationError as error:
        raise ConfigurationError(f"--health: {error}") from None
    return HealthServer(tell, host, port)


@contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Give a list into which the signals come that would end this process; as before at the block's end."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
