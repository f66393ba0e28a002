"""Write the Grafana dashboards in observability/dashboards: `python -m tools.dashboards`.

This is their only source. A test compares the files with it, and their queries with the metrics that exist.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "observability" / "dashboards"
_SCHEMA: Final = 39
"""The version of the dashboard's form, that of Grafana 11; newer versions migrate it."""
_COLUMNS: Final = 24
_WIDTHS: Final = {"group": 140, "topic": 140, "partition": 90}
"""The widths of a table's columns in pixels; the last column has the rest."""
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"


@dataclass(frozen=True, slots=True)
class Query:
    """A query in PromQL, and the name of its series in the legend."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel. `limits` are the values from which on a colour applies; the first one has no value."""

    title: str
    about: str
    queries: Sequence[Query]
    type: str = "timeseries"
    unit: str = "short"
    width: int = 12
    height: int = 8
    limits: Sequence[tuple[str, float | None]] = ((GREEN, None),)
    is_stacked: bool = False
    colours: Mapping[str, str] = field(default_factory=dict)
    """The colours of series by their names, where a colour has a meaning."""
    value_column: str | None = None
    """The heading of a table's values; None if they are not shown."""
    least: float | None = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and the panels below it."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A dashboard: its variables are names of labels, each with a metric that has that label."""

    uid: str
    title: str
    about: str
    variables: Mapping[str, str]
    rows: Sequence[Row]


def stat(title: str, about: str, expr: str, **options: Any) -> Panel:  # noqa: ANN401 - fields of `Panel`
    """Return a panel that shows one number, coloured by its limits."""
    chosen = {"width": 4, "height": 4, "limits": ((GREEN, None), (RED, 1)), **options}
    return Panel(title=title, about=about, queries=[Query(expr)], type="stat", **chosen)


_OF = '{group=~"$group", topic=~"$topic"}'
_STALE = '{freshness="stale", group=~"$group", topic=~"$topic"}'
_OF_GROUP = '{group=~"$group"}'
_OF_OUTBOX = '{outbox=~"$outbox"}'
_TOPIC = "{{group}} / {{topic}}"
_PLACE = "{{group}} / {{topic}}/{{partition}}"


def _by_topic(metric: str, function: str = "max") -> Query:
    return Query(f"{function} by (group, topic) ({metric}{_OF})", _TOPIC)


def _greatest_partitions(metric: str) -> Query:
    # The limit is applied at the end of the time range. At each step, it would choose other series and show them all.
    most, last = (f"max by (group, topic, partition) ({metric}{_OF}{at})" for at in ("", " @ end()"))
    return Query(f"{most} and topk(10, {last})", _PLACE)


def _rate(metric: str, label: str, legend: str = "", *, of: str = _OF) -> Query:
    return Query(f"sum by ({label}) (rate({metric}{of}[5m]))", legend or f"{{{{{label}}}}}")


def _increase(metric: str, label: str, legend: str = "", *, of: str = _OF) -> Query:
    return Query(f"sum by ({label}) (increase({metric}{of}[5m]))", legend or f"{{{{{label}}}}}")


def _quantile(metric: str, quantile: float, label: str) -> Query:
    rates = f"sum by ({label}, le) (rate({metric}_bucket{_OF}[30m]))"
    return Query(f"histogram_quantile({quantile}, {rates})", f"{{{{{label}}}}}")


GROUPS: Final = Dashboard(
    uid="marshal-groups",
    title="marshal-dagster: groups",
    about="Claims, lag, plans and pauses of the groups, read from the coordination log by marshal-dagster exporter.",
    variables={"group": "marshal_group_paused", "topic": "marshal_topic_claims"},
    rows=[
        Row(
            "What needs a person",
            [
                stat(
                    "Exhausted plans",
                    "Batches that failed too often. `marshal-dagster status` names them, `retry` tries them again.",
                    f"sum(max by (group, topic) (marshal_topic_exhausted_plans{_OF})) or vector(0)",
                ),
                stat(
                    "Stale claims",
                    "Claims without a heartbeat for two intervals. A few for a minute are normal after a crash.",
                    f"sum(max by (group, topic) (marshal_topic_claims{_STALE})) or vector(0)",
                    limits=((GREEN, None), (ORANGE, 1)),
                ),
                stat(
                    "Unheld plans",
                    "Open plans that no live member holds. The next run takes them over.",
                    f"sum(max by (group, topic) (marshal_topic_unheld_plans{_OF})) or vector(0)",
                    limits=((GREEN, None), (ORANGE, 1)),
                ),
                stat(
                    "Paused groups",
                    "Members of these groups claim nothing.",
                    f"sum(max by (group) (marshal_group_paused{_OF_GROUP})) or vector(0)",
                    limits=((GREEN, None), (BLUE, 1)),
                ),
                stat(
                    "Deleted unread",
                    "Offsets that retention deleted before they were read.",
                    f"sum(max by (group, topic) (marshal_topic_deleted_unread_records{_OF})) or vector(0)",
                ),
                stat(
                    "Last read",
                    "Age of the exporter's last successful read of the coordination log.",
                    "time() - max(marshal_exporter_last_read_timestamp_seconds)",
                    unit="s",
                    limits=((GREEN, None), (ORANGE, 60), (RED, 300)),
                ),
            ],
        ),
        Row(
            "Lag",
            [
                Panel(
                    title="Age of the oldest unread record",
                    about="The lag of the group in time. 0 if all is read.",
                    queries=[_by_topic("marshal_topic_lag_seconds")],
                    unit="s",
                ),
                Panel(
                    title="Unread records",
                    about="Offsets from the group's positions to the ends of the topic's partitions.",
                    queries=[_by_topic("marshal_topic_lag_records")],
                ),
                Panel(
                    title="Progress",
                    about="Offsets that the group's positions move in a second. Negative after a reset.",
                    queries=[Query(f"max by (group, topic) (deriv(marshal_topic_position_offsets{_OF}[5m]))", _TOPIC)],
                    unit="recps",
                    least=None,
                ),
                Panel(
                    title="Partitions with the oldest unread records",
                    about="The ten partitions whose oldest unread record is the oldest.",
                    queries=[_greatest_partitions("marshal_partition_lag_seconds")],
                    unit="s",
                ),
            ],
        ),
        Row(
            "Retention",
            [
                Panel(
                    title="Oldest unread record in parts of the retention",
                    about="At 100 % retention deletes unread records. The alert fires at 50 %.",
                    queries=[
                        Query(
                            f"max by (group, topic) (marshal_topic_lag_seconds{_OF}) / on (topic) group_left () "
                            "max by (topic) (marshal_data_topic_retention_seconds)",
                            _TOPIC,
                        )
                    ],
                    unit="percentunit",
                    limits=((GREEN, None), (ORANGE, 0.5), (RED, 0.9)),
                ),
                Panel(
                    title="Offsets before retention reaches unread records",
                    about="From a partition's beginning to its oldest unread record; the smallest of all partitions.",
                    queries=[_by_topic("marshal_topic_retention_margin_records", "min")],
                ),
            ],
        ),
        Row(
            "Claims and plans",
            [
                Panel(
                    title="Claims by the age of their last heartbeat",
                    about="Fresh: up to one interval. Unknown: up to two. Stale: another member may take over.",
                    queries=[
                        Query(
                            f"sum by (freshness) (max by (group, topic, freshness) (marshal_topic_claims{_OF}))",
                            "{{freshness}}",
                        )
                    ],
                    is_stacked=True,
                    colours={"fresh": GREEN, "unknown": YELLOW, "stale": RED},
                ),
                Panel(
                    title="Heartbeats",
                    about="The ten oldest last heartbeats of owners.",
                    queries=[_greatest_partitions("marshal_partition_heartbeat_age_seconds")],
                    unit="s",
                ),
                Panel(
                    title="Owners of stale claims",
                    about="The run or instance that held the partition last.",
                    queries=[
                        Query(
                            f"max by (group, topic, partition, owner) (marshal_partition_owner_info{_OF}) "
                            "and on (group, topic, partition) (max by (group, topic, partition) "
                            f"(marshal_partition_heartbeat_age_seconds{_OF}) > on (group) group_left () max by (group) "
                            "(marshal_group_stale_after_seconds))"
                        )
                    ],
                    type="table",
                ),
                Panel(
                    title="Attempts of open plans",
                    about="How often a member took an open plan over. At the limit members no longer retry it.",
                    queries=[Query(f"max by (group, topic, partition) (marshal_partition_plan_attempts{_OF}) > 0")],
                    type="table",
                    value_column="attempts",
                    limits=((GREEN, None), (ORANGE, 2), (RED, 5)),
                ),
            ],
        ),
        Row(
            "Coordination log",
            [
                Panel(
                    title="Refused records",
                    about="Records that the rules refused, by reason. `live_owner` is a race that another member won; "
                    "`not_owner`, `not_live` and `other_epoch` are lost claims.",
                    queries=[
                        Query(
                            "sum by (reason) (rate(marshal_log_refused_records_total[5m])) > 0",
                            "{{reason}}",
                        )
                    ],
                    unit="recps",
                ),
                Panel(
                    title="Time of a refresh",
                    about="Reading the log and the offsets of all data topics.",
                    queries=[Query("max(marshal_exporter_refresh_seconds)", "refresh")],
                    unit="s",
                ),
            ],
        ),
    ],
)

OUTBOX: Final = Dashboard(
    uid="marshal-outbox",
    title="marshal-dagster: outbox",
    about="Harvesters of outboxes, scraped at the address of their --health.",
    variables={"outbox": "marshal_outbox_leads"},
    rows=[
        Row(
            "Now",
            [
                stat(
                    "Harvesters that lead",
                    "One for each outbox. The others stand by.",
                    f"sum(marshal_outbox_leads{_OF_OUTBOX}) or vector(0)",
                    limits=((RED, None), (GREEN, 1)),
                ),
                stat(
                    "Harvesters",
                    "Processes that are scraped.",
                    f"count(marshal_outbox_leads{_OF_OUTBOX}) or vector(0)",
                    limits=((RED, None), (ORANGE, 1), (GREEN, 2)),
                ),
                stat(
                    "Waiting rows",
                    "Rows that are not published yet.",
                    f"sum(max by (outbox) (marshal_outbox_backlog{_OF_OUTBOX}))",
                    limits=((GREEN, None), (ORANGE, 10_000)),
                ),
                stat(
                    "Oldest waiting row",
                    "Its age.",
                    f"max(marshal_outbox_backlog_age_seconds{_OF_OUTBOX})",
                    unit="s",
                    limits=((GREEN, None), (ORANGE, 60), (RED, 300)),
                ),
                stat(
                    "Set aside today",
                    "Rows that cannot be published. `marshal-dagster outbox parked list` shows why.",
                    f"sum(increase(marshal_outbox_parked_total{_OF_OUTBOX}[24h]))",
                ),
                stat(
                    "Last count",
                    "How long ago the waiting rows were counted, of the outbox for which that is longest. If the table "
                    "is locked, the values of rows are as old as that.",
                    f"max(time() - max by (outbox) (marshal_outbox_backlog_counted_timestamp_seconds{_OF_OUTBOX}))",
                    unit="s",
                    limits=((GREEN, None), (ORANGE, 60), (RED, 300)),
                ),
            ],
        ),
        Row(
            "Over time",
            [
                Panel(
                    title="Published rows",
                    about="Rows in a second.",
                    queries=[_rate("marshal_outbox_published_total", "outbox", of=_OF_OUTBOX)],
                    unit="rowsps",
                ),
                Panel(
                    title="Age of the oldest waiting row",
                    about="The alert fires at five minutes.",
                    queries=[Query(f"max by (outbox) (marshal_outbox_backlog_age_seconds{_OF_OUTBOX})", "{{outbox}}")],
                    unit="s",
                ),
                Panel(
                    title="Waiting rows",
                    about="Counted by the leader every ten seconds.",
                    queries=[Query(f"max by (outbox) (marshal_outbox_backlog{_OF_OUTBOX})", "{{outbox}}")],
                ),
                Panel(
                    title="Refusals and sessions",
                    about="Refusals of rows and topics, and sessions that began. Sessions that begin again and again "
                    "mean that the database or Kafka is away, or that harvesters supersede each other.",
                    queries=[
                        _rate("marshal_outbox_refused_total", "outbox", "{{outbox}}: refused", of=_OF_OUTBOX),
                        _rate("marshal_outbox_sessions_total", "outbox", "{{outbox}}: sessions", of=_OF_OUTBOX),
                    ],
                    unit="eps",
                ),
            ],
        ),
    ],
)

COORDINATOR: Final = Dashboard(
    uid="marshal-coordinator",
    title="marshal-dagster: coordinator",
    about="Coordinators, scraped at the address of their --health.",
    variables={"group": "marshal_coordinator_members"},
    rows=[
        Row(
            "Now",
            [
                stat(
                    "Partitions without a leader",
                    "Groups in these partitions of the coordinator's topics get no new assignments.",
                    "max(marshal_coordinator_partitions) - sum(marshal_coordinator_led)",
                    width=6,
                ),
                stat(
                    "Coordinators",
                    "Processes that are scraped.",
                    "count(marshal_coordinator_led) or vector(0)",
                    width=6,
                    limits=((RED, None), (ORANGE, 1), (GREEN, 2)),
                ),
                stat(
                    "Groups", "Groups that are led.", "sum(marshal_coordinator_groups)", width=6, limits=((GREY, None),)
                ),
                stat(
                    "Members",
                    "Members of these groups.",
                    f"sum(marshal_coordinator_members{_OF_GROUP})",
                    width=6,
                    limits=((GREY, None),),
                ),
            ],
        ),
        Row(
            "Over time",
            [
                Panel(
                    title="Members",
                    about="Members of each group.",
                    queries=[Query(f"sum by (group) (marshal_coordinator_members{_OF_GROUP})", "{{group}}")],
                ),
                Panel(
                    title="Assigned partitions",
                    about="Partitions that are assigned to members.",
                    queries=[Query(f"sum by (group) (marshal_coordinator_assigned{_OF_GROUP})", "{{group}}")],
                ),
                Panel(
                    title="Rebalances",
                    about="Rebalances in which something moved, by outcome, in five minutes.",
                    queries=[_increase("marshal_coordinator_rebalances_total", "outcome", of=_OF_GROUP)],
                    is_stacked=True,
                    colours={"done": GREEN, "tried_again": ORANGE, "given_up": RED},
                ),
                Panel(
                    title="Moved partitions and failed members",
                    about="In five minutes.",
                    queries=[
                        _increase("marshal_coordinator_moved_total", "group", "{{group}}: moved", of=_OF_GROUP),
                        _increase("marshal_coordinator_failed_total", "group", "{{group}}: failed", of=_OF_GROUP),
                    ],
                ),
            ],
        ),
    ],
)

BATCHES: Final = Dashboard(
    uid="marshal-batches",
    title="marshal-dagster: batches",
    about="What runs record through OpenTelemetry, by way of a collector that Prometheus scrapes.",
    variables={"group": "marshal_batches_total", "topic": "marshal_batches_total"},
    rows=[
        Row(
            "Batches",
            [
                Panel(
                    title="Batches by outcome",
                    about="In five minutes.",
                    queries=[_increase("marshal_batches_total", "outcome")],
                    is_stacked=True,
                    colours={"committed": GREEN, "failed": RED},
                ),
                Panel(
                    title="Offsets by state",
                    about="Offsets of batches in a second, by their state at the end of the batch.",
                    queries=[_rate("marshal_offsets_total", "state")],
                    unit="recps",
                    is_stacked=True,
                    colours={
                        "committed": GREEN,
                        "skipped": BLUE,
                        "not_committed": RED,
                        "dropped": RED,
                        "possibly_dropped": ORANGE,
                    },
                ),
                Panel(
                    title="Duration of phases",
                    about="The median of each phase of a batch.",
                    queries=[_quantile("marshal_phase_duration_seconds", 0.5, "phase")],
                    unit="s",
                ),
                Panel(
                    title="Remaining lease",
                    about="The lowest hundredth of what was left of leases when heartbeats and commits "
                    "were read back. Near 0 claims will be lost.",
                    queries=[_quantile("marshal_lease_remaining_seconds", 0.01, "at")],
                    unit="s",
                ),
                Panel(
                    title="Claims by outcome",
                    about="In five minutes. A lost claim is work that is done again.",
                    queries=[_increase("marshal_claims_total", "outcome")],
                    is_stacked=True,
                    colours={"won": GREEN, "refused": YELLOW, "lost": RED, "unacknowledged": ORANGE},
                ),
                Panel(
                    title="Unread after a batch",
                    about="In the partitions that the batch claimed.",
                    queries=[_by_topic("marshal_batch_lag")],
                ),
            ],
        )
    ],
)

DASHBOARDS: Final = (GROUPS, OUTBOX, COORDINATOR, BATCHES)


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard in Grafana's form, to import or to provision."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["marshal-dagster"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": list(_variables(dashboard.variables))},
        "annotations": {"list": []},
        "links": [
            {
                "title": "marshal-dagster",
                "type": "dashboards",
                "tags": ["marshal-dagster"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": list(_panels(dashboard.rows)),
    }


def _variables(variables: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}
    for name, metric in variables.items():
        query = f"label_values({metric}, {name})"
        yield {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
            "sort": 1,
        }


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the panels, from left to right and from top to bottom."""
    number, top = 0, 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "gridPos": place, "collapsed": False, "panels": []}
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                top, left, height = top + height, 0, 0
            number += 1
            yield _panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": panel.height})
            left, height = left + panel.width, max(height, panel.height)
        top += height


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": number,
        "type": panel.type,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": dict(place),
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
        "fieldConfig": {
            "defaults": _defaults(panel),
            "overrides": [_coloured(*item) for item in panel.colours.items()],
        },
        "options": _options(panel),
    }
    if panel.type == "table":
        found["fieldConfig"]["overrides"] += [_width(*item) for item in _WIDTHS.items()]
        found["transformations"] = [{"id": "organize", "options": _columns(panel)}]
    return found


def _target(panel: Panel, query: Query, index: int) -> dict[str, Any]:
    is_table = panel.type == "table"
    return {
        "refId": chr(ord("A") + index),
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": panel.type != "timeseries",
        "range": panel.type == "timeseries",
        "format": "table" if is_table else "time_series",
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps = [{"color": colour, "value": value} for colour, value in panel.limits]
    has_limits = len(panel.limits) > 1
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if panel.type == "stat" else "palette-classic"},
    }
    if panel.type == "timeseries":
        if panel.least is not None:
            defaults["min"] = panel.least
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if has_limits else "off"},
        }
    if panel.type == "table" and has_limits:
        defaults["custom"] = {"cellOptions": {"type": "color-text"}}
        defaults["color"] = {"mode": "thresholds"}
    return defaults


def _columns(panel: Panel) -> dict[str, Any]:
    """Return the order and the headings of a table's columns; Grafana sorts them by name."""
    order = {name: index for index, name in enumerate(("group", "topic", "partition", "owner", "Value"))}
    if panel.value_column is None:
        return {"indexByName": order, "excludeByName": {"Time": True, "Value": True}}
    return {"indexByName": order, "excludeByName": {"Time": True}, "renameByName": {"Value": panel.value_column}}


def _width(name: str, pixels: int) -> dict[str, Any]:
    return {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "custom.width", "value": pixels}]}


def _coloured(name: str, colour: str) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.type == "stat":
        return {
            "colorMode": "background",
            "graphMode": "area",
            "justifyMode": "auto",
            "textMode": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if panel.type == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def files() -> dict[Path, str]:
    """Return the text of each dashboard's file."""
    return {FOLDER / f"{found.uid}.json": json.dumps(as_json(found), indent=1) + "\n" for found in DASHBOARDS}


def main() -> None:
    """Write the dashboards."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
