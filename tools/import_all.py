"""Import every module of the library, to detect names that an old version of a dependency lacks."""

import importlib
import pkgutil
import sys

import marshal_dagster


def main() -> int:
    """Import all modules except `__main__` modules, and print each module that fails."""
    failed = 0
    names = [module.name for module in pkgutil.walk_packages(marshal_dagster.__path__, "marshal_dagster.")]
    for name in names:
        if name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any error is a finding
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}")
    print(f"{len(names) - failed} of {len(names)} modules were imported")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
