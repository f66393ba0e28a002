"""An outbox under faults: writers, harvesters in processes of their own, three real brokers and a real PostgreSQL.

`scenario` draws the faults from a seed, and `run` carries them out. `checkers` compares what writers committed
(`writers`) with what consumers read. Harvesters are processes (`worker`). Proxies (`tests.fault_harness.proxy`) are
between them and both services (`cluster`). The library does not use any of this.
"""
