"""A writer in a process of its own that kills itself at a step, so that none of its code runs afterwards.

The writer of local files is a forked process, which starts in a fraction of the time of a new interpreter. The others
have clients with threads or connections, which a forked process must not use.

Usage: python -m tests.sink_process objects|postgres|mariadb PLACE STEP VALUE RANGES. RANGES is JSON. PLACE is a
connection string and a schema (for MariaDB a server and a database, for objects an endpoint and a URI), joined by a
line feed. With the step `each` the process delivers one range after another, except those that others have passed.
"""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context

import pytest

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.files.commit_log import range_from, range_to
from tests.conditions import WITHIN_S
from tests.object_outputs import ObjectOutput, S3Objects
from tests.sink_conformance import Output, deliver
from tests.sink_outputs import FileOutput, MariaDBOutput, PostgresOutput

KILLED = -signal.SIGKILL
EACH = "each"


def write_and_die(
    output: ObjectOutput | FileOutput | PostgresOutput | MariaDBOutput,
    step: str,
    value: str,
    ranges: Sequence[ClaimedRange],
) -> int:
    """Deliver in another process that dies at `step`, or does not die without one; return its exit code."""
    if isinstance(output, ObjectOutput):
        kind, place = "objects", f"{output.objects.url}\n{output.uri}"
    elif isinstance(output, FileOutput):
        return _fork_and_die(FileOutput(output.path), step, value, ranges)
    elif isinstance(output, MariaDBOutput):
        kind, place = "mariadb", f"{output.server}\n{output.schema}"
    else:
        kind, place = "postgres", f"{output.dsn}\n{output.schema}"
    reported = json.dumps([range_to(range_) for range_ in ranges])
    done = subprocess.run(
        [sys.executable, "-m", "tests.sink_process", kind, place, step, value, reported],
        check=False,
        timeout=WITHIN_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode in {0, KILLED}, done.stderr
    return done.returncode


def _fork_and_die(output: FileOutput, step: str, value: str, ranges: Sequence[ClaimedRange]) -> int:
    writer = get_context("fork").Process(target=_write, args=(output, step, value, ranges), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with other threads: only this one continues
        writer.start()
    writer.join(WITHIN_S)
    assert writer.exitcode is not None, "the writer hangs"
    assert writer.exitcode in {0, KILLED}, "its error is on stderr"
    return writer.exitcode


@pytest.fixture
def die() -> Callable[[Output, str, str, Sequence[ClaimedRange]], int]:
    """A writer in a separate process, which dies."""
    return write_and_die  # type: ignore[return-value] # its outputs are these


def main(kind: str, place: str, step: str, value: str, reported: str) -> None:
    """Write, and die at the given step."""
    output: ObjectOutput | PostgresOutput | MariaDBOutput
    if kind == "objects":
        url, uri = place.split("\n")
        output = ObjectOutput(S3Objects(url), uri)
    else:
        dsn, schema = place.split("\n")
        database = MariaDBOutput if kind == "mariadb" else PostgresOutput
        output = database(dsn, schema, create=False)
    ranges = [range_from(each) for each in json.loads(reported)]
    _write(output, step, value, ranges)


def _write(output: Output, step: str, value: str, ranges: Sequence[ClaimedRange]) -> None:
    def reached(at: str) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    if step != EACH:
        deliver(output, value, *ranges, sink=output.sink(reached))
        return
    for range_ in ranges:
        with suppress(SinkRejectedError):  # others are further by more than this range
            deliver(output, value, range_, sink=output.sink())


if __name__ == "__main__":
    main(*sys.argv[1:])
