"""What ops, assets, jobs and sensors share about Dagster runs.

`status` decides which runs have ended, `abandoned_work` finds the unfinished work of dead members, and `names` has tags
and names. The other modules read and write what runs record in Dagster: announcements, batches, failures, checks.
"""
