"""Shows a field's description in the reference as its docstring, and its default as its value.

An extension of griffe, by which mkdocstrings reads the library (`mkdocs.yml`).
"""

import ast
from typing import Any

import griffe


class FieldDocs(griffe.Extension):
    """Reads `name: type = Field(default=..., description=...)` of pydantic and Dagster."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any) -> None:  # noqa: ANN401
        """Take the description of one field: a text, or a name that its module gives to one."""
        given = _arguments(node)
        text = given.get("description")
        if isinstance(text, ast.Name):
            text = ast.parse(str(attr.module[text.id].value), mode="eval").body
        if not isinstance(text, ast.Constant):
            return
        attr.docstring = griffe.Docstring(str(text.value), parent=attr)
        attr.value = ast.unparse(given["default"]) if "default" in given else None


def _arguments(node: ast.AST | griffe.ObjectNode) -> dict[str | None, ast.expr]:
    if not (isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)):
        return {}
    return {each.arg: each.value for each in node.value.keywords}
