"""Benchmarks: the library beside the bare thing that it stands on, alternating in one run (`docs/benchmarks.md`).

`harness` measures and reports, `machine` tells the conditions, `services` starts a broker, `bare` is the Kafka client
to compare with. Each benchmark is a module of its own, listed in `registry`. Not in the wheel.
"""
