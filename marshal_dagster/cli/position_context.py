"""What `position set`, `adopt` and `reprocess` begin with: a group's log and a data topic, opened."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from marshal_dagster.admin.go_groups import are_stopped
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output
from marshal_dagster.cli.connections import (
    READING,
    WRITING,
    check_topic,
    connection_of,
    data_connection_of,
    open_reader,
    operator_name,
)
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.admin_client import Topics

_Resetter = TypeVar("_Resetter", bound=PositionResetter)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRequest:
    """Whose positions are set; `wait` is how long others have to leave.

    `go_consumers_stopped` is the group's name where a person says that all of its consumers are stopped.
    """

    connection: ConnectionOptions
    coordination_topic: str
    data_connection: Path | None
    group: str
    topic: str
    wait: str
    dry_run: bool
    yes: bool
    as_json: bool
    go_consumers_stopped: str | None = None

    def check(self) -> None:
        """Raise `ConfigurationError` where nobody can be asked, or an option is wrong."""
        duration_s(self.wait, "--wait")
        are_stopped(self.go_consumers_stopped, self.group)
        if self.as_json and not (self.yes or self.dry_run):
            raise output.cannot_ask("with --dry-run")
        check_topic("TOPIC", self.topic)

    @contextmanager
    def opened(self, command: str, kind: type[_Resetter]) -> Iterator[_Resetter]:
        """Connect, in the name of a command, as long as the block lasts. Raises `MarshalError`."""
        connection = connection_of(self.connection)
        rights = READING if self.dry_run else WRITING

        def open_log(interval_ms: int) -> Rationalizer:
            return open_reader(connection, self.coordination_topic, interval_ms=interval_ms, rights=rights)

        with (
            warnings_to_stderr(),
            Topics(
                data_connection_of(self.data_connection, connection), client_id=f"marshal-dagster-{command}"
            ) as topics,
            closing(
                kind(
                    open_log,
                    topics,
                    self.group,
                    self.topic,
                    operator_name(),
                    SystemClock(),
                    go_consumers_stopped=are_stopped(self.go_consumers_stopped, self.group),
                )
            ) as positions,
        ):
            yield positions
