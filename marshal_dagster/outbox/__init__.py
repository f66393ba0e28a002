"""A transactional outbox: rows written in a transaction of PostgreSQL's reach Kafka, in order per key.

`writer` writes rows, `harvester` publishes them; `harvest` are its steps over the ports of `interfaces`, which `store`
and `publisher` implement. `schema` makes the tables, `status` looks at them and after them.
"""
