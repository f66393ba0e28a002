"""The services of a worker of the test run: the end of one is reported with the tests that fail by it.

A worker that crashes leaves its services running. `stop_left_running` finds them by the variables that pytest-xdist
sets in a worker's environment, which its processes inherit.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_END_BYTES: Final = 3_000
_STOPPED_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Service:
    """A process that serves many tests, and its log files, which contain the reason for its end."""

    name: str
    process: psutil.Process
    logs: tuple[Path, ...]

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        with suppress(psutil.NoSuchProcess):
            return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
        return False

    def end_of_logs(self) -> str:
        """Return the last lines of each log that exists."""
        found = [path for path in self.logs if path.is_file()]
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-_END_BYTES:]}" for path in found)


_watched: list[Service] = []


@contextmanager
def watched(name: str, pid: int, *logs: Path) -> Iterator[None]:
    """Report the service's end with each test that fails while the block runs."""
    service = Service(name, psutil.Process(pid), logs)
    _watched.append(service)
    try:
        yield
    finally:
        _watched.remove(service)


def ended_services() -> list[tuple[str, str]]:
    """Return a title and the end of the logs of each service that has ended by itself."""
    return [
        (f"{service.name} (process {service.process.pid}) has ended", service.end_of_logs())
        for service in _watched
        if not service.is_alive
    ]


def stop_left_running(run: str, worker: str) -> list[str]:
    """Stop the processes of a worker that has ended. Return their command lines.

    Args:
        run: The id that pytest-xdist gave to the test run.
        worker: The worker's id, such as `gw0`.
    """
    left = [each for each in psutil.process_iter(["environ", "cmdline"]) if _belongs_to(each, run, worker)]
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, _STOPPED_WITHIN_S)
    return [" ".join(each.info["cmdline"] or [])[:200] for each in left]


def _belongs_to(process: psutil.Process, run: str, worker: str) -> bool:
    environment = process.info["environ"] or {}
    return (environment.get("PYTEST_XDIST_TESTRUNUID"), environment.get("PYTEST_XDIST_WORKER")) == (run, worker)
