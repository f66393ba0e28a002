"""The order of the fast tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long tests first. If a worker started one last, the others would wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("thorough") is None)
