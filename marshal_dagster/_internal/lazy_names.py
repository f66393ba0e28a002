"""Let a package export names whose modules are imported on first use (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from marshal_dagster._internal.collector import paused_collector


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports each of its names on first use.

    The cyclic garbage collector is paused during such an import. It would look at all of Dagster's objects several
    times, and that takes a third of the import.

    Args:
        package: The package's `__name__`.
        names: For each module its names, separated by spaces.

    Example:
        ```python
        __getattr__, __dir__, __all__ = lazy_names(__name__, {"json.decoder": "JSONDecoder JSONDecodeError"})
        ```
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with paused_collector():
            value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names_of_package, list(modules)
