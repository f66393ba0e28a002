"""A group coordinator: which member is to claim which partitions. Claims in the coordination log alone decide.

`assignment` are the strategies, pure functions.
"""

from typing import Final

DEFAULT_TOPIC: Final = "__marshal_coordinator"
"""The first of a coordinator's topics, after which the others are named."""
