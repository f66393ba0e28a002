"""Races of the processes that write ranges of a Kafka output: many write the same ranges, and are killed or stopped.

`local_tasks` replaces Spark: it runs the tasks of a job in processes, repeats those that die, and runs some twice.
`worker` is such a process, with its fault. `race` has the runs of one seed, and `checks` compares the output with the
input, record by record.
"""
