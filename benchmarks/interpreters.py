"""Environment for fresh Python processes, with compiled byte code, as an installed package has it."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment() -> Iterator[Mapping[str, str]]:
    """Provide the environment variables for fresh interpreters.

    The interpreters keep byte code in a temporary folder, so that only the first one compiles the sources. pip compiles
    what it installs, but the checkout that is measured may not be compiled yet.
    """
    with tempfile.TemporaryDirectory(prefix="marshal-benchmark-") as folder:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        yield {**kept, "PYTHONPYCACHEPREFIX": folder}
