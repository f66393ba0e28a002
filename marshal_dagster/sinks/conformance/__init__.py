"""A kit of cases that show whether a sink keeps the promise of effectively once; for the tests of whoever writes one.

`target` is what a test tells of its output, `stepping` lets a writer die or stall ahead of any of its lines, `cases`,
`replacing`, `any_order` and `histories` hold the cases. Nothing here needs pytest or another test runner: a case raises
`AssertionError`. Imports as the sinks do. Ranges and rows are made here, go through the sink and are read back by the
target.
"""

from marshal_dagster.sinks.conformance import cases, generations, histories, unordered_ranges
from marshal_dagster.sinks.conformance.case import Case
from marshal_dagster.sinks.conformance.target import LocalFrame, Row, Target

CASES: tuple[Case, ...] = (*cases.CASES, *generations.CASES, *unordered_ranges.CASES, *histories.CASES)
"""All cases. Each wants a target of its own, whose output is empty."""

__all__ = ["CASES", "Case", "LocalFrame", "Row", "Target"]
