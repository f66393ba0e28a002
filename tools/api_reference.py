"""Extensions of griffe, with which mkdocstrings reads the library for the API reference (see `mkdocs.yml`).

`FieldDocs` shows each field of a pydantic or Dagster class with its description and default. `InternalMembers` hides
members that other modules of the library use, and that are therefore not private, but that are not for users.
"""

import enum
import importlib
from collections.abc import Mapping
from typing import Any, Final

import griffe

INTERNAL: Final[Mapping[str, str]] = {
    "_internal.postgres.Database": "connect error_text has_password",
    "batches.batch.ClaimedBatch": "advice all_ranges manifest phases",
    "batches.session.BatchSession": "open_plans positions_batch",
    "batches.submitted.SubmittedBatch": "failing_record outcome watch_until",
    "component.ClaimedTopicComponent": "build_defs",
    "coordinator.service.CoordinatorOptions": "recovery_ms",
    "coordinator.transport.CoordinatorTopics": "check check_member partitions",
    "jobs.admin.PartitionsConfig": "chosen",
    "kafka.connection.KafkaConnection": "uses_sasl uses_tls",
    "outbox.schema.OutboxTables": "channel check_tables hindered missing named registration translated_errors",
    "resources.claimer.ClaimerResource": (
        "close coordination data group_keys member_session_ms open_delivery open_log require_rights revoke_runs "
        "settings teardown_after_execution"
    ),
    "resources.connection.CheckedResource": "get_resource_definition",
    "resources.connection.KafkaConnectionConfig": "secrets_in_code",
    "resources.outbox.OutboxResource": "get_resource_definition",
    "resources.rationalizer.CoordinationResource": "coordination data open_data rationalizer world",
    "resources.rationalizer.RationalizerResource": "coordination data",
    "resources.spark_connect.SparkConnectResource": "get_resource_definition teardown_after_execution",
    "sensors._exhausted_plans.ExhaustedPlan": "place",
    "sinks.output_groups.OutputGroups": "others",
}
"""Members that the reference hides, by module and class within the package."""

_SHOWN_DEFAULTS: Final = (str, int, float, bool, type(None), list, tuple, dict)


class FieldDocs(griffe.Extension):
    """Reads the descriptions and defaults of fields from the classes, because the code may compute them."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:  # noqa: ANN401 - griffe's signature
        """Document the fields of a pydantic class."""
        if "Field" not in cls.module.members:
            return
        kind = getattr(importlib.import_module(cls.module.path), cls.name, None)
        for name, field in getattr(kind, "model_fields", {}).items():
            attribute = cls.members.get(name)
            if isinstance(attribute, griffe.Attribute) and field.description:
                attribute.docstring = griffe.Docstring(field.description, parent=attribute)
                default = field.default.value if isinstance(field.default, enum.Enum) else field.default
                is_shown = not field.is_required() and isinstance(default, _SHOWN_DEFAULTS)
                attribute.value = repr(default) if is_shown else None


class InternalMembers(griffe.Extension):
    """Removes the members in `INTERNAL`."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:  # noqa: ANN401 - griffe's signature
        """Remove the internal members of a class."""
        for name in INTERNAL.get(cls.path.removeprefix("marshal_dagster."), "").split():
            cls.members.pop(name, None)
