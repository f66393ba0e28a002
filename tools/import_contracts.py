"""A contract for import-linter that layers cannot express: the complete list of what a package may import."""

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

STANDARD_LIBRARY = "stdlib"


class AllowedImportsContract(Contract):
    """`modules` and their submodules import only `allowed` packages (`stdlib` is the standard library).

    `except_stdlib` lists modules of the standard library that are forbidden nevertheless. A module of `modules` that
    does not exist is skipped. It may always import its own submodules.
    """

    modules = fields.SetField(subfield=fields.StringField())
    allowed = fields.SetField(subfield=fields.StringField())
    except_stdlib = fields.SetField(subfield=fields.StringField(), required=False, default=set())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001 - import-linter's signature
        """Return each import that is neither within the package nor allowed."""
        broken: list[str] = []
        for package in sorted(self.modules):  # type: ignore[call-overload]
            if package in graph.modules:
                broken += self._broken(graph, package)
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def _broken(self, graph: ImportGraph, package: str) -> list[str]:
        importers = sorted({package} | graph.find_descendants(package))
        return [
            f"{importer} imports {imported}"
            for importer in importers
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            if not self._fine(imported, package)
        ]

    def _fine(self, imported: str, package: str) -> bool:
        if any(imported == name or imported.startswith(f"{name}.") for name in (package, *self.allowed)):  # type: ignore[misc]
            return True
        root = imported.split(".", 1)[0]
        is_standard = root in sys.stdlib_module_names and root not in self.except_stdlib  # type: ignore[operator]
        return is_standard and STANDARD_LIBRARY in self.allowed  # type: ignore[operator]

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print one line for each import that is not allowed."""
        for line in check.metadata["broken"]:
            output.print_error(line)
