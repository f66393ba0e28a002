"""Kafka as an outside thing: how to connect to it, its clients, and what the broker knows of topics and groups.

`connection` needs no Kafka client, so that a configuration can be checked, and Spark be given its options, without
loading one; `clients` makes the clients, `admin_client` and `group_offsets` ask the broker, `connection_errors` and
`errors` say what went wrong. It imports `marshal_dagster.errors`, confluent-kafka and the standard library.
"""
