"""What holds for every test: an interrupt is heeded, and Spark's JVMs are made for short lives.

A shell starts background commands with SIGINT ignored, and every process that a test starts would inherit that; so it
does the place of Spark's defaults, which halve what a JVM of a few seconds costs.
"""

import os
import signal
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "spark_conf"))
