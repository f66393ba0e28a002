"""Run the tests with versions of Spark, Python, Dagster or the brokers: `python -m tests.platforms spark 3.5 4.2`."""

import argparse
import sys
from dataclasses import asdict

from tests.platforms.page import write_page
from tests.platforms.results import RESULTS, PlatformRow, newest_rows
from tests.platforms.runner import NotThereError, prepare, run
from tests.platforms.targets import Kind, Target, targets_of
from tests.soak_results import ALL_CODE, add_row, code_version


def row_of_this_code(target: Target, *, is_short: bool) -> PlatformRow | None:
    """Return the last row of a version and of this code, from the same list of tests."""
    row = newest_rows().get((target.kind, target.version))
    return row if row and (row.commit, row.is_short) == (code_version(ALL_CODE), is_short) else None


def main() -> int:
    """Run the tests, and return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.platforms", description=__doc__)
    parser.add_argument("what", choices=[*Kind, "page"], help="what the versions are of; page only writes the page")
    parser.add_argument("versions", nargs="*", help="the versions (default: all)")
    parser.add_argument("--short", action="store_true", help="run the short list")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEST", help="run these tests instead")
    parser.add_argument("--prepare", action="store_true", help="only make the environments")
    parser.add_argument("--keep-results", action="store_true", help="add no row to the results")
    parser.add_argument("--again", action="store_true", help="run only files in which tests of the same code failed")
    options = parser.parse_args()
    if options.what == "page":
        write_page()
        return 0
    rows: list[PlatformRow] = []
    for target in targets_of(Kind(options.what), options.versions):
        try:
            if options.prepare:
                print(f"{target.kind} {target.version}: {prepare(target)}")
                continue
            before = row_of_this_code(target, is_short=options.short) if options.again else None
            row = run(target, is_short=options.short, only=options.only, before=before)
        except NotThereError as error:
            print(f"{target.kind} {target.version}: not run, {error}")
            continue
        rows.append(row)
        print(f"{target.kind} {target.version}: {row.passed} passed, {row.failed} failed, {row.seconds:.0f} s")
        if not options.keep_results:
            add_row(RESULTS, asdict(row))
            write_page()  # a test of the next run compares them
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
