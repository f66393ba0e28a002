"""A transactional outbox: rows written in a transaction of PostgreSQL's reach Kafka, in order per key.

`stash` writes rows, `harvester` publishes them; `harvest` are its steps over the ports of `ports`, which `store` and
`publisher` implement. `tables` makes the tables, `looking` looks at them and after them.
"""
