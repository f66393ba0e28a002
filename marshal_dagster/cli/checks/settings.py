"""The settings of the coordination topic: under some the protocol does not hold."""

from collections.abc import Iterator

from marshal_dagster.cli.checks.finding import Finding, State
from marshal_dagster.cli.topic import with_servers
from marshal_dagster.coordination.admin import Severity, check_coordination_topic
from marshal_dagster.errors import MarshalError, TopicMissing
from marshal_dagster.kafka.topics import Topics


def check_topic_settings(topics: Topics, topic: str, servers: str) -> Iterator[Finding]:
    """Check the coordination topic's settings: under some the protocol does not hold."""
    try:
        problems = check_coordination_topic(topics, topic)
    except TopicMissing:
        return  # told already
    except MarshalError as error:
        yield Finding("topic settings", State.NOT_CHECKED, str(error))
        return
    for problem in problems:
        state = State.PROBLEM if problem.severity is Severity.DANGER else State.WARNING
        found = f"{problem.setting} of {topic} is {problem.found}, should be {problem.wanted}"
        mend = with_servers(problem, servers).mend
        yield Finding("topic settings", state, found, problem.why, mend)
    if not problems:
        yield Finding("topic settings", State.OK, f"{topic} has the settings that the protocol needs")
