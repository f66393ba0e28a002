"""Dagster assets and asset checks.

`decorator` builds assets that claimed batches materialize. `topics` shows data topics as observable assets. `checks`
has the asset checks for both.
"""
