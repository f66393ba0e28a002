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


HELP: Final = (
    "Exit codes: 0 done; 1 something is wrong, or the command was refused; 2 wrong usage or settings; 3 Kafka, or an "
    "outbox's database, cannot be reached or started; 4 malformed input; 5 the topic does not exist; 6 a right is "
    "missing; 130 interrupted."
)
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
