"""The exit codes of the command line, and the errors that lead to each of them."""

from enum import IntEnum
from typing import Final

from marshal_dagster.errors import (
    AuthorizationError,
    ConfigurationError,
    MarshalError,
    TopicNotFoundError,
    UnavailableError,
)


class ExitCode(IntEnum):
    """The exit codes; `docs/reference/cli.md` and each command's help list them."""

    OK = 0
    PROBLEMS = 1
    USAGE = 2
    UNAVAILABLE = 3
    MALFORMED = 4
    TOPIC_MISSING = 5
    NOT_ALLOWED = 6
    BUG = 70
    INTERRUPTED = 130
    PIPE_CLOSED = 141


MEANINGS: Final = {
    ExitCode.OK: "done",
    ExitCode.PROBLEMS: "a problem was found, not everything was done, or the command was refused",
    ExitCode.USAGE: "wrong usage or settings",
    ExitCode.UNAVAILABLE: "Kafka, or an outbox's database, cannot be reached or started",
    ExitCode.MALFORMED: "malformed input",
    ExitCode.TOPIC_MISSING: "the topic does not exist",
    ExitCode.NOT_ALLOWED: "a right is missing",
    ExitCode.BUG: "a bug in this program",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.PIPE_CLOSED: "the reader of the output closed the pipe",
}
"""What each exit code means; `docs/reference/cli.md` has the same texts, with details."""

HELP: Final = f"Exit codes: {'; '.join(f'{code.value} {meaning}' for code, meaning in MEANINGS.items())}."
"""The list of exit codes at the end of each command's help."""


def code_of(error: Exception) -> ExitCode | None:
    """Return the exit code for an error that is reported in one line, or None for a bug in this program."""
    # Imported here because only a failed command needs them.
    from marshal_dagster.devkafka.errors import DevKafkaError
    from marshal_dagster.protocol.replay import MalformedLogError

    codes: tuple[tuple[type[Exception], ExitCode], ...] = (
        (ConfigurationError, ExitCode.USAGE),
        (UnavailableError, ExitCode.UNAVAILABLE),
        (DevKafkaError, ExitCode.UNAVAILABLE),
        (MalformedLogError, ExitCode.MALFORMED),
        (TopicNotFoundError, ExitCode.TOPIC_MISSING),
        (AuthorizationError, ExitCode.NOT_ALLOWED),
        (MarshalError, ExitCode.PROBLEMS),
        (OSError, ExitCode.PROBLEMS),
    )
    return next((code for kind, code in codes if isinstance(error, kind)), None)
