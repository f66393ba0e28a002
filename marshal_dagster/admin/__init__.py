"""Operations on a group for operators: pause, resume, settings, positions, reprocessing, revocation, log recovery.

The command line and Dagster's admin jobs call them; this package uses neither Dagster nor a terminal. It builds on
`coordination`, `kafka`, `spark` and `sinks`. Each operation first reads the log and returns what would change. After
the operator has confirmed, it writes the records that the protocol requires. `times` and `position_spec` parse what an
operator enters and do no I/O.
"""
