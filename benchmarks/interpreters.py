"""Fresh Python processes, with byte code at hand as an installed package has it."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment() -> Iterator[Mapping[str, str]]:
    """Give the environment for fresh interpreters.

    They keep byte code in a folder of their own, so that after the first of them none compiles a source again: pip has
    done that for what it installed, but perhaps nobody has for the checkout that is measured.
    """
    with tempfile.TemporaryDirectory(prefix="marshal-benchmark-") as folder:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        yield {**kept, "PYTHONPYCACHEPREFIX": folder}
