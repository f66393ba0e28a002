"""What holds for every test: an interrupt is heeded, also where the suite itself was started in the background.

A shell starts background commands with SIGINT ignored, and every process that a test starts would inherit that.
"""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
