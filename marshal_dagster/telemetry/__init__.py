"""Metrics through OpenTelemetry, and log lines with fields.

The lower layers `coordination` and `batches` call an observer. `observer` implements it with `metrics` and `log_lines`.
OpenTelemetry is imported only in this package, and only if the process already uses it.
"""
