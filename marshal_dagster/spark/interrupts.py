"""Clean up in a Spark session, unless an interrupt ends the work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def unless_interrupted(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` at the end of the block and after an error, but not after an interrupt.

    After an interrupt the JVM would answer the call only after its current job.
    """
    try:
        yield
    except Exception:
        clean_up()
        raise
    else:
        clean_up()
