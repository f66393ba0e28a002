"""The order of the fast tests, and the place of their files."""

import os
from pathlib import Path
from typing import Final

import pytest

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of its own there, and keeps those of three runs
ENOUGH_BYTES: Final = 1 << 30
"""Several times what all fast tests write. A container often has less, and then the files are on the disk."""


def pytest_configure(config: pytest.Config) -> None:
    """Let temporary folders be in memory if only fast tests run. On a busy disk some files take a third longer."""
    is_fast = all("fast" in Path(argument).parts for argument in config.args)
    if is_fast and may_have_files(MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def may_have_files(folder: Path) -> bool:
    """Return whether there is room for files, and programs among them may be run; in Docker they may not."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return False
    found = os.statvfs(folder)
    return not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= ENOUGH_BYTES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long tests first. If a worker started one last, the others would wait for it."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("thorough", "slow"))))
