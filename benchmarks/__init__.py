"""Benchmarks: the library and the client or connector that it is built on (`docs/verification/benchmarks.md`).

Each benchmark measures both sides alternately in one run. It is a module of its own, listed in `registry`. `harness`
takes the samples and reports them, `machine` records the conditions, `services` starts a broker, and `bare` is the
Kafka client to compare with. None of this is in the wheel.
"""
