"""What a person asks of a group, from the command line or from Dagster: pause, resume, set positions, revoke.

Beside `delivery` on floor 3: stands on `coordination` and `kafka`, knows nothing of Dagster or a terminal. `times` and
`targets` turn what a person says into values, by pure code; `pausing`, `positions` and `revoking` look at the log, show
what was and what is to be, and hand over to the floor below, which does what the protocol asks.
"""
