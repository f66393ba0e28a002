"""Check that the contract on a package's imports can break, and that it names the import."""

import pytest
from grimp import ImportGraph
from importlinter.domain.contract import ContractCheck

from tools.import_contracts import AllowedImportsContract


def _check(imported: str) -> ContractCheck:
    graph = ImportGraph()
    for module in ("house", "house.pure", "house.pure.rules", "house.errors"):
        graph.add_module(module)
    graph.add_module(imported, is_squashed=not imported.startswith("house"))
    graph.add_import(importer="house.pure.rules", imported=imported)
    options = {
        "modules": ["house.pure", "house.absent"],
        "allowed": ["stdlib", "house.errors"],
        "except_stdlib": ["threading"],
    }
    contract = AllowedImportsContract("pure", {"root_packages": ["house"]}, options)
    return contract.check(graph, verbose=False)


@pytest.mark.parametrize("imported", ["threading", "pyspark", "house", "house.errorsome"])
def test_an_import_that_is_not_allowed_breaks_the_contract(imported: str) -> None:
    """Forbidden modules of the standard library, other packages and upper modules break the contract, by name."""
    check = _check(imported)
    assert not check.kept
    assert check.metadata["broken"] == [f"house.pure.rules imports {imported}"]


@pytest.mark.parametrize("imported", ["dataclasses", "house.errors", "house.pure"])
def test_an_allowed_import_keeps_the_contract(imported: str) -> None:
    """The standard library, listed modules and the package itself are allowed."""
    assert _check(imported).kept
