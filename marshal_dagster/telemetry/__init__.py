"""What the library tells of its work: metrics through OpenTelemetry, and log lines with fields.

No lower layer needs it: `coordination` and `batches` know an observer, which `observer` makes of `metrics`
and `log_lines`. OpenTelemetry is imported here only, and only where somebody has set it up in this process.
"""
