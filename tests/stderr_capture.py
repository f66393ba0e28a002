"""Filters stderr for a test, so that it does not see the output of other tests.

Kafka's clients of a test live until Python collects them. Those without a logger print a line when they lose their
broker, during whatever test runs then.
"""

import re

_CLIENT_LINE = re.compile(r"^%\d\|")


def lines_about(servers: str, printed: str) -> list[str]:
    """Return the lines of `printed`, without those of Kafka's clients about other servers (host:port,…)."""
    ours = servers.split(",")
    return [
        line
        for line in printed.splitlines()
        if not _CLIENT_LINE.match(line) or any(re.search(rf"{re.escape(our)}\b", line) for our in ours)
    ]
