"""The calculations, output format and fair comparison of the benchmarks; tests/real checks what they measure."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import bare, batch, claim, harness, interpreters, machine, registry, services, start_up
from benchmarks.first_claim import TOPIC
from benchmarks.harness import Benchmark, Case, Goal, Measured
from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import ClaimingPartition, GroupSettings, parse
from marshal_dagster.spark import reader
from marshal_dagster.testing import MemoryBroker, MemoryLog

CONNECTION = KafkaConnection(bootstrap_servers="127.0.0.1:1")
DOCUMENTATION = machine.TOP / "docs" / "verification" / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a benchmark that measures nothing."""

    records: int = 10
    warm_up: int = 2


def measure(sizes: Sizes) -> Measured:
    """Return figures that contain the sizes."""
    case = Case("seconds", [3.0, sizes.records, 1.0], [2.0, 1.0, 4.0], "s", Goal.RATIO_AT_MOST, 2)
    return Measured([case], {"spun": sizes.warm_up})


TOY = Benchmark("toy", "measures nothing", Sizes(), measure)


def case(ours: float, beside: float, goal: Goal, target: float) -> Case:
    """Return a case with one sample on each side."""
    return Case("it", [ours], [beside], "s", goal, target)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this benchmark the only one of the command."""
    monkeypatch.setattr(command, "BENCHMARKS", (TOY,))


# Cases and results


@pytest.mark.parametrize(
    ("ours", "beside", "goal", "target", "met"),
    [
        (2.0, 1.0, Goal.RATIO_AT_MOST, 2, True),
        (2.001, 1.0, Goal.RATIO_AT_MOST, 2, False),
        (0.95, 1.0, Goal.RATIO_AT_LEAST, 0.95, True),
        (0.9499, 1.0, Goal.RATIO_AT_LEAST, 0.95, False),
        (0.7, 0.6, Goal.DIFFERENCE_AT_MOST, 0.1, True),
        (0.701, 0.6, Goal.DIFFERENCE_AT_MOST, 0.1, False),
        (1.0, 9.0, Goal.OURS_AT_MOST, 1, True),
        (1.001, 9.0, Goal.OURS_AT_MOST, 1, False),
    ],
)
def test_a_target_is_met_up_to_the_target_itself(
    ours: float, beside: float, goal: Goal, target: float, met: bool
) -> None:
    """A case that is exactly on its target has met it, in the direction of its goal."""
    assert case(ours, beside, goal, target).is_met is met


def test_a_case_reports_medians_and_their_ratio() -> None:
    """A case shows the median of its samples on each side, and their ratio."""
    figures = Case("it", [9.0, 1.0, 3.0], [1.0, 2.0, 400.0], "ms", Goal.RATIO_AT_MOST, 1.4).figures()
    assert figures == {
        "name": "it",
        "ours": 3.0,
        "beside": 2.0,
        "unit": "ms",
        "ratio": 1.5,
        "target": 1.4,
        "met": False,
        "meaning": Goal.RATIO_AT_MOST.value,
    }


def test_nothing_to_divide_by_is_an_error() -> None:
    """A comparison with something that took no time is an error, not a success."""
    with pytest.raises(ValueError, match="it: what it is compared with measured 0 s"):
        _ = case(1.0, 0.0, Goal.RATIO_AT_MOST, 2).ratio
    with pytest.raises(ValueError, match="nothing was measured"):
        Case("it", [], [1.0], "s", Goal.RATIO_AT_MOST, 2).figures()


def test_sides_alternate_and_warm_up_does_not_count() -> None:
    """Our side and the other alternate, and the first rounds are not among the samples."""
    turns: list[str] = []

    def side(name: str) -> Callable[[], float]:
        def turn() -> float:
            turns.append(name)
            return float(len(turns))

        return turn

    measured = harness.alternate(2, side("ours"), side("beside"), warm_up=1)
    assert turns == ["ours", "beside"] * 3
    assert measured == ([3.0, 5.0], [4.0, 6.0])


def test_each_side_is_the_first_of_a_round_in_turn() -> None:
    """Preparation runs before each round; the samples are grouped by side, whatever the order."""
    turns: list[str] = []

    def side(name: str) -> Callable[[], float]:
        def turn() -> float:
            turns.append(name)
            return float(ord(name))

        return turn

    taken = harness.take_turns_to_begin(3, [side("a"), side("b")], lambda: turns.append("."), warm_up=1)
    assert "".join(turns) == ".ab.ba.ab.ba"
    assert taken == [[97.0] * 3, [98.0] * 3]


def test_the_spread_has_a_p99_only_where_there_are_samples_for_it() -> None:
    """Few samples have minimum, median and maximum; a hundred or more also have a 99th percentile."""
    assert harness.spread([3.0, 1.0, 2.0]) == {"samples": 3, "min": 1.0, "median": 2.0, "max": 3.0}
    assert harness.spread([float(number) for number in range(101)])["p99"] == 99.0


# The command line


@pytest.mark.usefixtures("toy")
def test_json_is_one_object_of_the_agreed_form(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, the output is one object with the benchmark, its conditions and its cases."""
    command.main(["toy", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["benchmark", "conditions", "cases"]
    check_form(found)
    assert found["benchmark"] == "toy"
    assert found["conditions"]["sizes"] == {"records": 10, "warm_up": 2}
    assert found["conditions"]["spun"] == 2
    assert found["conditions"]["spread"]["seconds"]["beside"] == {"samples": 3, "min": 1.0, "median": 2.0, "max": 4.0}


@pytest.mark.usefixtures("toy")
def test_each_size_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """A size on the command line is the one measured with, and it is reported in the conditions."""
    command.main(["toy", "--json", "--records", "2", "--warm-up", "0"])
    found = json.loads(capsys.readouterr().out)
    assert found["conditions"]["sizes"] == {"records": 2, "warm_up": 0}
    assert found["conditions"]["spun"] == 0
    assert found["cases"][0]["ours"] == 2.0


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("size", ["0", "-1", "1.5", "many", "", "\u0661"])
def test_a_size_that_cannot_be_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A size is a whole number of at least 1, except that there may be no warm-up; the error names the option."""
    with pytest.raises(SystemExit, match="2"):
        command.main(["toy", f"--records={size}"])
    assert "argument --records" in capsys.readouterr().err


@pytest.mark.usefixtures("toy")
def test_without_json_a_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows each case with both figures, the ratio, the target and whether it was met."""
    command.main(["toy"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["case", "ours", "beside", "unit", "ratio", "target", "met"] in lines
    assert ["seconds", "3", "2", "s", "1.5", "≤", "2", "yes"] in lines


def test_without_a_name_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each benchmark is listed with a line on what it compares."""
    command.main([])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for benchmark in registry.BENCHMARKS:
        assert [benchmark.name, benchmark.summary] in lines


@pytest.mark.thorough
def test_listing_them_loads_nothing_heavy() -> None:
    """A benchmark imports its libraries when it runs, so that the list appears at once."""
    program = "import sys, benchmarks.__main__ as it; it.main([]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=machine.TOP)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"dagster", "pyspark", "pandas"} & set(loaded)


def test_the_benchmarks_of_the_first_issue_are_there() -> None:
    """The four benchmarks exist, no name is used twice, and all sizes are whole numbers."""
    names = [benchmark.name for benchmark in registry.BENCHMARKS]
    assert len(set(names)) == len(names)
    assert {"claim", "world_state", "batch", "start_up"} <= set(names)
    for benchmark in registry.BENCHMARKS:
        for size in fields(benchmark.sizes):
            assert isinstance(getattr(benchmark.sizes, size.name), int), f"{benchmark.name}: {size.name}"


# What is compared


def test_the_bare_client_has_the_settings_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library and the bare client differ in no setting that could make one of them faster."""
    made: list[dict[str, Any]] = []
    for name in ("Producer", "Consumer"):
        monkeypatch.setattr(clients, name, made.append)
    clients.producer(CONNECTION, delivery_timeout_ms=bare.DELIVERY_TIMEOUT_MS, client_id="x")
    clients.consumer(CONNECTION, client_id="x")
    assert [essential(settings) for settings in made] == [
        essential(bare.PRODUCER_SETTINGS),
        essential(bare.CONSUMER_SETTINGS),
    ]


def essential(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without names, timeouts and callbacks."""
    aside = {"bootstrap.servers", "client.id", "group.id", "logger", "error_cb", "throttle_cb"}
    aside |= {"socket.timeout.ms", "socket.connection.setup.timeout.ms"}
    return {name: value for name, value in settings.items() if name not in aside}


def test_the_tuned_connector_is_tuned_as_the_library_does_it() -> None:
    """The tuned connector has the same consumer options as the library."""
    assert batch.OUR_CONSUMER == reader._CONSUMER_DEFAULTS


def test_the_bare_records_are_those_of_a_claim() -> None:
    """The bare client writes as many records as a claim, of the same kind."""
    messages = [parse(value) for value in claim.records_like_claims(3)]
    assert [type(message) for message in messages] == [ClaimingPartition] * 3
    assert [message.partition for message in messages if isinstance(message, ClaimingPartition)] == [0, 1, 2]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    """An in-memory coordination log that replaces Kafka's."""
    broker = MemoryBroker()
    monkeypatch.setattr(claim, "KafkaLog", lambda *_: MemoryLog(broker))
    return broker


def test_each_measured_claim_is_a_tenure_of_its_own(broker: MemoryBroker) -> None:
    """Each round claims all partitions once, as a new instance with positions, and releases them."""
    claims = claim.Claims(CONNECTION, 3)
    assert min(claims.claim_s(), claims.claim_s()) > 0
    values = [value or b"" for number in range(8) for _, _, value in broker.records(number)]
    requested = [value.split(b"/")[3] for value in values if value.startswith(b"ClaimingPartition")]
    left = [value.split(b"/")[3] for value in values if value.startswith(b"ReleasingPartition")]
    assert requested == left
    assert sorted(requested.count(instance) for instance in set(requested)) == [3, 3, 3]


def test_a_claim_that_was_not_won_is_no_measurement(broker: MemoryBroker) -> None:
    """A round in which another member holds a partition is an error, not a fast sample."""
    claims = claim.Claims(CONNECTION, 2)
    rationalizer = Rationalizer(MemoryLog(broker), topics=[TOPIC])
    other = Claimer(rationalizer, Member("benchmark", "other", "other.1"), TOPIC, GroupSettings())
    other.ensure_group_settings()
    assert other.claim([1])
    with pytest.raises(RuntimeError, match="1 of 2 partitions were won"):
        claims.claim_s()


def test_a_log_that_was_not_written_whole_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reports records that the broker did not accept."""

    class Failing:
        def __init__(self, _: Mapping[str, Any]) -> None:
            self.calls: list[Callable[[Any, Any], None]] = []

        def produce(
            self, _topic: str, _value: bytes | None, *, partition: int, on_delivery: Callable[[Any, Any], None]
        ) -> None:
            assert partition in {0, 1}
            self.calls.append(on_delivery)

        def flush(self, _: float) -> int:
            self.calls[0]("too large", None)
            return 0

    monkeypatch.setattr(services, "Producer", Failing)
    with pytest.raises(RuntimeError, match=r"of 2 records for 'log' 0 were not sent, 1 failed: .*too large"):
        services.load(CONNECTION, "log", [(0, b"a"), (1, None)])


@pytest.mark.thorough
def test_importing_is_timed_in_one_process_and_heavy_modules_are_reported() -> None:
    """The time of both imports includes that of Dagster alone, and a module imported too early is named."""
    found = start_up.import_once("import psycopg", os.environ)
    assert 0 < found.dagster_s < found.all_s
    assert 0 < found.dagster_cpu_s < found.all_cpu_s
    assert found.loaded == ("psycopg",)


@pytest.mark.slow
def test_fresh_interpreters_find_byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process finds the compiled byte code, even if the environment forbids Python to write it."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program = "import sys, tools.import_all as it; sys.stdout.write(it.__cached__)"
    with interpreters.environment() as environment:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=machine.TOP,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert Path(done.stdout).is_file()
        assert Path(done.stdout).is_relative_to(environment["PYTHONPYCACHEPREFIX"])


# Conditions and stored results


def test_conditions_outside_a_checkout_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without git the conditions report `unknown` instead of failing."""
    monkeypatch.setattr(machine, "TOP", tmp_path)
    found = machine.conditions(Sizes())
    assert (found["commit"], found["uncommitted_changes"]) == ("unknown", None)


def kept() -> list[dict[str, Any]]:
    """Return the results in the repository."""
    return command.kept_results()


def test_every_benchmark_has_a_kept_result_in_the_agreed_form() -> None:
    """The stored results come from the current benchmarks and from committed code."""
    assert [found["benchmark"] for found in kept()] == [benchmark.name for benchmark in registry.BENCHMARKS]
    for found in kept():
        check_form(found)
        assert found["conditions"]["uncommitted_changes"] is False


def test_the_documentation_quotes_the_kept_results() -> None:
    """The documentation has the table that `python -m benchmarks --table` prints."""
    assert harness.as_markdown(kept()) in DOCUMENTATION.read_text(encoding="utf-8")


def test_the_documentation_explains_every_benchmark() -> None:
    """The documentation has a section on each benchmark."""
    text = DOCUMENTATION.read_text(encoding="utf-8")
    for benchmark in registry.BENCHMARKS:
        assert f"\n### `{benchmark.name}`\n" in text


def check_form(found: Mapping[str, Any]) -> None:
    """Check that a result has the format of issue 3."""
    assert set(found) == {"benchmark", "conditions", "cases"}
    requested = {"date", "commit", "cores", "memory_gib", "load_average_at_start", "versions", "sizes", "spread"}
    assert requested <= set(found["conditions"])
    assert {"python", "confluent-kafka", "broker", "spark", "java"} <= set(found["conditions"]["versions"])
    assert found["cases"]
    for one in found["cases"]:
        assert set(one) == {"name", "ours", "beside", "unit", "ratio", "target", "met", "meaning"}
        assert isinstance(one["met"], bool)
        assert one["ratio"] == pytest.approx(one["ours"] / one["beside"], rel=1e-3)
        for side in ("ours", "beside"):
            spread = found["conditions"]["spread"][one["name"]][side]
            assert spread["min"] <= spread["median"] <= spread["max"]
            assert spread["median"] == one[side]
