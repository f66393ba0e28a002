"""Spark's standalone cluster, which the files of this folder share."""
