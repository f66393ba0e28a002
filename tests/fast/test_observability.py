"""The dashboards and the alerts: they use metrics that exist, and each alert has its section in the runbook."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from marshal_dagster.exporter.definitions import DEFINITIONS
from tools import check_alerts, dashboards
from tools.metrics_tables import exposed_names

TOP = Path(__file__).parents[2]
RUNBOOK = (TOP / "docs" / "operate" / "runbook.md").read_text(encoding="utf-8")
RULES = check_alerts.rules(check_alerts.RULES.read_text(encoding="utf-8"))
PANEL_TYPES = {"row", "stat", "table", "timeseries"}
PARTS = ("Symptom", "Healthy", "Find it", "End it", "What can be lost")
DASHBOARDS = {path: json.loads(text) for path, text in dashboards.files().items()}
ALL = pytest.mark.parametrize("board", DASHBOARDS.values(), ids=lambda board: str(board["uid"]))


def names_in(text: str) -> set[str]:
    """Return the metrics of the library that a query names."""
    return set(re.findall(r"\bmarshal_[a-z_]+", text))


def queries(board: dict[str, Any]) -> list[str]:
    """Return the queries of all panels and variables."""
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    return found + [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]


def test_the_dashboards_are_those_of_their_source() -> None:
    """`make dashboards` writes them."""
    written = {path: path.read_text(encoding="utf-8") for path in dashboards.FOLDER.iterdir()}
    assert written == dashboards.files()


@ALL
def test_every_metric_of_a_dashboard_exists(board: dict[str, Any]) -> None:
    """Panels and variables name metrics that a scrape can have."""
    for query in queries(board):
        assert names_in(query), query
        assert names_in(query) <= exposed_names(), query


def test_every_metric_of_an_alert_exists() -> None:
    """The unit tests of the alerts use the same ones."""
    tests = yaml.safe_load(check_alerts.TESTS.read_text(encoding="utf-8"))["tests"]
    series = [found["series"] for test in tests for found in test["input_series"]]
    for query in [rule["expr"] for rule in RULES] + series:
        assert names_in(query), query
        assert names_in(query) <= exposed_names(), query


def test_dashboards_and_alerts_use_most_of_the_exporter() -> None:
    """A metric that no panel shows is not worth its series; these are for other queries."""
    used = {name for board in DASHBOARDS.values() for query in queries(board) for name in names_in(query)}
    used |= {name for rule in RULES for name in names_in(rule["expr"])}
    assert {definition.name for definition in DEFINITIONS} - used == {
        "marshal_exporter_failed_reads_total",
        "marshal_exporter_read_records_total",
        "marshal_group_paused_until_timestamp_seconds",
        "marshal_log_invalid_records_total",
        "marshal_log_timestamp_seconds",
        "marshal_partition_claimed",
        "marshal_partition_lag_records",
        "marshal_partition_position_offset",
        "marshal_partition_retention_margin_records",
        "marshal_topic_partitions",
    }


@ALL
def test_a_dashboard_has_the_form_of_grafana(board: dict[str, Any]) -> None:
    """Panels have ids of their own, do not overlap, fit the 24 columns, and have a description."""
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in PANEL_TYPES
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells
        assert max(x for x, _ in own) < 24
        cells |= own
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None
        values = [step["value"] for step in steps[1:]]
        assert values == sorted(values)


@ALL
def test_the_variables_of_a_dashboard_are_used(board: dict[str, Any]) -> None:
    """And a query uses no other one."""
    known = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(queries(board)))) | {"datasource"}
    assert used == known


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_alert_has_its_texts_and_a_section_of_the_runbook(rule: dict[str, Any]) -> None:
    """The section has the five parts that a person needs at night."""
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["description"].endswith(".")
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert notes["runbook_url"] == f"docs/operate/runbook.md#{rule['alert'].lower()}"
    section = re.search(rf"^### {rule['alert']}\n(.*?)^##", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert re.findall(r"^- \*\*(.+?)\.\*\* \S", section[1], re.MULTILINE) == list(PARTS)
    (find,) = re.findall(r"^- \*\*Find it\.\*\* (.*)$", section[1], re.MULTILINE)
    assert re.search(r"`(marshal-dagster|curl) [^`]+`", find)


def test_each_section_of_the_runbook_has_its_alert() -> None:
    """No section is left of an alert that is gone."""
    assert re.findall(r"^### (Marshal\w+)$", RUNBOOK, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_each_alert_is_tested_both_ways() -> None:
    """`make lint-alerts` runs these tests with promtool."""
    assert check_alerts.untested(check_alerts.RULES.read_text(), check_alerts.TESTS.read_text()) == []


def test_a_missing_test_is_found() -> None:
    """An alert needs a test in which it fires, and one in which it does not."""
    text = "groups: [{name: g, rules: [{alert: A, expr: x, annotations: {a: b}}]}]"
    tests = "tests: [{alert_rule_test: [{alertname: A, exp_alerts: [{exp_labels: {}}]}]}]"
    assert check_alerts.untested(text, tests) == ["A"]
    assert "annotations" not in check_alerts.without_annotations(text)
