"""Shares one rationalizer for each coordination topic within a process.

A Dagster code server builds its resources again for every sensor tick, in parallel threads. With the shared reader, a
tick reads only the records that are new.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.coordination.checked_log import open_rationalizer
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection

MOST_KEPT: Final = 16

_Key = tuple[KafkaConnection, str]


@dataclass(slots=True)
class _RegistryEntry:
    """The rationalizer of one coordination topic. While it is opened, only users of that topic wait."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: Rationalizer | None = None


_lock = threading.Lock()
_places: OrderedDict[_Key, _RegistryEntry] = OrderedDict()


def shared_rationalizer(
    connection: KafkaConnection, coordination_topic: str = DEFAULT_COORDINATION_TOPIC
) -> Rationalizer:
    """Return this process's rationalizer for a coordination topic; it follows all coordination partitions.

    The first call opens it. If its last reading failed (`Rationalizer.failure`), a new one is opened; present users
    keep the old one. The 16 rationalizers that were used last are kept. Do not close the rationalizer: it is closed
    when it is no longer used.

    Raises:
        TopicNotFoundError: the coordination topic does not exist.
        AuthorizationError: this user may not see it.
        UnavailableError: no answer in time.
    """
    place = _place_of((connection, coordination_topic))
    with place.lock:
        if place.kept is None or place.kept.failure is not None:
            place.kept = None
            place.kept = open_rationalizer(connection, coordination_topic)
        return place.kept


def _place_of(key: _Key) -> _RegistryEntry:
    with _lock:
        place = _places.setdefault(key, _RegistryEntry())
        _places.move_to_end(key)
        while len(_places) > MOST_KEPT:
            _places.popitem(last=False)
        return place
