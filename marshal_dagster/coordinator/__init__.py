"""The group coordinator: advises each member of a group which partitions to claim.

The advice only balances the work. The claims in the coordination log decide which member processes a partition.

- `assignment` has the assignment strategies, as pure functions.
- `group` leads one group, also without I/O: `group_members` has its members, `workload` their partitions and
  `rebalance` the states of a rebalance.
- `service` runs a coordinator process over the Kafka topics of `transport`; `messages` are the records in them.
- `member` and `client` are the member's side. `group_view` and `assignment_reader` read what is assigned.
"""

from typing import Final

DEFAULT_TOPIC: Final = "__marshal_coordinator"
"""Name of the topic with the members' messages. The names of the other two topics are derived from it."""
