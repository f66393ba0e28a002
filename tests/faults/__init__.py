"""Groups of real members under faults, on a real Kafka of three brokers.

`scenario` draws the faults from a seed, and `run` carries them out. `checkers` compares the recorded log with the
members' journals, with the simulator's checkers. Members are processes (`worker`). A proxy
(`tests.fault_harness.proxy`) is between them and the brokers (`tests.fault_harness.cluster`). The library does not use
any of this.
"""
