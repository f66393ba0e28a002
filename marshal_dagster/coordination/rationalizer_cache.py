"""One rationalizer for each coordination topic in a process, for readers that come back again and again.

A Dagster code server builds its resources anew for every sensor tick, in parallel threads; here they find the reader
that has already read the log, so that a tick reads only what is new.
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
    """Where the rationalizer of one coordination topic is kept; who opens it makes nobody wait but its own users."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: Rationalizer | None = None


_lock = threading.Lock()
_places: OrderedDict[_Key, _RegistryEntry] = OrderedDict()


def shared_rationalizer(
    connection: KafkaConnection, coordination_topic: str = DEFAULT_COORDINATION_TOPIC
) -> Rationalizer:
    """Give this process's rationalizer for that topic, which follows all of it; opened now if it is the first use.

    One whose last reading failed (`Rationalizer.failure`) is left to those that still use it, and another is opened in
    its place. At most 16 are kept, the ones used last. Nobody closes what they get: it is closed when nobody has it any
    more. Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`.
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
