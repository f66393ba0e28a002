"""Find what must never be committed: paths of this machine, package registries, large files, conflict markers.

The check reads every file that git tracks or would add. It prints a line for each finding and exits with 1 if there is
one.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LARGEST_KIB = 1024
SHOWN_CHARACTERS = 160

# The character classes in brackets keep a pattern from matching its own source text.
_REGISTRIES = re.compile(
    r"py[p]i\.org|pythonho[s]ted|repo1?\.ma[v]en|ma[v]en\.org|ma[v]en-central|registry\.n[p]mjs|proxy\.gola[n]g"
    r"|https?://[^\s\"'<>]*/(?:simple|maven2|@v|packages/[0-9a-f]{2}|registry|artifactory)(?:[/\s\"'<>]|$)"
)
_INDEX_LINES = re.compile(r"^\s*(?:-i|-f|--index-url|--extra-index-url|--find-links|--trusted-host)[ =]")
_CONFLICTS = re.compile(r"^(?:<{7} |>{7} )")
_TOP_FOLDERS_LEFT_ALONE = frozenset({"/", "/tmp", "/usr", "/etc", "/var", "/opt"})  # noqa: S108 - only compared


def machine_paths(top: Path) -> re.Pattern[str]:
    """Return a pattern that matches paths in the checkout `top`, in its parent folder, and in home folders."""
    folders = {str(top), str(top.parent), str(Path.home())} - _TOP_FOLDERS_LEFT_ALONE
    names = "|".join([*map(re.escape, sorted(folders)), r"/(?:home|Users)/\w[\w.-]*", "/ro{2}t"])
    return re.compile(rf"(?<![\w.$}}-])(?:{names})(?=/)")


def files(top: Path) -> Iterator[Path]:
    """Yield the files that are tracked or untracked and not ignored; deleted ones are left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=top, check=True, capture_output=True).stdout
    for name in sorted(set(listed.decode().split("\0"))):
        path = top / name
        if name and path.is_file():
            yield path


def findings(path: Path, on_this_machine: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, or 0 for the whole file, what is wrong)."""
    content = path.read_bytes()
    if len(content) > LARGEST_KIB * 1024:
        yield 0, f"larger than {LARGEST_KIB} KiB: fetch or generate it instead"
    if path.name == "uv.lock":
        yield 0, "contains the registry's host: use requirements.lock instead (make lock)"
    if b"\0" in content:
        return
    reasons = [
        (on_this_machine, "a path of this machine"),
        (_REGISTRIES, "a package registry"),
        (_CONFLICTS, "a conflict"),
    ]
    if path.suffix in {".lock", ".txt"}:
        reasons.append((_INDEX_LINES, "an index line in a lock"))
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        for pattern, reason in reasons:
            if pattern.search(line):
                yield number, f"{reason}: {line.strip()[:SHOWN_CHARACTERS]}"


def main() -> int:
    """Check the checkout that holds this file."""
    top = Path(__file__).resolve().parents[1]
    on_this_machine = machine_paths(top)
    found = 0
    for path in files(top):
        for number, reason in findings(path, on_this_machine):
            print(f"{path.relative_to(top)}:{number}: {reason}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
