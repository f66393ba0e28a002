"""The same work as a task of Airflow 3.

Without Airflow, this module has only the task's function.
"""

import signal
from importlib.util import find_spec
from typing import Any

from count_orders import count_orders


def run_task(run_id: str, try_number: int) -> int:
    """Process claimed batches for one try of a task.

    Tools show the run and the try as the owner of its claims.
    """
    return count_orders(run_id=f"{run_id} try {try_number}")


def end_at_sigterm() -> None:
    """Let SIGTERM end the function, so that its batch releases the claims.

    Airflow itself only calls `on_kill`.
    """

    def end(*_: object) -> None:
        raise SystemExit("SIGTERM ended the task")

    signal.signal(signal.SIGTERM, end)


def build_dag() -> Any:  # noqa: ANN401 - a type of Airflow
    """Return the DAG.

    Several runs may work at once, because each claims its own partitions.
    """
    from airflow.sdk import dag, get_current_context, task

    @task(retries=2)
    def claim_and_count() -> int:
        end_at_sigterm()
        context = get_current_context()
        return run_task(context["run_id"], context["ti"].try_number)

    @dag(
        dag_id="count_orders", schedule="*/5 * * * *", catchup=False, max_active_runs=2
    )
    def count_orders_dag() -> None:
        claim_and_count()

    return count_orders_dag()


if find_spec("airflow"):
    dag = build_dag()
