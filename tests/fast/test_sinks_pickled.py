"""Sinks can be pickled, because Spark and multiprocess executors pass them to other processes."""

import pickle

import pytest

from marshal_dagster import DeltaSink, IcebergSink, KafkaConnection, KafkaSink, PostgresSink, Sink

SINKS: list[Sink] = [
    DeltaSink("/lake/orders"),
    IcebergSink("shop.orders"),
    KafkaSink(KafkaConnection(bootstrap_servers="broker:9092"), "orders"),
    PostgresSink("postgresql://reader@database/shop", "orders"),
]


@pytest.mark.parametrize("sink", SINKS, ids=repr)
def test_a_sink_is_the_same_after_a_pickle(sink: Sink) -> None:
    """The copy names the same output."""
    assert repr(pickle.loads(pickle.dumps(sink))) == repr(sink)  # noqa: S301 - our own bytes
