"""The services of a worker of the test run: the end of one is reported with the tests that fail by it.

`tests.leftovers` stops the services of a worker that crashes.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_END_BYTES: Final = 3_000


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
