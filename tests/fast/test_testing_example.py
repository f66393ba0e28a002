"""Run the tests of `examples/testing` that need no Spark, as the documentation shows them."""

from test_orders_asset import (
    test_a_crash_before_the_commit_repeats,
    test_a_crash_before_the_function_repeats_nothing,
    test_a_crash_in_the_middle_loses_nothing,
    test_each_order_is_sent,
    test_the_definitions_load,
)

__all__ = [
    "test_a_crash_before_the_commit_repeats",
    "test_a_crash_before_the_function_repeats_nothing",
    "test_a_crash_in_the_middle_loses_nothing",
    "test_each_order_is_sent",
    "test_the_definitions_load",
]
