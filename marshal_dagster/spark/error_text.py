"""Saying in one line what went wrong in Spark."""


def first_line(error: BaseException) -> str:
    """Return what an error says in one line; of one that Java raised, Java's."""
    lines = [line.strip(": ") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if lines[0].startswith("An error occurred while calling") and len(lines) > 1 else lines[0]
