"""`exporter`: serve the state of all groups to Prometheus, read from the coordination log. It only reads."""

from functools import partial
from typing import Annotated, Final

import typer

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.health_server import METRICS
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import connection_of, data_connection_of, open_reader
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import DataLogOptions, MaxAttempts, finite
from marshal_dagster.cli.service import http_server, report_event, run_until_signal
from marshal_dagster.exporter.exporter import DEFAULT_INTERVAL_S, Exporter
from marshal_dagster.exporter.group_metrics import ExportOptions
from marshal_dagster.exporter.topic_reader import TopicReader
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS

DEFAULT_LISTEN: Final = "9464"
"""The port that OpenTelemetry suggests for Prometheus."""
_LOGGED_PARTS: Final = ("exporter", "coordination", "kafka", "_internal")

app = command_group("Serve the state of groups to Prometheus.")


@command(
    app,
    "exporter",
    "Serve the state of groups to Prometheus. It reads the coordination log continuously and never writes. GET "
    "/metrics shows owners, lag, plans, pauses and refused records of each group, topic and partition; /live and "
    "/ready are for probes. On SIGTERM or Ctrl-C it ends with exit code 0.",
    "exporter",
    "exporter --listen 0.0.0.0:9464 --interval 30 --group shops --totals-only",
)
def exporter(
    *,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", "-l", metavar="HOST:PORT", help="Address to listen on; a PORT alone is on 127.0.0.1, 0 is any."
        ),
    ] = DEFAULT_LISTEN,
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval",
            "-i",
            metavar="SECONDS",
            callback=finite,
            min=1,
            max=3_600,
            help="Time between two reads. A scrape gets the values of the last one.",
        ),
    ] = DEFAULT_INTERVAL_S,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", "-g", metavar="NAME", help="Only this group; may be repeated."),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", metavar="NAME", help="Only this data topic; may be repeated."),
    ] = None,
    totals_only: Annotated[
        bool, typer.Option("--totals-only", help="Serve groups and topics, without a series for each partition.")
    ] = False,
    all_owners: Annotated[
        bool, typer.Option("--all-owners", help="Name every owner, not only stale ones: a new series for each run.")
    ] = False,
    max_attempts: MaxAttempts = DEFAULT_MAX_ATTEMPTS,
    options: DataLogOptions,
) -> ExitCode:
    """Serve metrics until a signal arrives. Raises `MarshalError`."""
    require_extra(Extra.PROMETHEUS, "the exporter")
    connection = connection_of(options)
    data_connection = data_connection_of(options.data_connection, connection)
    for name in topic or ():
        require_topic_name("--topic", name)
    served = ExportOptions(
        groups=frozenset(group or ()),
        topics=frozenset(topic or ()),
        max_attempts=max_attempts,
        per_partition=not totals_only,
        all_owners=all_owners,
    )
    report = partial(report_event, as_json=options.as_json)
    with Topics(data_connection, client_id="marshal-dagster-exporter") as topics:
        work = Exporter(
            lambda: open_reader(connection, options.coordination_topic, topic or None),
            TopicReader(topics),
            served,
            interval_s=interval_s,
        )
        with (
            warnings_to_stderr(_LOGGED_PARTS, each_time=True),
            http_server(work.health, listen, "--listen", work.render) as server,
        ):
            report("started", f"the exporter serves http://{server.address}{METRICS}", listen=server.address)
            run_until_signal(work.run, work.stop)
            report("stopped", "the exporter has stopped")
    return ExitCode.OK
