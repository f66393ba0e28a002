"""A coordinated group under faults: coordinators and members in processes of their own, three real brokers.

`scenario` draws the faults from a seed, and `run` carries them out. `checkers` compares the members' beliefs
(`journal`) with the coordination log as the reference reader reads it. Coordinators and members are processes
(`worker`). Proxies (`tests.fault_harness.proxy`) are between some of them and the brokers. The library does not use any
of this.
"""
