"""Checks that the one wheel in a folder holds the library and nothing else."""

import sys
import zipfile
from pathlib import Path

_TOP = Path(__file__).resolve().parents[1]


def problems(wheel: Path) -> list[str]:
    """Tell what is in `wheel` and should not be, and what is missing."""
    names = set(zipfile.ZipFile(wheel).namelist())
    library = {name for name in names if name.startswith("marshal_dagster/")}
    metadata = {name for name in names if name.split("/", 1)[0].endswith(".dist-info")}
    required = {str(path.relative_to(_TOP)) for path in (_TOP / "marshal_dagster").rglob("*.py")}
    required.add("marshal_dagster/py.typed")
    found = [f"{name} does not belong in the wheel" for name in sorted(names - library - metadata)]
    found += [f"{name} is missing" for name in sorted(required - library)]
    if not any(name.endswith("/LICENSE") for name in metadata):
        found.append("the licence is missing")
    return found


def main(folder: str) -> int:
    """Check the wheel in `folder`; 1 when it is not as it should be."""
    wheels = list(Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        print(f"{folder} should hold exactly one wheel, it holds {len(wheels)}")
        return 1
    found = problems(wheels[0])
    for problem in found:
        print(f"{wheels[0].name}: {problem}")
    if not found:
        print(f"{wheels[0].name} holds the library and nothing else")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
