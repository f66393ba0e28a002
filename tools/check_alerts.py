"""Check the alert rules with promtool: their form, and their unit tests without the texts of annotations.

Also check the syntax of the example's settings of Prometheus.

`promtool test rules` compares annotations too, so each test would repeat them. The command needs promtool, which
`make promtool` fetches.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

FOLDER: Final = Path(__file__).parents[1] / "observability"
RULES: Final = FOLDER / "alerts.yml"
TESTS: Final = FOLDER / "alerts_test.yml"
SETTINGS: Final = FOLDER.parent / "examples" / "compose" / "prometheus.yml"


def rules(text: str) -> list[dict[str, Any]]:
    """Return the alert rules of a file."""
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def untested(rules_text: str, tests_text: str) -> list[str]:
    """Return the alerts without a test in which they fire, or without one in which they do not."""
    seen: dict[str, set[bool]] = {}
    for test in yaml.safe_load(tests_text)["tests"]:
        for case in test["alert_rule_test"]:
            seen.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    return [rule["alert"] for rule in rules(rules_text) if seen.get(rule["alert"]) != {True, False}]


def without_annotations(text: str) -> str:
    """Return the rules without their annotations."""
    parsed = yaml.safe_load(text)
    for group in parsed["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    return str(yaml.safe_dump(parsed))


def main() -> int:
    """Run promtool, and return 1 if it or a missing test reports a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("promtool", help="the program")
    promtool = parser.parse_args().promtool
    missing = untested(RULES.read_text(), TESTS.read_text())
    for alert in missing:
        print(f"{TESTS.name}: {alert} needs a test in which it fires, and one in which it does not")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / RULES.name).write_text(without_annotations(RULES.read_text()))
        (folder / TESTS.name).write_text(TESTS.read_text())
        codes = [
            subprocess.run([promtool, "check", "rules", RULES], check=False).returncode,
            subprocess.run([promtool, "test", "rules", folder / TESTS.name], check=False).returncode,
            subprocess.run([promtool, "check", "config", "--syntax-only", SETTINGS], check=False).returncode,
        ]
    return int(bool(missing) or any(codes))


if __name__ == "__main__":
    sys.exit(main())
