"""The Kafka sink: writes rows as records of a Kafka topic, each offset range in one transaction."""
