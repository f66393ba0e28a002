"""The JSON schema of the component's YAML, by which editors and `dg check yaml` check a `defs.yaml`.

Dagster derives a schema in which every field may be any text, because any text may be a template. `CheckedModel` makes
it as strict as the component itself, as far as one file shows a mistake: types, names, limits and fields that exclude
each other. What needs the function's file, the sink or an environment variable is left to `dg check defs`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args

from dagster import Model, Resolvable
from pydantic import BaseModel

from marshal_dagster.kafka.authentication import METHODS, SASL_FIELDS
from marshal_dagster.kafka.connection import SECRETS
from marshal_dagster.kafka.secret_text import FILE_OF
from marshal_dagster.kafka.tls_settings import EXCLUSIVE_FIELDS, TLS_FIELDS

Schema = dict[str, Any]

_TEMPLATE: Final = r"\{\{"
_TEXT_OF: Final[Mapping[str, str]] = {
    "boolean": "^(true|false)$",
    "integer": r"^[-+]?\d+$",
    "number": r"^[-+]?[\d.]+([eE][-+]?\d+)?$",
}
"""For each JSON type the texts that the component takes as a value of it."""


class CheckedModel(Model, Resolvable):
    """A model whose schema refuses what the model itself refuses."""

    @classmethod
    def model(cls) -> type[BaseModel]:
        """Return the model that Dagster derives for YAML, with the strict schema.

        Returns:
            The derived model.
        """
        derived = super().model()
        extra = derived.model_config.get("json_schema_extra")
        if not callable(extra):

            def make_strict(schema: Schema) -> None:
                schema.update(extra or {})
                for name, field in cls.model_fields.items():
                    _make_field_strict(schema["properties"][name], field.annotation)
                    schema["properties"][name].setdefault("description", field.description)
                    schema["properties"][name].update(cls.field_schemas().get(name, {}))
                schema["allOf"] = cls.rules()

            derived.model_config["json_schema_extra"] = make_strict
        return derived

    @classmethod
    def field_schemas(cls) -> Mapping[str, Schema]:
        """Return what must hold for fields, each by itself.

        Returns:
            A JSON schema by the field's name.
        """
        return {}

    @classmethod
    def rules(cls) -> list[Schema]:
        """Return what must hold for several fields together.

        Returns:
            JSON schemas of the whole object.
        """
        return []


def text_matching(pattern: str) -> Schema:
    """Return the schema of a text that matches a pattern or is a template.

    Args:
        pattern: The regular expression.

    Returns:
        The schema.
    """
    return {"pattern": f"{pattern}|{_TEMPLATE}"}


def when(field: str, values: Iterable[object], then: Schema, *, or_missing: bool = False) -> Schema:
    """Return a rule for the case that a field has one of some values.

    Args:
        field: The field.
        values: The values.
        then: The schema that must hold then.
        or_missing: Whether the rule is also for objects without the field.

    Returns:
        The rule.
    """
    condition: Schema = {"properties": {field: {"enum": list(values)}}}
    return {"if": condition if or_missing else {**condition, "required": [field]}, "then": then}


def when_set(field: str, then: Schema) -> Schema:
    """Return a rule for the case that a field is set.

    Args:
        field: The field.
        then: The schema that must hold then.

    Returns:
        The rule.
    """
    return {"if": {"properties": {field: {"not": {"type": "null"}}}, "required": [field]}, "then": then}


def without(*fields: str) -> Schema:
    """Return the schema of objects in which fields are not set.

    Args:
        fields: The fields.

    Returns:
        The schema.
    """
    return {"properties": {name: {"type": "null"} for name in fields}}


def connection_rules() -> list[Schema]:
    """Return which fields of a connection belong to which security protocol and SASL mechanism.

    Returns:
        The rules, from the tables by which the connection itself is checked.
    """
    sasl, tls = ["sasl_mechanism", *map(_in_yaml, SASL_FIELDS)], list(map(_in_yaml, TLS_FIELDS))
    rules = [
        when("security_protocol", ("PLAINTEXT", "SSL"), without(*sasl), or_missing=True),
        when("security_protocol", ("PLAINTEXT", "SASL_PLAINTEXT"), without(*tls), or_missing=True),
        when("security_protocol", ("SASL_PLAINTEXT", "SASL_SSL"), {"required": ["sasl_mechanism"]}),
        when("sasl_mechanism", ["AWS_MSK_IAM"], {"properties": {"security_protocol": text_matching("^SASL_SSL$")}}),
    ]
    for name, method in METHODS.items():
        if name != method.mechanism:  # a source of tokens for OAUTHBEARER
            continue
        unused = set(SASL_FIELDS) - set(method.fields)
        rules.append(when("sasl_mechanism", [name], without(*map(_in_yaml, sorted(unused)))))
        for field in method.needs:
            fields = [field, FILE_OF[field]] if field in FILE_OF else [field]
            given = {"anyOf": [{"required": [_in_yaml(one)]} for one in fields]}
            rules.append(when("sasl_mechanism", [name], given))
    exclusive = [*FILE_OF.items(), *EXCLUSIVE_FIELDS, ("aws_profile", "aws_role_arn")]
    return [*rules, *(when_set(_in_yaml(one), without(_in_yaml(other))) for one, other in exclusive)]


def _in_yaml(field: str) -> str:
    """Return the name in YAML of a field of a connection."""
    return f"{field}_variable" if field in SECRETS else field


def _make_field_strict(schema: Schema, annotation: Any) -> None:  # noqa: ANN401 - the type of a field
    """Restrict the text that Dagster allows for a template, unless the field itself is text."""
    choices = schema.get("anyOf", ())
    if str in {annotation, *get_args(annotation)} or {"type": "string"} not in choices:
        return
    texts = [_TEXT_OF[choice["type"]] for choice in choices if choice.get("type") in _TEXT_OF]
    choices[choices.index({"type": "string"})] = {"type": "string", "pattern": "|".join([*texts, _TEMPLATE])}
