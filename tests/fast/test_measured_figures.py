"""The pages on tuning, scaling and Spark sessions have the figures of the kept results of benchmarks."""

import json
import re
from typing import Any, Final

import pytest

from benchmarks import machine

HOW_TO: Final = machine.TOP / "docs" / "how-to"
TUNE: Final = " ".join((HOW_TO / "tune.md").read_text().split())
SCALING: Final = " ".join((HOW_TO / "scaling.md").read_text().split())
SPARK_SESSIONS: Final = " ".join((HOW_TO / "spark-sessions.md").read_text().split())


def result(benchmark: str) -> dict[str, Any]:
    """Return the kept result of a benchmark."""
    found: dict[str, Any] = json.loads((machine.TOP / "benchmarks" / "results" / f"{benchmark}.json").read_text())
    return found


def case(benchmark: str, name: str, side: str = "ours") -> float:
    """Return what was measured in a case."""
    [found] = [entry[side] for entry in result(benchmark)["cases"] if entry["name"] == name]
    return float(found)


def figures(page: str, sentence: str) -> list[float]:
    """Return the numbers at the places of `#` in a sentence of a page."""
    found = re.findall(re.escape(sentence).replace(r"\#", r"([\d,]+(?:\.\d+)?)"), page)
    assert len(found) == 1, sentence
    numbers = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [float(number.replace(",", "")) for number in numbers]


def is_rounded(shown: float, measured: float) -> bool:
    """Return whether a figure differs from the measured one by at most 5 %, which is how far two digits round."""
    return shown == pytest.approx(measured, rel=0.05)


LARGE: Final = result("scale")["conditions"]["large"]
ONE_CLAIM_MS: Final = case("claim", "claim 1 partition")
CLAIMS_MS: Final = case("claim", "claim 1,000 partitions")


@pytest.mark.parametrize(
    ("page", "sentence", "measured"),
    [
        (
            TUNE,
            "take # ms for a batch of one partition here, and # ms for one of 512 partitions",
            [case("growth", "batch of 1 partitions"), case("growth", "batch of 512 partitions")],
        ),
        (TUNE, "A claim of 1,000 partitions takes # ms", [CLAIMS_MS]),
        (
            TUNE,
            "Spark counts # million records a second, and # million with",
            [case("batch", "read and count") / 1e6, case("batch", "read and count", "beside") / 1e6],
        ),
        (
            SCALING,
            "# ms for one partition, # ms for 1,000 partitions together, with one broker on the same machine: # or #",
            [ONE_CLAIM_MS, CLAIMS_MS, 1_000 / ONE_CLAIM_MS, 1_000_000 / CLAIMS_MS],
        ),
        (
            SCALING,
            "that made # records a second on average, and # in the busiest second",
            [LARGE["records_a_second"], LARGE["most_records_in_a_second"]],
        ),
        (
            SCALING,
            "the sensors' reader used # % of a core, and a run of the busiest coordination partition # %",
            [LARGE["sensor_percent_of_a_core"], round(LARGE["busiest_run_percent_of_a_core"], 2)],
        ),
        (
            SCALING,
            "Each heartbeat cost its run # µs of processor time. All runs together use # % of a core",
            [
                LARGE["heartbeats_processor_us_a_record"],
                LARGE["heartbeats_processor_us_a_record"] * LARGE["records_a_second"] / 1e4,
            ],
        ),
        (SCALING, "what the brokers send to the runs: # MB/s", [LARGE["brokers_send_to_runs_mb_a_second"]]),
        (SCALING, "the # requests a second with which runs check", [LARGE["identity_requests_a_second"]]),
        (
            SCALING,
            "On average they read # records in an interval, where *P / C* is 1,563. The busiest one read #",
            [LARGE["records_read_an_interval"], LARGE["most_read"]],
        ),
        (SCALING, "they win all 10,000, with one record each and # s of one core", [LARGE["takeover_processor_s"]]),
        (SCALING, "The world state of 100,000 keys takes # MiB", [LARGE["world_state_mib"]]),
        (
            SCALING,
            "about # bytes, and # µs to read | `scale`",
            [
                LARGE["snapshot_bytes"] / LARGE["most_partitions_in_a_coordination_partition"],
                LARGE["snapshot_loaded_ms"] * 1_000 / LARGE["most_partitions_in_a_coordination_partition"],
            ],
        ),
        (
            SPARK_SESSIONS,
            "nothing to maintain | yes | [# s]",
            [result("connect")["cases"][0]["beside"]],
        ),
        (SPARK_SESSIONS, "# s | | a cluster, by its master's URL", [result("connect")["cases"][0]["ours"]]),
    ],
)
def test_the_page_has_the_kept_figures(page: str, sentence: str, measured: list[float]) -> None:
    """Each figure is the measured one, rounded."""
    shown = figures(page, sentence)
    assert all(is_rounded(*pair) for pair in zip(shown, measured, strict=True)), (shown, measured)
