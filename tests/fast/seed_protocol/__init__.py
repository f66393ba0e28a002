"""One test for each sentence of the seed protocol that promises something or gives a step.

The seed is the description of the Marshal protocol from which protocol.md was developed. A sentence is identified by
its section and place, and paraphrased. `python -m tools.seed_table` generates docs/verification/seed-protocol.md from
these tests.
"""
