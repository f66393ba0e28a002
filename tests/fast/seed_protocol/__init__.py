"""One test for each sentence of the seed protocol that promises something or gives a step.

The seed is the description of the Marshal protocol that protocol.md started from; a sentence is named here by its
section and place and told in other words. `python -m tools.seed_table` makes docs/seed-protocol.md of these tests.
"""
