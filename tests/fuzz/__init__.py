"""Fuzzing of the protocol: arbitrary bytes against the parser, the world state and the reader of snapshots.

A target is a function of bytes that raises `PromiseError` when a promise is broken. It needs only the library and the
reference reader, so the corpus runs as a test everywhere. Only `process` needs atheris, which guides the fuzzing by
coverage.
"""
