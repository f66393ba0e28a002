"""An outbox under faults: writers, harvesters in processes of their own, three real brokers and a real PostgreSQL.

`scenario` draws from a seed what happens, `run` lets it happen, `checkers` compares what writers committed (`writers`)
with what consumers read. Harvesters are processes (`worker`); proxies of `tests.faults` stand between them and both of
the services (`cluster`). Nothing of this is part of the library.
"""
