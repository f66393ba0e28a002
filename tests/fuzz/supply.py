"""Choices from a fuzzer's bytes: the same bytes make the same choices, and one byte changes one choice."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Supply:
    """Bytes that are consumed from the front; after the end there are only zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        """Consume one byte."""
        at = self._at
        self._at = at + 1
        return self._data[at] if at < len(self._data) else 0

    def take(self, size: int) -> bytes:
        """Consume up to `size` bytes."""
        at = self._at
        self._at = at + size
        return self._data[at : at + size]

    def choose(self, among: Sequence[T]) -> T:
        """Consume one byte to choose an element."""
        return among[self.byte() % len(among)]
