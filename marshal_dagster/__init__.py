"""Claim Kafka partitions for Spark batches in Dagster, coordinated through one Kafka topic.

This module exports every public name. It imports each name on first use, so `import marshal_dagster` alone loads
neither Dagster nor a Kafka client nor Spark. A process that only claims partitions never loads the others.
"""

from typing import TYPE_CHECKING, Final

from marshal_dagster._internal.lazy_names import lazy_names

if TYPE_CHECKING:
    __all__: list[str]
    # For type checkers only. They ignore `__getattr__` below, so they report a name that is not public as an error.
    from marshal_dagster._internal.health_server import HealthServer as HealthServer
    from marshal_dagster._internal.postgres import Database as Database
    from marshal_dagster.assets.checks import ClaimCheck as ClaimCheck
    from marshal_dagster.assets.checks import build_claim_checks as build_claim_checks
    from marshal_dagster.assets.checks import build_outbox_check as build_outbox_check
    from marshal_dagster.assets.decorator import ClaimedAsset as ClaimedAsset
    from marshal_dagster.assets.decorator import DagsterMarshalTranslator as DagsterMarshalTranslator
    from marshal_dagster.assets.decorator import kafka_partitions_def as kafka_partitions_def
    from marshal_dagster.assets.decorator import marshal_asset as marshal_asset
    from marshal_dagster.assets.reprocess import ReprocessWindowConfig as ReprocessWindowConfig
    from marshal_dagster.assets.reprocess import build_reprocess_asset as build_reprocess_asset
    from marshal_dagster.assets.topics import build_topic_asset as build_topic_asset
    from marshal_dagster.assets.topics import build_topic_sensor as build_topic_sensor
    from marshal_dagster.batches import BatchRequest as BatchRequest
    from marshal_dagster.batches import BatchSession as BatchSession
    from marshal_dagster.batches import ClaimedBatch as ClaimedBatch
    from marshal_dagster.batches import IdleReason as IdleReason
    from marshal_dagster.batches import PartitionReport as PartitionReport
    from marshal_dagster.batches import RangeOptions as RangeOptions
    from marshal_dagster.batches.submitted import SubmittedBatch as SubmittedBatch
    from marshal_dagster.batches.submitted import pipes_parameters as pipes_parameters
    from marshal_dagster.batches.submitted import submitted_batch as submitted_batch
    from marshal_dagster.component import ClaimedTopicComponent as ClaimedTopicComponent
    from marshal_dagster.coordinator.client import CoordinatedMember as CoordinatedMember
    from marshal_dagster.errors import AuthorizationError as AuthorizationError
    from marshal_dagster.errors import BadRecord as BadRecord
    from marshal_dagster.errors import BatchAbortedError as BatchAbortedError
    from marshal_dagster.errors import ClaimLostError as ClaimLostError
    from marshal_dagster.errors import CommitFailedError as CommitFailedError
    from marshal_dagster.errors import ConfigurationError as ConfigurationError
    from marshal_dagster.errors import CoordinationLogChangedError as CoordinationLogChangedError
    from marshal_dagster.errors import DataLossError as DataLossError
    from marshal_dagster.errors import DataTopicChangedError as DataTopicChangedError
    from marshal_dagster.errors import DecodeError as DecodeError
    from marshal_dagster.errors import FailingRecordError as FailingRecordError
    from marshal_dagster.errors import GoGroupError as GoGroupError
    from marshal_dagster.errors import GroupPausedError as GroupPausedError
    from marshal_dagster.errors import IncompleteLogError as IncompleteLogError
    from marshal_dagster.errors import MarshalError as MarshalError
    from marshal_dagster.errors import PlanRejectedError as PlanRejectedError
    from marshal_dagster.errors import PortInUseError as PortInUseError
    from marshal_dagster.errors import PositionNotSetError as PositionNotSetError
    from marshal_dagster.errors import RecoveryFailedError as RecoveryFailedError
    from marshal_dagster.errors import SchemaDriftError as SchemaDriftError
    from marshal_dagster.errors import SettingsMismatchError as SettingsMismatchError
    from marshal_dagster.errors import SettingsNotSetError as SettingsNotSetError
    from marshal_dagster.errors import SinkRejectedError as SinkRejectedError
    from marshal_dagster.errors import StartPositionError as StartPositionError
    from marshal_dagster.errors import TimestampTypeError as TimestampTypeError
    from marshal_dagster.errors import TopicNotFoundError as TopicNotFoundError
    from marshal_dagster.errors import UnavailableError as UnavailableError
    from marshal_dagster.errors import UnsafeTopicError as UnsafeTopicError
    from marshal_dagster.jobs.admin import ImportPositionsConfig as ImportPositionsConfig
    from marshal_dagster.jobs.admin import PauseConfig as PauseConfig
    from marshal_dagster.jobs.admin import ReprocessRangeConfig as ReprocessRangeConfig
    from marshal_dagster.jobs.admin import ResumeConfig as ResumeConfig
    from marshal_dagster.jobs.admin import RetryConfig as RetryConfig
    from marshal_dagster.jobs.admin import RevokeConfig as RevokeConfig
    from marshal_dagster.jobs.admin import SetPositionConfig as SetPositionConfig
    from marshal_dagster.jobs.admin import SettingsConfig as SettingsConfig
    from marshal_dagster.jobs.admin import build_import_positions_job as build_import_positions_job
    from marshal_dagster.jobs.admin import build_pause_job as build_pause_job
    from marshal_dagster.jobs.admin import build_reprocess_range_job as build_reprocess_range_job
    from marshal_dagster.jobs.admin import build_resume_job as build_resume_job
    from marshal_dagster.jobs.admin import build_retry_job as build_retry_job
    from marshal_dagster.jobs.admin import build_revoke_job as build_revoke_job
    from marshal_dagster.jobs.admin import build_set_position_job as build_set_position_job
    from marshal_dagster.jobs.admin import build_settings_job as build_settings_job
    from marshal_dagster.jobs.batch import build_claimed_batch_job as build_claimed_batch_job
    from marshal_dagster.jobs.batch import build_claimed_batch_schedule as build_claimed_batch_schedule
    from marshal_dagster.jobs.batch import build_reprocess_job as build_reprocess_job
    from marshal_dagster.jobs.outbox import build_outbox_drain_job as build_outbox_drain_job
    from marshal_dagster.kafka.connection import KafkaConnection as KafkaConnection
    from marshal_dagster.ops.claimed_batch import build_claimed_batch_op as build_claimed_batch_op
    from marshal_dagster.ops.config import ClaimedBatchConfig as ClaimedBatchConfig
    from marshal_dagster.ops.metadata import BatchesResult as BatchesResult
    from marshal_dagster.outbox.events import OutgoingEvents as OutgoingEvents
    from marshal_dagster.outbox.harvester import Harvester as Harvester
    from marshal_dagster.outbox.writer import Outbox as Outbox
    from marshal_dagster.outbox.writer import OutboxRecord as OutboxRecord
    from marshal_dagster.pipes import run_with_pipes as run_with_pipes
    from marshal_dagster.protocol.batch_planning import ClaimedRange as ClaimedRange
    from marshal_dagster.protocol.batch_planning import StartPolicy as StartPolicy
    from marshal_dagster.protocol.messages import DeliveryMode as DeliveryMode
    from marshal_dagster.protocol.messages import GroupSettings as GroupSettings
    from marshal_dagster.protocol.messages import RuleSet as RuleSet
    from marshal_dagster.resources.claimer import ClaimerResource as ClaimerResource
    from marshal_dagster.resources.connection import KafkaConnectionConfig as KafkaConnectionConfig
    from marshal_dagster.resources.launchpad import configured_in_code as configured_in_code
    from marshal_dagster.resources.outbox import OutboxResource as OutboxResource
    from marshal_dagster.resources.rationalizer import RationalizerResource as RationalizerResource
    from marshal_dagster.resources.spark_connect import SparkConnectResource as SparkConnectResource
    from marshal_dagster.sensors._exhausted_plans import AlertHook as AlertHook
    from marshal_dagster.sensors._exhausted_plans import ExhaustedPlan as ExhaustedPlan
    from marshal_dagster.sensors._exhausted_plans import ExhaustedPlans as ExhaustedPlans
    from marshal_dagster.sensors._exhausted_plans import build_exhausted_plans_check as build_exhausted_plans_check
    from marshal_dagster.sensors.group_membership import build_group_member_sensor as build_group_member_sensor
    from marshal_dagster.sensors.lag import build_lag_sensor as build_lag_sensor
    from marshal_dagster.sensors.outbox_backlog import build_outbox_backlog_sensor as build_outbox_backlog_sensor
    from marshal_dagster.sensors.run_failure import build_run_failure_sensors as build_run_failure_sensors
    from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor as build_stale_claim_sensor
    from marshal_dagster.sinks import DeltaSink as DeltaSink
    from marshal_dagster.sinks import FileSink as FileSink
    from marshal_dagster.sinks import IcebergSink as IcebergSink
    from marshal_dagster.sinks import KafkaSink as KafkaSink
    from marshal_dagster.sinks import MariaDBSink as MariaDBSink
    from marshal_dagster.sinks import PostgresSink as PostgresSink
    from marshal_dagster.sinks import RemoteSink as RemoteSink
    from marshal_dagster.sinks import Sink as Sink
    from marshal_dagster.sinks import WriteResult as WriteResult
    from marshal_dagster.sinks import delta_settings as delta_settings
    from marshal_dagster.spark.decoding import ConfluentSchemas as ConfluentSchemas
    from marshal_dagster.spark.decoding import DecodedBatch as DecodedBatch
    from marshal_dagster.spark.decoding import NullPolicy as NullPolicy
    from marshal_dagster.spark.decoding import SchemaFiles as SchemaFiles
    from marshal_dagster.spark.decoding import SchemaRegistry as SchemaRegistry
    from marshal_dagster.spark.decoding import Schemas as Schemas
    from marshal_dagster.spark.decoding import decode_avro as decode_avro
    from marshal_dagster.spark.decoding import decode_json as decode_json
    from marshal_dagster.spark.decoding import decode_protobuf as decode_protobuf
    from marshal_dagster.spark.decoding import infer_json_schema as infer_json_schema
    from marshal_dagster.spark.reader import run_once as run_once
    from marshal_dagster.spark.session import spark_settings as spark_settings
    from marshal_dagster.spark.session import start_session as start_session

_NAMES: Final = {
    "_internal.health_server": "HealthServer",
    "_internal.postgres": "Database",
    "assets.checks": "ClaimCheck build_claim_checks build_outbox_check",
    "assets.decorator": "ClaimedAsset DagsterMarshalTranslator kafka_partitions_def marshal_asset",
    "assets.reprocess": "ReprocessWindowConfig build_reprocess_asset",
    "assets.topics": "build_topic_asset build_topic_sensor",
    "batches": "BatchRequest BatchSession ClaimedBatch IdleReason PartitionReport RangeOptions",
    "batches.submitted": "SubmittedBatch pipes_parameters submitted_batch",
    "component": "ClaimedTopicComponent",
    "coordinator.client": "CoordinatedMember",
    "errors": (
        "AuthorizationError BadRecord BatchAbortedError ClaimLostError CommitFailedError ConfigurationError "
        "CoordinationLogChangedError DataLossError DataTopicChangedError DecodeError FailingRecordError GoGroupError "
        "GroupPausedError IncompleteLogError MarshalError PlanRejectedError PortInUseError PositionNotSetError "
        "RecoveryFailedError SchemaDriftError SettingsMismatchError SettingsNotSetError SinkRejectedError "
        "StartPositionError TimestampTypeError TopicNotFoundError UnavailableError UnsafeTopicError"
    ),
    "jobs.admin": (
        "ImportPositionsConfig PauseConfig ReprocessRangeConfig ResumeConfig RetryConfig RevokeConfig "
        "SetPositionConfig SettingsConfig build_import_positions_job build_pause_job build_reprocess_range_job "
        "build_resume_job build_retry_job build_revoke_job build_set_position_job build_settings_job"
    ),
    "jobs.batch": "build_claimed_batch_job build_claimed_batch_schedule build_reprocess_job",
    "jobs.outbox": "build_outbox_drain_job",
    "kafka.connection": "KafkaConnection",
    "ops.claimed_batch": "build_claimed_batch_op",
    "ops.config": "ClaimedBatchConfig",
    "ops.metadata": "BatchesResult",
    "outbox.events": "OutgoingEvents",
    "outbox.harvester": "Harvester",
    "outbox.writer": "Outbox OutboxRecord",
    "pipes": "run_with_pipes",
    "protocol.batch_planning": "ClaimedRange StartPolicy",
    "protocol.messages": "DeliveryMode GroupSettings RuleSet",
    "resources.claimer": "ClaimerResource",
    "resources.connection": "KafkaConnectionConfig",
    "resources.launchpad": "configured_in_code",
    "resources.outbox": "OutboxResource",
    "resources.rationalizer": "RationalizerResource",
    "resources.spark_connect": "SparkConnectResource",
    "sensors._exhausted_plans": "AlertHook ExhaustedPlan ExhaustedPlans build_exhausted_plans_check",
    "sensors.group_membership": "build_group_member_sensor",
    "sensors.lag": "build_lag_sensor",
    "sensors.outbox_backlog": "build_outbox_backlog_sensor",
    "sensors.run_failure": "build_run_failure_sensors",
    "sensors.stale_claims": "build_stale_claim_sensor",
    "sinks": (
        "DeltaSink FileSink IcebergSink KafkaSink MariaDBSink PostgresSink RemoteSink Sink WriteResult delta_settings"
    ),
    "spark.decoding": (
        "ConfluentSchemas DecodedBatch NullPolicy SchemaFiles SchemaRegistry Schemas decode_avro decode_json "
        "decode_protobuf infer_json_schema"
    ),
    "spark.reader": "run_once",
    "spark.session": "spark_settings start_session",
}
"""The public names of each module, by the module's path inside the package."""

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__, {f"{__name__}.{module}": names for module, names in _NAMES.items()}
    )
