"""Resources whose settings Dagster's launchpad does not copy into the config of a run."""

import json
from typing import Any

from dagster import ConfigurableResource, Field, ResourceDefinition, Shape
from dagster._config.pythonic_config import ConfigurableResourceFactoryResourceDefinition  # has no public name
from dagster._core.definitions.definition_config_schema import (  # have no public names
    ConfiguredDefinitionConfigSchema,
    DefinitionConfigSchema,
)


def configured_in_code(resource: ConfigurableResource[Any]) -> ResourceDefinition:
    """Return a resource for `Definitions` whose settings stay out of Dagster's launchpad.

    Without it a launchpad that opens, and its button *Scaffold all default config*, copy all settings of each resource
    into the run config. They include those of the code server's machine, such as paths of jars. A run config can still
    replace single settings. The resources of this package need no such call.

    Args:
        resource: A resource with all its settings, such as a `LazyPySparkResource`.

    Returns:
        The definition of the resource.

    Example:
        ```python
        spark = LazyPySparkResource(spark_config=spark_settings(app_name="shops"))
        defs = Definitions(jobs=[job], resources={"pyspark": configured_in_code(spark), "claimer": claimer})
        ```
    """
    return without_defaults(resource.get_resource_definition())


def without_defaults(definition: ResourceDefinition) -> ResourceDefinition:
    """Return a definition with the same settings, whose run config is empty by default.

    Dagster copies the default run config of a resource into launchpads.
    """
    schema = _ConfiguredInCode(definition)
    if not isinstance(definition, ConfigurableResourceFactoryResourceDefinition):
        return definition.copy_for_configured(None, schema)
    return ConfigurableResourceFactoryResourceDefinition(
        definition.configurable_resource_cls,
        definition.resource_fn,
        schema,
        definition.description,
        definition.nested_resources,
        definition.nested_partial_resources,
        definition._is_dagster_maintained(),  # noqa: SLF001 - Dagster shows its badge
    )


class _ConfiguredInCode(ConfiguredDefinitionConfigSchema):
    """The run config of a resource: all fields are optional. It replaces settings of the definition in code."""

    def __init__(self, definition: ResourceDefinition) -> None:
        field = definition.get_config_field()
        config_type: Any = field.config_type  # a Shape
        settings = field.default_value if field.default_provided else {}
        fields = {
            name: Field(each.config_type, is_required=False, description=each.description)
            for name, each in config_type.fields.items()
        }
        optional = DefinitionConfigSchema(Field(Shape(fields)))  # type: ignore[no-untyped-call]
        super().__init__(definition, optional, lambda given: {**settings, **given})
        self._settings = settings

    @property
    def default_provided(self) -> bool:
        """Whether the page of the resource has settings to show."""
        return True

    @property
    def default_value_as_json_str(self) -> str:
        """The settings that the page of the resource shows."""
        return json.dumps(self._settings)
