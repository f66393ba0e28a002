"""Connect to a Kafka cluster, create its clients, and look up topics, groups and offsets. No protocol rule is here.

`connection` needs no Kafka client. So a configuration can be checked, and Spark can get its options, without loading
one. `clients` creates the clients; `admin_client`, `group_offsets`, `offsets` and `inspection` send requests to the
brokers; `transactions` writes with a transactional producer. `connection_errors`, `tls_diagnostics`, `errors` and
`acls` turn failures into messages that name the cause and what to do. The package imports `marshal_dagster.errors`,
confluent-kafka, the standard library, and small helpers of `protocol` and `_internal`.
"""
