"""What ops, assets, jobs and sensors share about Dagster runs.

`status` decides which runs have ended, `abandoned_work` finds the unfinished work of dead members, and `names` has the
tags and names. The other modules write records of runs to Dagster and read them: announcements, batches, failures and
checks.
"""
