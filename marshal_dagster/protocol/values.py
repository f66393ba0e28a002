"""How the values of the protocol are declared that are made for every record."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record_type(cls: type[T]) -> type[T]:
    """Make a dataclass of keyword-only fields that the type checker holds frozen.

    At run time it is not: a frozen one takes three times as long to make, and a claim of many partitions makes
    thousands.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)
