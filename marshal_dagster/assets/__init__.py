"""Assets of claimed batches, data topics as assets, and checks."""

from marshal_dagster.assets.checks import ClaimCheck, build_claim_checks
from marshal_dagster.assets.decorator import ClaimedAsset, DagsterMarshalTranslator, kafka_partitions_def, marshal_asset
from marshal_dagster.assets.topics import build_topic_asset, build_topic_sensor

__all__ = [
    "ClaimCheck",
    "ClaimedAsset",
    "DagsterMarshalTranslator",
    "build_claim_checks",
    "build_topic_asset",
    "build_topic_sensor",
    "kafka_partitions_def",
    "marshal_asset",
]
