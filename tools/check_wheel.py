"""Check that the only wheel in a folder contains the library and nothing else."""

import sys
import zipfile
from pathlib import Path

_TOP = Path(__file__).resolve().parents[1]


def library_files() -> set[str]:
    """Return the paths of all files of the library, with its pages and settings, relative to the checkout."""
    files = (path for path in (_TOP / "marshal_dagster").rglob("*") if path.is_file())
    return {path.relative_to(_TOP).as_posix() for path in files if "__pycache__" not in path.parts}


def problems(wheel: Path) -> list[str]:
    """Return a message for each file that does not belong in `wheel`, and for each that is missing."""
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.split("/", 1)[0].endswith(".dist-info")}
    found = [f"{name} does not belong in the wheel" for name in sorted(names - library_files() - metadata)]
    found += [f"{name} is missing" for name in sorted(library_files() - names)]
    if not any(name.endswith("/LICENSE") for name in metadata):
        found.append("the licence is missing")
    return found


def main(folder: str) -> int:
    """Check the wheel in `folder`. Returns 1 if it has a problem."""
    wheels = list(Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        print(f"{folder} must contain exactly one wheel, but contains {len(wheels)}")
        return 1
    found = problems(wheels[0])
    for problem in found:
        print(f"{wheels[0].name}: {problem}")
    if not found:
        print(f"{wheels[0].name} contains the library and nothing else")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
