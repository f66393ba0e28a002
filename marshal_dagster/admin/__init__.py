"""What a person asks of a group, from the command line or from Dagster: pause, resume, set positions, adopt, revoke.

Beside `batches`: imports `coordination`, `kafka` and `spark`, knows nothing of Dagster or a terminal.
`times` and `position_spec` turn what a person says into values, by pure code; the others look at the log, show what was
and what is to be, and hand over to the floor below, which does what the protocol asks.
"""
