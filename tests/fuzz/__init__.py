"""Fuzzing of the protocol: arbitrary bytes against the parser, the world state and the reader of snapshots.

A target is a function of bytes that raises `Finding` when a promise is broken; it needs nothing but the library and
the plain reader, so the corpus runs as a test everywhere. Only `process` needs atheris, which drives it by coverage.
"""
