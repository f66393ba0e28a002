"""Find public functions, classes and fields whose documentation is incomplete.

The public names are those of `marshal_dagster.__init__`. Members that the API reference hides (`INTERNAL` in
`tools/api_reference.py`) are left out. A docstring follows Google's style:

- `Args:` has an entry for each parameter, and no other.
- `Returns:` or `Yields:` describes the result. It is not needed if the first line starts with "Return" or "Yield", or
  if the function only raises an error.
- A field has a docstring below it, a `description=`, or an entry in `Args:` or `Attributes:` of the class.

Ruff's rules D417, DOC102, DOC202 and DOC403 complement this check (see `make lint-language`). They check the sections
that exist, also those of private functions. pydoclint, from which ruff's DOC rules come, cannot be installed together
with Dagster, because both install a package named `docstring_parser`.

The check prints a line for each finding and exits with 1 if there is one.
"""

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

LIBRARY: Final = "marshal_dagster"
API_REFERENCE: Final = "tools/api_reference.py"
_SECTION: Final = re.compile(r"^(?P<indent> *)(?P<name>Args|Attributes|Returns|Yields|Raises|Example|Examples|Note):$")
_ENTRY: Final = re.compile(r"^ *\*{0,2}(?P<name>\w+)(?: \([^)]*\))?:(?: |$)")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_names(package: str) -> dict[str, list[str]]:
    """Return the public names by module, from the source of the package's `__init__`."""
    for statement in ast.parse(package).body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "_NAMES" and statement.value:
            return {module: names.split() for module, names in ast.literal_eval(statement.value).items()}
    raise ValueError("the package has no _NAMES")


def sections_of(docstring: str) -> dict[str, set[str]]:
    """Return the sections of a Google-style docstring, each with the names of its entries."""
    found: dict[str, set[str]] = {}
    names: set[str] | None = None
    indent = depth = 0
    for line in docstring.splitlines():
        section = _SECTION.match(line)
        width = len(line) - len(line.lstrip())
        if section is not None:
            names = found.setdefault(section["name"], set())
            indent, depth = len(section["indent"]), 0
        elif line.strip() and names is not None:
            if width <= indent:
                names = None
                continue
            depth = depth or width
            entry = _ENTRY.match(line) if width == depth else None
            if entry is not None:
                names.add(entry["name"])
    return found


def hidden_members(api_reference: str) -> dict[str, list[str]]:
    """Return the members that the API reference hides, by class, from the source of `tools/api_reference.py`."""
    for statement in ast.parse(api_reference).body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "INTERNAL" and statement.value:
            return {class_: names.split() for class_, names in ast.literal_eval(statement.value).items()}
    raise ValueError(f"{API_REFERENCE} has no INTERNAL")


def findings(definition: Definition, hidden: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield (line number, what is missing) for a public function, or for a class with its public methods and fields.

    `hidden` are the names of members that need no documentation.
    """
    if isinstance(definition, ast.ClassDef):
        yield from _class_findings(definition, hidden)
    else:
        yield from _function_findings(definition, definition.name, ast.get_docstring(definition) or "")


def _function_findings(function: Function, name: str, docstring: str) -> Iterator[tuple[int, str]]:
    if not docstring:
        yield function.lineno, f"{name} has no docstring"
        return
    sections = sections_of(docstring)
    parameters = _parameters(function)
    documented = sections.get("Args", set())
    missing = [parameter for parameter in parameters if parameter not in documented]
    if missing:
        yield function.lineno, f"{name} does not document {', '.join(missing)}"
    extra = sorted(documented - set(parameters))
    if extra:
        yield function.lineno, f"{name} documents {', '.join(extra)}, which it does not take"
    returns = None if function.returns is None else ast.unparse(function.returns)
    described = {"Returns", "Yields"} & sections.keys() or docstring.startswith(("Return ", "Yield "))
    has_result = returns not in {None, "None", "NoReturn", "Never", "Self"} and not _only_raises(function)
    if has_result and not described:
        yield function.lineno, f"{name} does not document what it returns"


def _only_raises(function: Function) -> bool:
    """Return whether the body is a docstring and a `raise`, and the function is not an abstract method."""
    match function.body:
        case [ast.Expr(), ast.Raise(exc=ast.expr() as error)]:
            return "NotImplementedError" not in ast.unparse(error)
        case _:
            return False


def _parameters(function: Function) -> list[str]:
    """Return the names of the parameters that callers pass."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    names = [argument.arg for argument in every if argument is not None]
    return [name for name in names if name not in {"self", "cls"} and not name.startswith("_")]


def _class_findings(definition: ast.ClassDef, hidden: Collection[str]) -> Iterator[tuple[int, str]]:
    docstring = ast.get_docstring(definition)
    if not docstring:
        yield definition.lineno, f"{definition.name} has no docstring"
    sections = sections_of(docstring or "")
    in_class = sections.get("Args", set()) | sections.get("Attributes", set())
    for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        match statement:
            case ast.FunctionDef(name="__init__") | ast.AsyncFunctionDef(name="__init__"):
                if undocumented := set(_parameters(statement)) - in_class:
                    own = sections_of(ast.get_docstring(statement) or "").get("Args", set())
                    if missing := sorted(undocumented - own):
                        yield statement.lineno, f"{definition.name} does not document {', '.join(missing)}"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("_") and name not in hidden:
                    yield from _method_findings(statement, definition.name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                is_documented = name in in_class or name in hidden or _is_described(statement, following)
                if not name.startswith("_") and not is_documented:
                    yield statement.lineno, f"{definition.name}.{name} has no description"
            case _:
                pass


def _method_findings(method: Function, class_name: str) -> Iterator[tuple[int, str]]:
    name = f"{class_name}.{method.name}"
    docstring = ast.get_docstring(method) or ""
    decorators = _decorators(method)
    if "overload" in decorators or "override" in decorators:
        return
    if decorators & {"property", "cached_property"}:
        if not docstring:
            yield method.lineno, f"{name} has no docstring"
        return
    yield from _function_findings(method, name, docstring)


def _decorators(definition: Definition) -> set[str]:
    """Return the names of the decorators, without the modules."""
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in definition.decorator_list}


def _is_described(statement: ast.AnnAssign | ast.Assign, following: ast.stmt | None) -> bool:
    value = statement.value
    if isinstance(value, ast.Call) and any(keyword.arg == "description" for keyword in value.keywords):
        return True
    text = following.value if isinstance(following, ast.Expr) else None
    return isinstance(text, ast.Constant) and isinstance(text.value, str)


def locate(top: Path, module: str, name: str) -> tuple[Path, Definition] | None:
    """Return the file and the definition of a public name, or None for a constant or an alias.

    The search follows re-exports. Of an overloaded function it returns the implementation.
    """
    path = top.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for statement in [*body, *(inner for outer in body if isinstance(outer, ast.If) for inner in outer.body)]:
        if isinstance(statement, Definition) and statement.name == name and "overload" not in _decorators(statement):
            return path, statement
        if isinstance(statement, ast.ImportFrom) and statement.module is not None and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name and statement.module.startswith(f"{LIBRARY}."):
                    return locate(top, statement.module, alias.name)
    return None


def _public_definitions(top: Path) -> Iterable[tuple[Path, Definition]]:
    """Return the file and the definition of each public name that has one."""
    names = public_names((top / LIBRARY / "__init__.py").read_text(encoding="utf-8"))
    found = (locate(top, f"{LIBRARY}.{module}", name) for module, listed in names.items() for name in listed)
    return [place for place in found if place is not None]


def main() -> int:
    """Check the checkout that holds this file."""
    top = Path(__file__).resolve().parents[1]
    hidden = hidden_members((top / API_REFERENCE).read_text(encoding="utf-8"))
    found = 0
    for path, definition in _public_definitions(top):
        module = ".".join(path.relative_to(top / LIBRARY).with_suffix("").parts)
        for number, reason in findings(definition, hidden.get(f"{module}.{definition.name}", ())):
            print(f"{path.relative_to(top)}:{number}: {reason}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
