"""Texts of errors in one line, without the secrets of a catalog's or a store's settings."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_SECRET_KEY: Final = re.compile("secret|password|token|credential|key|authorization|sas", re.IGNORECASE)
_PUBLIC_KEY: Final = re.compile("^(type|warehouse)$|-impl$|endpoint(_url)?$|base_url$|region$", re.IGNORECASE)
_SHORTEST_SECRET: Final = 16
"""The shortest text that is hidden whatever its key is. A shorter one may be part of any text."""
_USER_IN_URI: Final = re.compile(r"//[^/@\s]+@")


def secret_values(*settings: Mapping[str, Any]) -> list[str]:
    """Return the values that errors must not show: those of keys that look secret, and long ones.

    Args:
        *settings: Properties of a catalog, or options of a store.
    """
    return [
        text
        for properties in settings
        for key, text in _texts(properties)
        if _SECRET_KEY.search(key) or (len(text) >= _SHORTEST_SECRET and not _PUBLIC_KEY.search(key))
    ]


def text_without(secrets: Iterable[str], error: Exception) -> str:
    """Return the first line of an error's text without secrets."""
    text = str(error)
    for secret in sorted(set(secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return without_user(next(iter(text.splitlines()), type(error).__name__))


def without_user(text: str) -> str:
    """Return a text whose URIs do not show a user and a password before their host."""
    return _USER_IN_URI.sub("//***@", text)


def _texts(properties: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys and texts of properties, also of nested ones such as `auth`."""
    for key, value in properties.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, str) and value:
            yield key, value
