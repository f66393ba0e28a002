"""Groups, outboxes and coordinated groups under faults, on three brokers that they share."""
