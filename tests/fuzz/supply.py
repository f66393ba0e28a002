"""Choices out of a fuzzer's bytes: the same bytes make the same choices, and one byte changes one choice."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Supply:
    """Bytes that are used up from the front; zeros come once they are gone."""

    def __init__(self, data: bytes) -> None:
        """Take the bytes."""
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Tell whether there is anything left."""
        return self._at < len(self._data)

    def byte(self) -> int:
        """Take one byte."""
        at = self._at
        self._at = at + 1
        return self._data[at] if at < len(self._data) else 0

    def take(self, size: int) -> bytes:
        """Take up to `size` bytes."""
        at = self._at
        self._at = at + size
        return self._data[at : at + size]

    def choose(self, among: Sequence[T]) -> T:
        """Take one byte to pick with."""
        return among[self.byte() % len(among)]
