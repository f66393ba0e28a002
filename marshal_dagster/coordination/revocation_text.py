"""The text for a revoked claim, in the error of the member that held it."""

from marshal_dagster._internal.texts import run_text
from marshal_dagster.coordination.claims import REVOKING, is_operator
from marshal_dagster.protocol.messages import Message


def revocation_text(record: Message) -> str:
    """Return who revoked a claim, and why.

    Args:
        record: The `RevokingClaim` or `RevokingRange`.

    Returns:
        A clause such as `an operator (jane@host) revoked it`.
    """
    if is_operator(record.instance):
        return f"an operator ({run_text(record.client)}) revoked it"
    if record.instance.startswith(f"{REVOKING}-"):
        return "a run-failure sensor revoked it, because Dagster reported that its run had ended"
    return f"client {record.client!r}, instance {record.instance!r}, revoked it, because it considered its run dead"
