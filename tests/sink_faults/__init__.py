"""Faults of groups that write to a sink with Spark: processes are killed and stopped, and positions are set back.

`worker` is a process with a Spark session and two members. `outputs` has the outputs, `scenario` the faults of a seed,
`run` its run, and `checkers` compares the output with the input, record by record.
"""
