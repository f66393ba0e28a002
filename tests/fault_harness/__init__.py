"""What runs of real processes under faults share: claims (`tests.faults`), outbox and coordinator use it.

`cluster` has three brokers, `proxy` the links to them that fail, `run` the processes and scripts of one seed, `journal`
what processes write down, `log_watcher` the coordination log, and `suite` the command with its results and its table.
"""
