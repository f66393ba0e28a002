"""Run a service, such as a harvester or a coordinator: its thread, signals, health server and events."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from marshal_dagster._internal.health_server import HealthServer, address_of
from marshal_dagster.cli import output
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.telemetry.prometheus import prometheus_metrics

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_S: Final = 0.1
_END_WITHIN_S: Final = 25.0
"""Less than the 30 s after which Kubernetes kills a process that does not end."""


def run_until_signal(
    work: Callable[[], object], stop: Callable[[], object], look: Callable[[], None] = lambda: None
) -> bool:
    """Run `work` in a thread until it ends or a signal stops it.

    The signal handler only records the signal, because this thread may hold a lock that `stop` needs. Work that does
    not end within 25 s after a signal is abandoned. Correctness does not depend on an orderly end.

    Args:
        work: The work of the service.
        stop: Makes `work` end soon. It is called in any case.
        look: Called every 0.1 s while `work` runs.

    Returns:
        Whether a signal stopped the work.

    Raises:
        UnavailableError: The work did not end in time.
        BaseException: What `work` raised.
    """
    raised: list[BaseException] = []

    def carry_out() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
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
            f"the service did not end within {_END_WITHIN_S:g} s after the signal, so this process exits; another "
            "process continues its work"
        )
    if raised:
        raise raised[0]
    return bool(came)


@contextmanager
def health_server(health: Callable[[], dict[str, Any]], address: str | None) -> Iterator[HealthServer | None]:
    """Serve at the address of `--health` while the block runs, or do nothing without an address.

    The instruments of this process are recorded for its /metrics meanwhile. Raises `ConfigurationError`.
    """
    if address is None:
        yield None
        return
    with prometheus_metrics() as render, http_server(health, address, "--health", render) as server:
        yield server


def http_server(
    health: Callable[[], dict[str, Any]], address: str, option: str, metrics: Callable[[], bytes]
) -> HealthServer:
    """Return a server that does not listen yet. Raises `ConfigurationError`.

    Args:
        health: Returns the health report.
        address: The value of the option.
        option: The option's name, for messages.
        metrics: Renders the metrics.
    """
    try:
        host, port = address_of(address)
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None
    return HealthServer(health, host, port, metrics)


def report_event(event: str, text: str, *, as_json: bool, **fields: Any) -> None:  # noqa: ANN401 - JSON values
    """Write an event as a line on stderr, or with `as_json` as a line of JSON on stdout."""
    if not as_json:
        output.write_note(text)
        return
    output.write_line(json.dumps({"event": event, "time_ms": time.time_ns() // 1_000_000, **fields}))
    output.flush()


@contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Record the signals that would end this process in a list while the block runs; then restore the handlers.

    A hang-up that the process was started to ignore, as by `nohup`, is still ignored.
    """
    came: list[int] = []
    ending = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ending}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
