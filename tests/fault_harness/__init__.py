"""The common part of the runs of real processes under faults: claims (`tests.faults`), outbox and coordinator.

`cluster` has three brokers, and `proxy` the links to them that fail. `run` has the processes and fault scripts of one
seed. `journal` is what processes write down, `log_watcher` reads the coordination log, and `suite` is the command with
its results and its table.
"""
