"""The conformance kit: test cases that check whether a sink writes each range effectively once.

Use it to test a sink of your own. A test describes its output as a `Target` and runs all `CASES` on it. Each case sends
ranges and rows through the sink, reads the output back through the target, and raises `AssertionError` if the sink is
wrong. No test runner is needed.

- `target`: the description of the output, and the ranges and rows that the cases use.
- `interrupts`: writers that die or stall before any of their lines.
- `cases`, `generations`, `unordered_ranges`, `histories`: the cases.

Imports are limited as in `marshal_dagster.sinks`.
"""

from marshal_dagster.sinks.conformance import cases, generations, histories, unordered_ranges
from marshal_dagster.sinks.conformance.case import Case
from marshal_dagster.sinks.conformance.target import LocalFrame, Row, Target

CASES: tuple[Case, ...] = (*cases.CASES, *generations.CASES, *unordered_ranges.CASES, *histories.CASES)
"""All cases. Each needs a target of its own with an empty output."""

__all__ = ["CASES", "Case", "LocalFrame", "Row", "Target"]
