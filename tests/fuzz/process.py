"""The process in which libFuzzer runs: `python -m tests.fuzz.process TARGET COUNTS SCRIPT [libFuzzer's arguments]`.

SCRIPT is the command that libFuzzer starts when it needs another such process. Only the code that reads records is
instrumented, because other code is not to be explored.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Final

import atheris

from tests.fuzz.counts import Counter
from tests.fuzz.promises import check_repeatedly

INSTRUMENTED: Final = (
    *(f"protocol.{name}" for name in ("messages", "state", "rules", "world", "snapshots")),
    *(f"coordinator.{name}" for name in ("messages", "group_members", "group", "member", "group_view", "transport")),
    "election.rules",
    "outbox.publisher",
)


def main() -> None:
    """Fuzz; does not return."""
    _, target, counts, *arguments = sys.argv
    with atheris.instrument_imports(include=["marshal_dagster"]):
        for name in INSTRUMENTED:
            import_module(f"marshal_dagster.{name}")
    check = import_module("tests.fuzz.targets").TARGETS[target]
    counter = Counter(Path(counts))

    def run(data: bytes) -> None:
        counter.add(check_repeatedly(check, data))

    atheris.Setup(arguments, run, enable_python_coverage=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
