"""Leaders elected over Kafka alone: whoever owns a partition of a leader topic leads, while it hears itself.

The algorithm is Fast NELI, as `shared/seeds/outbox-harvester.txt` describes it, with a fencing number for each term.
"""
