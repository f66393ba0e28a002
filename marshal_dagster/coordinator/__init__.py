"""A group coordinator: which member is to claim which partitions. Claims in the coordination log alone decide.

`assignment` are the strategies, pure functions.
"""
