"""A transactional outbox: rows that are written in a PostgreSQL transaction are published to Kafka, in order per key.

- `writer` writes rows, and `events` writes them with the result of a claimed batch.
- `harvester` publishes the rows and deletes them; a row that cannot be published is set aside in a
  second table. `harvest`
  has the steps of that, and `backoff` the waits after a refusal. `interfaces` are the protocols that these steps need:
  `store` implements that of PostgreSQL, `publisher` that of Kafka.
- `schema` creates the tables, `status` inspects them, and `metrics` measures a harvester.
"""
