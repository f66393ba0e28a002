"""`outbox harvest` and `outbox drain`: a harvester as a process of its own."""

import time
from dataclasses import dataclass
from typing import Any, Final

from marshal_dagster.cli import output
from marshal_dagster.cli.connections import connection_of
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.cli.outbox import OutboxLocation
from marshal_dagster.cli.service import health_server, run_until_signal
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.options import HarvesterOptions

_WARNS: Final = ("outbox", "election")


@dataclass(frozen=True, slots=True)
class HarvestRequest:
    """Which outbox, and how."""

    place: OutboxLocation
    connection: ConnectionOptions
    options: HarvesterOptions
    as_json: bool = False

    def harvester(self) -> Harvester:
        """Make it; nothing is connected to yet. Raises `ConfigurationError`."""
        return Harvester(self.place.tables(), connection_of(self.connection), self.options)


def harvest(request: HarvestRequest, health: str | None) -> ExitCode:
    """Harvest until a signal says to hand over, and tell each change of role. Raises `MarshalError`."""
    harvester = request.harvester()
    server = health_server(harvester.health, health)
    teller = _EventReporter(harvester, as_json=request.as_json)
    with warnings_to_stderr(_WARNS, each_time=True), server as listening:
        teller.started(None if listening is None else listening.address)
        run_until_signal(harvester.run, harvester.stop, teller.look)
        teller.stopped()
    return ExitCode.OK


def drain(request: HarvestRequest) -> ExitCode:
    """Publish what is there, and tell how much that was. Raises `MarshalError`."""
    harvester = request.harvester()
    with warnings_to_stderr(_WARNS):
        was_stopped = run_until_signal(harvester.drain, harvester.stop)
    counts = harvester.counts
    if request.as_json:
        output.write_json({"published": counts.published, "parked": counts.parked, "complete": not was_stopped})
    else:
        output.show(f"{counts.published} rows published here, {counts.parked} set aside")
    if was_stopped:
        output.write_note("it was stopped before all rows were published")
        return ExitCode.INTERRUPTED
    if counts.parked:
        output.write_note("`marshal-dagster outbox parked` says why rows were set aside")
    return ExitCode.PROBLEMS if counts.parked else ExitCode.OK


class _EventReporter:
    """Tells what becomes of a harvester: people on stderr, programs in lines of JSON on stdout."""

    def __init__(self, harvester: Harvester, *, as_json: bool) -> None:
        self._harvester = harvester
        self._as_json = as_json
        self._role = ""

    def started(self, address: str | None) -> None:
        answers = "" if address is None else f"; http://{address}/health says how it is"
        self._report("started", f"outbox {self._harvester.name!r}: the harvester has started{answers}", health=address)

    def look(self) -> None:
        role = "standby" if self._harvester.term is None else "leader"
        if role != self._role:
            self._role = role
            does = "harvests" if role == "leader" else "stands by"
            self._report(role, f"outbox {self._harvester.name!r}: this process {does}")

    def stopped(self) -> None:
        counts = self._harvester.counts
        done = {"published": counts.published, "parked": counts.parked, "sessions": counts.sessions}
        said = f"{counts.published} rows published here, {counts.parked} set aside"
        self._report("stopped", f"outbox {self._harvester.name!r}: handed over; {said}", **done)

    def _report(self, event: str, text: str, **more: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        if not self._as_json:
            output.write_note(text)
            return
        output.write_json({"event": event, "time_ms": time.time_ns() // 1_000_000, **more})
        output.flush()
