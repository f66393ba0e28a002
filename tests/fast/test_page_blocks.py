"""The Python blocks of pages that define ops, assets, sensors and resources, executed in their order on each page."""

import re
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, Final

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource

import marshal_dagster as marshal

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGES: Final = (
    "how-to/assets",
    "how-to/authentication",
    "how-to/component",
    "how-to/decoding",
    "how-to/deployment",
    "how-to/go-consumers",
    "how-to/schedule",
    "how-to/sensors",
    "how-to/spark-sessions",
    "how-to/tune",
    "how-to/use",
    "operate/pause",
    "operate/position",
    "operate/reprocess",
)
"""Pages whose blocks connect to nothing."""


def blocks_of(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    text = (DOCS / f"{page}.md").read_text()
    found = [dedent(block) for block in re.findall(r"^ *```py(?:thon)?\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)]
    assert found, page
    return found


def names_of_other_pages() -> dict[str, Any]:
    """Return what a block may name without a definition on its own page, because another page defines it."""

    def orders_per_shop(context: object, batch: object, frame: object) -> None:
        """Process a batch of orders."""

    def page_operator(found: object) -> None:
        """Report exhausted plans."""

    kafka = marshal.KafkaConnectionConfig(bootstrap_servers="broker:9092")
    op = marshal.build_claimed_batch_op(orders_per_shop, name="orders_per_shop", topic="orders")
    idle = SimpleNamespace(idle="drained")
    return {
        "dg": dg,
        "marshal": marshal,
        "LazyPySparkResource": LazyPySparkResource,
        "kafka": kafka,
        "orders_per_shop": op,
        "job": marshal.build_claimed_batch_job(op),
        "reprocess": marshal.build_reprocess_job(op),
        "page_operator": page_operator,
        "claimer": SimpleNamespace(claimed_batch=lambda *_, **__: nullcontext(idle)),
        "context": None,
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_can_be_executed(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name and argument is accepted, so a reader can copy the blocks into a code location."""
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")
    monkeypatch.setenv("KAFKA_CLIENT_SECRET", "secret")
    names = names_of_other_pages()
    for number, block in enumerate(blocks_of(page)):
        exec(compile(block, f"{page}.md, block {number}", "exec"), names)  # noqa: S102 - the page's own code


def test_the_schema_of_the_tables_of_a_sink_needs_no_session() -> None:
    """PySpark accepts fewer names of types without a session than with one."""
    [block] = [block for block in blocks_of("how-to/sinks") if "StructType()" in block]
    created: list[Any] = []
    names: dict[str, Any] = {"sink": SimpleNamespace(create_tables=created.append)}
    exec("from pyspark.sql.types import StructType", names)  # noqa: S102
    exec(block, names)  # noqa: S102 - the page's own code
    assert [schema.simpleString() for schema in created] == ["struct<partition:int,offset:bigint,shop:string>"]
