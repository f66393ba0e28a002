"""Jobs and schedules: claimed batches, what an operator does to a group, and draining an outbox."""
