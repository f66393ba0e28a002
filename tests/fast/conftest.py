"""The order of the fast tests, and the place of their files."""

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of its own there, which it also removes
ENOUGH_BYTES: Final = 1 << 30
"""Several times what all fast tests write. A container often has less, and then the files are on the disk."""


def pytest_configure(config: pytest.Config) -> None:
    """Let temporary folders be in memory if only fast tests run. On a busy disk some files take a third longer."""
    is_fast = all("fast" in Path(argument).parts for argument in config.args)
    if is_fast and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long tests first. If a worker started one last, the others would wait for it."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("thorough", "slow"))))
