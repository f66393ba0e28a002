"""Claims Kafka partitions before Spark batches in Dagster, coordinated over Kafka alone.

What a user needs stands here by name. Each name is imported at its first use: `import marshal_dagster` alone brings
neither Dagster nor a Kafka client nor Spark, so a process that only claims never pays for the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from marshal_dagster.assets import (
        ClaimCheck,
        ClaimedAsset,
        MarshalTranslator,
        build_claim_checks,
        build_topic_asset,
        build_topic_sensor,
        kafka_partitions,
        marshal_asset,
    )
    from marshal_dagster.component import ClaimedTopicComponent
    from marshal_dagster.coordinator.client import CoordinatedMember
    from marshal_dagster.delivery import BatchRequest, ClaimedBatch, Delivery, IdleReason, PartitionReport, RangeOptions
    from marshal_dagster.errors import (
        BadRecord,
        BadRecords,
        BatchAborted,
        ClaimLost,
        ConfigurationError,
        DataLoss,
        DataTopicChanged,
        GroupPaused,
        LogChanged,
        MarshalError,
        NotCertain,
        NotCommitted,
        PlanRejected,
        RightMissing,
        SchemaDrift,
        SettingsDiffer,
        SinkRefused,
        StartUnknown,
        TopicMissing,
        UnavailableError,
        UnsafeTopic,
    )
    from marshal_dagster.jobs import build_claimed_batch_job, build_claimed_batch_schedule, build_reprocess_job
    from marshal_dagster.kafka.connection import KafkaConnection
    from marshal_dagster.membership import build_group_member_sensor
    from marshal_dagster.operator_jobs import (
        AdoptConfig,
        PauseConfig,
        ReprocessRangeConfig,
        ResumeConfig,
        RevokeConfig,
        SetPositionConfig,
        SettingsConfig,
        build_adopt_job,
        build_pause_job,
        build_reprocess_range_job,
        build_resume_job,
        build_revoke_job,
        build_set_position_job,
        build_settings_job,
    )
    from marshal_dagster.ops import ClaimedBatchConfig, DrainedBatches, build_claimed_batch_op
    from marshal_dagster.outbox.events import OutgoingEvents
    from marshal_dagster.outbox.harvester import Harvester
    from marshal_dagster.outbox.stash import Outbox, OutboxRecord
    from marshal_dagster.outbox_jobs import (
        OutboxResource,
        build_outbox_backlog_sensor,
        build_outbox_check,
        build_outbox_drain_job,
    )
    from marshal_dagster.protocol.messages import DeliveryMode, RuleSet, Settings
    from marshal_dagster.protocol.positions import StartPolicy
    from marshal_dagster.protocol.ranges import ClaimedRange
    from marshal_dagster.resources import ClaimerResource, KafkaConnectionConfig, RationalizerResource
    from marshal_dagster.sensors import (
        AlertHook,
        GivenUp,
        GivenUpPartition,
        build_dead_run_sensors,
        build_given_up_check,
        build_lag_sensor,
        build_stale_claim_sensor,
    )
    from marshal_dagster.spark.decoding import (
        Decoded,
        Nulls,
        SchemaFiles,
        SchemaRegistry,
        Schemas,
        decode_avro,
        decode_json,
        decode_protobuf,
        infer_json_schema,
    )
    from marshal_dagster.spark.reading import run_once
    from marshal_dagster.spark.session import spark_settings, start_session
    from marshal_dagster.spark.sinks import (
        DeltaSink,
        FileSink,
        KafkaSink,
        PostgresSink,
        Sink,
        WriteOutcome,
        delta_settings,
    )
    from marshal_dagster.spark.submitted import SubmittedBatch, submitted_batch
    from marshal_dagster.spark_resources import SparkConnectResource
    from marshal_dagster.submit import Submission, handed_over

__all__ = [
    "AdoptConfig",
    "AlertHook",
    "BadRecord",
    "BadRecords",
    "BatchAborted",
    "BatchRequest",
    "ClaimCheck",
    "ClaimLost",
    "ClaimedAsset",
    "ClaimedBatch",
    "ClaimedBatchConfig",
    "ClaimedRange",
    "ClaimedTopicComponent",
    "ClaimerResource",
    "ConfigurationError",
    "CoordinatedMember",
    "DataLoss",
    "DataTopicChanged",
    "Decoded",
    "Delivery",
    "DeliveryMode",
    "DeltaSink",
    "DrainedBatches",
    "FileSink",
    "GivenUp",
    "GivenUpPartition",
    "GroupPaused",
    "Harvester",
    "IdleReason",
    "KafkaConnection",
    "KafkaConnectionConfig",
    "KafkaSink",
    "LogChanged",
    "MarshalError",
    "MarshalTranslator",
    "NotCertain",
    "NotCommitted",
    "Nulls",
    "Outbox",
    "OutboxRecord",
    "OutboxResource",
    "OutgoingEvents",
    "PartitionReport",
    "PauseConfig",
    "PlanRejected",
    "PostgresSink",
    "RangeOptions",
    "RationalizerResource",
    "ReprocessRangeConfig",
    "ResumeConfig",
    "RevokeConfig",
    "RightMissing",
    "RuleSet",
    "SchemaDrift",
    "SchemaFiles",
    "SchemaRegistry",
    "Schemas",
    "SetPositionConfig",
    "Settings",
    "SettingsConfig",
    "SettingsDiffer",
    "Sink",
    "SinkRefused",
    "SparkConnectResource",
    "StartPolicy",
    "StartUnknown",
    "Submission",
    "SubmittedBatch",
    "TopicMissing",
    "UnavailableError",
    "UnsafeTopic",
    "WriteOutcome",
    "build_adopt_job",
    "build_claim_checks",
    "build_claimed_batch_job",
    "build_claimed_batch_op",
    "build_claimed_batch_schedule",
    "build_dead_run_sensors",
    "build_given_up_check",
    "build_group_member_sensor",
    "build_lag_sensor",
    "build_outbox_backlog_sensor",
    "build_outbox_check",
    "build_outbox_drain_job",
    "build_pause_job",
    "build_reprocess_job",
    "build_reprocess_range_job",
    "build_resume_job",
    "build_revoke_job",
    "build_set_position_job",
    "build_settings_job",
    "build_stale_claim_sensor",
    "build_topic_asset",
    "build_topic_sensor",
    "decode_avro",
    "decode_json",
    "decode_protobuf",
    "delta_settings",
    "handed_over",
    "infer_json_schema",
    "kafka_partitions",
    "marshal_asset",
    "run_once",
    "spark_settings",
    "start_session",
    "submitted_batch",
]

_ELSEWHERE: Final = {
    "assets": (
        "ClaimCheck",
        "ClaimedAsset",
        "MarshalTranslator",
        "build_claim_checks",
        "build_topic_asset",
        "build_topic_sensor",
        "kafka_partitions",
        "marshal_asset",
    ),
    "component": ("ClaimedTopicComponent",),
    "coordinator.client": ("CoordinatedMember",),
    "delivery": ("BatchRequest", "ClaimedBatch", "Delivery", "IdleReason", "PartitionReport", "RangeOptions"),
    "jobs": ("build_claimed_batch_job", "build_claimed_batch_schedule", "build_reprocess_job"),
    "kafka.connection": ("KafkaConnection",),
    "membership": ("build_group_member_sensor",),
    "operator_jobs": (
        "AdoptConfig",
        "PauseConfig",
        "ReprocessRangeConfig",
        "ResumeConfig",
        "RevokeConfig",
        "SetPositionConfig",
        "SettingsConfig",
        "build_adopt_job",
        "build_pause_job",
        "build_reprocess_range_job",
        "build_resume_job",
        "build_revoke_job",
        "build_set_position_job",
        "build_settings_job",
    ),
    "outbox.events": ("OutgoingEvents",),
    "outbox.harvester": ("Harvester",),
    "outbox.stash": ("Outbox", "OutboxRecord"),
    "outbox_jobs": (
        "OutboxResource",
        "build_outbox_backlog_sensor",
        "build_outbox_check",
        "build_outbox_drain_job",
    ),
    "ops": ("ClaimedBatchConfig", "DrainedBatches", "build_claimed_batch_op"),
    "protocol.messages": ("DeliveryMode", "RuleSet", "Settings"),
    "protocol.positions": ("StartPolicy",),
    "protocol.ranges": ("ClaimedRange",),
    "resources": ("ClaimerResource", "KafkaConnectionConfig", "RationalizerResource"),
    "sensors": (
        "AlertHook",
        "GivenUp",
        "GivenUpPartition",
        "build_dead_run_sensors",
        "build_given_up_check",
        "build_lag_sensor",
        "build_stale_claim_sensor",
    ),
    "spark.decoding": (
        "Decoded",
        "Nulls",
        "SchemaFiles",
        "SchemaRegistry",
        "Schemas",
        "decode_avro",
        "decode_json",
        "decode_protobuf",
        "infer_json_schema",
    ),
    "spark.reading": ("run_once",),
    "spark.session": ("spark_settings", "start_session"),
    "spark.sinks": ("DeltaSink", "FileSink", "KafkaSink", "PostgresSink", "Sink", "WriteOutcome", "delta_settings"),
    "spark.submitted": ("SubmittedBatch", "submitted_batch"),
    "spark_resources": ("SparkConnectResource",),
    "submit": ("Submission", "handed_over"),
}
"""Where a name is defined; those that are not listed are errors."""
_MODULES: Final = {name: module for module, names in _ELSEWHERE.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name at its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names with what is there already."""
    return sorted({*globals(), *__all__})
