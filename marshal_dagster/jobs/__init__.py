"""Factories of Dagster jobs and schedules.

`batch` builds jobs that process claimed batches, and their schedules. `admin` builds jobs with which an operator acts
on a group from the launchpad. `outbox` builds the job that drains an outbox.
"""
