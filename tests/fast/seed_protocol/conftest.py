"""Where these tests take place."""

import pytest

from tests.batch_fixtures import Scene
from tests.members import Site


@pytest.fixture
def site() -> Site:
    """A coordination topic of its own."""
    return Site()


@pytest.fixture
def scene() -> Scene:
    """A data topic of one partition with 5 messages, and a group without a past."""
    scene = Scene()
    scene.data.make(partitions=1, messages=5)
    return scene
