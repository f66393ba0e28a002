"""What a test finds on stderr, without what is another test's.

Kafka's clients of a test live until Python collects them, and those without a logger print a line whenever they find
their broker gone, into whichever test runs by then.
"""

import re

_CLIENT_LINE = re.compile(r"^%\d\|")


def lines_about(servers: str, printed: str) -> list[str]:
    """Give the lines of `printed` but those of Kafka's clients about other servers than `servers` (host:port,…)."""
    ours = servers.split(",")
    return [
        line
        for line in printed.splitlines()
        if not _CLIENT_LINE.match(line) or any(re.search(rf"{re.escape(our)}\b", line) for our in ours)
    ]
