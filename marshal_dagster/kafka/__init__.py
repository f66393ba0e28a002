"""Connect to a Kafka cluster, create its clients, and look up topics, groups and offsets. No protocol rule is here.

`connection` loads no Kafka client, so a process can check a configuration or get Spark's options without one. `clients`
creates the clients; `admin_client`, `group_offsets`, `offsets` and `inspection` send requests to the brokers;
`transactions` writes with a transactional producer. `connection_errors`, `tls_diagnostics`, `errors` and `acls` turn
failures into messages that name the cause and what to do. The package imports `marshal_dagster.errors`,
confluent-kafka, the standard library, and small helpers of `protocol` and `_internal`.
"""
