"""Keep Python's cyclic garbage collector out of steps that create thousands of objects at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector in this process, unless it is off; also a decorator.

    A step about 4,096 partitions creates some 100,000 objects without cycles, which their reference counts free. The
    collector would look at them again and again, and that takes a third of the step. A step ends within the time limit
    of the log, so little other garbage can gather. A thread that finds it paused by another leaves it to that one.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
