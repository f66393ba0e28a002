"""Fixtures: a coordination topic, and a scene with a data topic."""

import pytest

from tests.batch_fixtures import Scene
from tests.members import Site


@pytest.fixture
def site() -> Site:
    """Return a coordination topic for one test."""
    return Site()


@pytest.fixture
def scene() -> Scene:
    """Return a data topic of one partition with 5 messages, and a new group."""
    scene = Scene()
    scene.data.make(partitions=1, messages=5)
    return scene
