"""Shows a field's description in the reference as its docstring, and its default as its value.

An extension of griffe, by which mkdocstrings reads the library (`mkdocs.yml`).
"""

import ast
from typing import Any

import griffe


class FieldDocs(griffe.Extension):
    """Reads `name: type = Field(default=..., description=...)` of pydantic and Dagster."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any) -> None:  # noqa: ANN401
        """Take the description and default of one field."""
        given = {name: _meant(value, attr.module) for name, value in _arguments(node).items()}
        text = given.get("description")
        if not isinstance(text, ast.Constant):
            return
        attr.docstring = griffe.Docstring(str(text.value), parent=attr)
        attr.value = ast.unparse(given["default"]) if "default" in given else None


def _meant(value: ast.expr, module: griffe.Module) -> ast.expr:
    """Give what the module's own constant stands for, where `value` names one."""
    named = module.members.get(value.id) if isinstance(value, ast.Name) else None
    return ast.parse(str(named.value), mode="eval").body if isinstance(named, griffe.Attribute) else value


def _arguments(node: ast.AST | griffe.ObjectNode) -> dict[str | None, ast.expr]:
    if not (isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)):
        return {}
    return {keyword.arg: keyword.value for keyword in node.value.keywords}
