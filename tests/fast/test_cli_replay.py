"""`replay` computes the world state that the protocol defines, or reports the malformed line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from marshal_dagster.cli import stored_log
from marshal_dagster.protocol.replay import StoredRecord, render_record
from tests.cli import COMMAND, REPOSITORY, call, environ, start, stored
from tests.log_generator import generate
from tests.reference_reader import PlainReader, records_of

VECTOR = REPOSITORY / "tests" / "vectors" / "marshal-log.jsonl"
CLAIM = "ClaimingPartition/1/1/{instance}/c/g/ev/0"
BEAT = "Heartbeat/1/1/{instance}/c/g/ev/0/{offset}"
EV, ORDERS = 4, 2  # the coordination partitions of topics ev and orders among 8


def log_file(folder: Path, text: str) -> Path:
    """Write a stored log to a file."""
    path = folder / "log.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def takeover(second_claim_ms: int) -> str:
    """Return a log with a claim and a heartbeat at 0 ms, and another instance's claim later."""
    return stored(
        [
            (EV, 0, 0, CLAIM.format(instance="a")),
            (EV, 1, 0, BEAT.format(instance="a", offset=7)),
            (EV, 2, second_claim_ms, CLAIM.format(instance="b")),
        ]
    )


def owner(state: dict[str, object]) -> object:
    """Return the owner of the log's only key."""
    (key,) = state["groups"]["g"]["partitions"]  # type: ignore[index]
    return key["owner_instance"]


def test_the_log_that_go_wrote_leads_to_what_its_readme_reports(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key is released at the offset that the README names, and no record is invalid or refused."""
    state = call(capsys, "replay", VECTOR, "--json").json
    offsets = {
        group: {(key["topic"], key["partition"]): key["offset"] for key in shown["partitions"]}
        for group, shown in state["groups"].items()
    }
    assert offsets == {
        "groupG": {("ev", n): 250 for n in range(4)} | {("ev2", n): 500 for n in range(2)},
        "takeover": {("ev", n): 250 for n in range(4)},
        "wideG": {("wide", n): 100 for n in range(64)},
    }
    assert (state["invalid"], state["refused"]) == (0, 0)
    keys = [key for shown in state["groups"].values() for key in shown["partitions"]]
    assert {key["owner_instance"] for key in keys} == {None}
    assert {shown["paused_until"] for shown in state["groups"].values()} == {None}


def test_the_fields_are_exactly_those_that_are_promised(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has the documented fields and no others, for the log, a group and a key."""
    state = call(capsys, "replay", VECTOR, "--json").json
    assert state.keys() == {"invalid", "refused", "groups"}
    assert state["groups"]["takeover"].keys() == {"paused_until", "partitions"}
    assert list(state["groups"]["takeover"]["partitions"][0]) == [
        "topic",
        "partition",
        "owner_instance",
        "owner_client",
        "epoch",
        "offset",
        "plan_end",
        "plan_attempts",
        "generation",
        "data_topic_id",
        "last_beat_ms",
        "provisional",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "profile"), [("native", "mixed"), ("native", "hostile"), ("go", "go")])
def test_state_and_verdicts_are_those_of_the_reference_reader(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rules: str, profile: str
) -> None:
    """For a generated log, the final state and every verdict equal those of the reference reader."""
    interval_ms = 60_000 if rules == "go" else 2_500
    log = generate(11, 3_000, heartbeat_interval_ms=interval_ms, profile=profile)  # type: ignore[arg-type]
    lines = [render_record(StoredRecord(*record)) for record in log]
    path = log_file(tmp_path, "\n".join(lines))
    plain = PlainReader(4, interval_ms, rules)
    verdicts = [
        {"partition": partition, "offset": offset, "verdict": plain.read(partition, offset, at_ms, value)}
        for partition, offset, at_ms, value in records_of(lines)
    ]
    options = ["--rules", rules, "--heartbeat-interval", str(interval_ms / 1_000), "--coordination-partitions", "4"]
    assert call(capsys, "replay", path, *options, "--json").json == plain.summary()
    assert call(capsys, "replay", path, *options, "--at-each").lines == verdicts
    assert call(capsys, "replay", path, *options, "--at-each", "--json").lines == [*verdicts, plain.summary()]


@pytest.mark.slow
def test_standard_input_is_replayed_like_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """`-` reads a pipe to the same state, although the number of coordination partitions is not known in advance."""
    answer = start("replay", "-", "--json", given=VECTOR.read_bytes())
    assert (answer.code, answer.err) == (0, "")
    assert answer.json == call(capsys, "replay", VECTOR, "--json").json


def test_the_coordination_partitions_are_the_least_number_that_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without the option, the number follows from the partitions in the log and from the topics of its records."""
    claim = (EV, 0, 0, CLAIM.format(instance="a"))
    for last in (EV + 1, 6, 7):
        path = log_file(tmp_path, stored([claim, (last, 0, 0, "Mark/1/1/a/c/g//0")]))
        assert call(capsys, "replay", path, "--json").json["invalid"] == 0
    path = log_file(tmp_path, stored([claim]))
    assert call(capsys, "replay", path, "--json", "--coordination-partitions", "5").json["invalid"] == 1


@pytest.mark.parametrize(
    ("placed", "least", "found"),
    [
        ({}, 3, 3),
        ({("ev", EV): 1}, 3, 6),
        ({("ev", EV): 1, ("orders", 2): 1}, 3, 8),
        ({("ev", EV): 2, ("orders", 2): 1, ("ev", 0): 1, ("orders", 1): 1}, 5, 8),
        ({("ev", 2_000): 1}, 2_001, 2_001),
    ],
)
def test_most_records_are_in_the_partition_of_their_topic(
    placed: dict[tuple[str, int], int], least: int, found: int
) -> None:
    """A record in a wrong partition, which any program can write, does not mislead."""
    assert stored_log.likely_partitions(placed, least) == found


@pytest.mark.parametrize(
    "line",
    [
        '{"offset": 0, "timestamp": 1, "value": null, "partition": 7}',
        ' {"partition" :7 , "offset": 0, "timestamp": 1, "value": null}',
        '{"partition": 7, "offset": 0, "timestamp": 1, "value": "{\\"partition\\": 99,"}',
        '{"partition": 3, "partition": 7, "offset": 0, "timestamp": 1, "value": null}',
        '{"partition": 3, "\\u0070artition": 7, "offset": 0, "timestamp": 1, "value": null}',
        '{"partition": 7, "offset": 0, "timestamp": 1, "value": null, "more": {"partition": 99}}',
    ],
)
def test_the_largest_number_is_what_json_says(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str) -> None:
    """However a line is written, its partition counts as the JSON parser reads it."""
    claim = CLAIM.format(instance="a")
    claims = stored([(EV, 0, 0, claim), (ORDERS, 0, 0, claim.replace("/ev/", "/orders/"))])
    assert call(capsys, "replay", log_file(tmp_path, f"{claims}{line}\n"), "--json").json["invalid"] == 1


def test_the_heartbeat_interval_may_be_a_fraction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An owner is replaced after more than twice the interval, and not at exactly twice."""
    options = ("--heartbeat-interval", "0.75", "--json", "--coordination-partitions", "8")
    assert owner(call(capsys, "replay", log_file(tmp_path, takeover(1_500)), *options).json) == "a"
    assert owner(call(capsys, "replay", log_file(tmp_path, takeover(1_501)), *options).json) == "b"


def test_an_interval_of_a_minute_is_the_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without the option an owner becomes stale after two minutes."""
    options = ("--json", "--coordination-partitions", "8")
    assert owner(call(capsys, "replay", log_file(tmp_path, takeover(120_000)), *options).json) == "a"
    assert owner(call(capsys, "replay", log_file(tmp_path, takeover(120_001)), *options).json) == "b"


def test_the_rule_set_decides_until_settings_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Under `go` a heartbeat takes a partition without an owner; under `native` it is refused."""
    path = log_file(tmp_path, stored([(EV, 0, 0, BEAT.format(instance="a", offset=7))]))
    options = ("--json", "--coordination-partitions", "8")
    assert owner(call(capsys, "replay", path, *options, "--rules", "go").json) == "a"
    assert call(capsys, "replay", path, *options, "--rules", "native").json["refused"] == 1


def test_a_log_that_begins_later_is_only_observed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A coordination partition that does not begin at offset 0 has provisional keys, and the text reports it."""
    path = log_file(tmp_path, stored([(EV, 5, 0, BEAT.format(instance="a", offset=7))]))
    (key,) = call(capsys, "replay", path, "--coordination-partitions", "8", "--json").json["groups"]["g"]["partitions"]
    assert (key["provisional"], key["epoch"], key["owner_instance"], key["offset"]) == (True, None, "a", 7)
    assert "Only observed: coordination partitions 4." in call(capsys, "replay", path).out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"partition": ' + "9" * 5_000 + ', "offset": 1, "timestamp": 0, "value": null}', "not JSON"),
        ("[]", "not a JSON object"),
        ('{"partition": 4, "timestamp": 0, "value": null}', "'offset' is missing"),
        ('{"partition": "4", "offset": 1, "timestamp": 0, "value": null}', "'partition' is missing or not a whole"),
        ('{"partition": -1, "offset": 1, "timestamp": 0, "value": null}', "'partition'"),
        ('{"partition": 4, "offset": 1.5, "timestamp": 0, "value": null}', "'offset'"),
        ('{"partition": 4, "offset": 1, "timestamp": true, "value": null}', "'timestamp'"),
        ('{"partition": 4, "offset": 1, "timestamp": 0}', "'value' is missing"),
        ('{"partition": 4, "offset": 1, "timestamp": 0, "value": 3}', "'value'"),
        ('{"partition": 4, "offset": 0, "timestamp": 0, "value": null}', "offsets must rise"),
        (
            '{"partition": 0, "offset": 0, "timestamp": 9223372036854775808, "value": null}',
            "'timestamp' has more",
        ),
        ('{"partition": 8, "offset": 0, "timestamp": 0, "value": null}', "--coordination-partitions"),
    ],
)
def test_a_malformed_line_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, says: str) -> None:
    """A malformed line is an error with its number, counting empty lines, and exit code 4."""
    path = log_file(tmp_path, stored([(EV, 0, 0, None)]) + "\n" + line + "\n")
    answer = call(capsys, "replay", path, "--json", "--coordination-partitions", "8")
    assert (answer.code, answer.out) == (4, "")
    assert "line 3" in answer.error
    assert says in answer.error


@pytest.mark.slow
def test_bytes_that_are_no_text_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file that is not UTF-8, or has no line breaks, is malformed; it causes no crash."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(stored([(EV, 0, 0, None)]).encode() + b'{"value": "\xff"}\n')
    assert call(capsys, "replay", path).error.startswith("marshal-dagster: line 2: not UTF-8")
    path.write_bytes(b" " * stored_log.LONGEST_LINE_BYTES)
    assert "line 1" in call(capsys, "replay", path).error


def test_an_empty_log_is_an_empty_world(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file with only empty lines has no group."""
    answer = call(capsys, "replay", log_file(tmp_path, "\n \n"), "--json")
    assert (answer.code, answer.json) == (0, {"invalid": 0, "refused": 0, "groups": {}})
    assert "The log has no group." in call(capsys, "replay", log_file(tmp_path, "")).out
    assert call(capsys, "replay", log_file(tmp_path, ""), "--at-each").out == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rules", "java"], "--rules"),
        (["--heartbeat-interval", "0"], "--heartbeat-interval"),
        (["--heartbeat-interval", "nan"], "--heartbeat-interval"),
        (["--heartbeat-interval", "inf"], "--heartbeat-interval"),
        (["--heartbeat-interval", "-1"], "--heartbeat-interval"),
        (["--heartbeat-interval", "0.0001"], "--heartbeat-interval"),
        (["--coordination-partitions", "0"], "--coordination-partitions"),
    ],
)
def test_a_wrong_option_is_named(capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    """An invalid value is reported with its option before anything is read."""
    answer = call(capsys, "replay", "/nowhere", *options)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.error


@pytest.mark.parametrize("file", ["nowhere.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str) -> None:
    """A missing file and a folder are usage errors."""
    answer = call(capsys, "replay", tmp_path / file)
    assert answer.code == 2
    assert str(tmp_path) in answer.error


@pytest.mark.slow
def test_a_verdict_is_written_before_the_next_record_is_there() -> None:
    """With `--at-each`, each verdict is written as soon as its record arrives in the pipe."""
    command = [*COMMAND, "replay", "-", "--at-each", "--coordination-partitions", "8"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ())
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        for offset, verdict in enumerate(["accepted", "refused"]):
            process.stdin.write(stored([(EV, offset, 0, CLAIM.format(instance="a"))]).encode())
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["verdict"] == verdict
    assert process.returncode == 0


@pytest.mark.thorough
def test_a_long_log_is_not_held_in_memory(tmp_path: Path) -> None:
    """A log with a hundred times as many records needs hardly more memory."""
    one = render_record(StoredRecord(EV, 0, 0, CLAIM.format(instance="a").encode())) + "\n"
    script = (
        "import resource, sys; from marshal_dagster.cli.main import run; run(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    kib = []
    for beats in (1_000, 100_000):
        path = tmp_path / "log.jsonl"
        with path.open("w") as file:
            file.write(one)
            for offset in range(1, beats):
                beat = BEAT.format(instance="a", offset=offset).encode()
                file.write(render_record(StoredRecord(EV, offset, offset, beat)) + "\n")
        done = subprocess.run(
            [sys.executable, "-c", script, "replay", path, "--json", "--coordination-partitions", "8"],
            capture_output=True,
            check=True,
            env=environ(),
            cwd=REPOSITORY,
        )
        assert json.loads(done.stdout)["groups"]["g"]["partitions"][0]["offset"] == beats - 1
        kib.append(int(done.stderr))
    assert kib[1] - kib[0] < 12 * 1024


FORMER = json.loads((REPOSITORY / "tests" / "data" / "logs_of_0_1.json").read_text(encoding="utf-8"))["logs"]


@pytest.mark.parametrize("former", FORMER, ids=lambda former: str(former["name"]))
def test_the_logs_of_version_0_1_lead_to_the_same_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], former: dict[str, Any]
) -> None:
    """Groups with settings have each owner, offset, plan and range that version 0.1 computed (commit 1698b61)."""
    path = log_file(tmp_path, "".join(f"{json.dumps(record)}\n" for record in former["log"]))
    partitions = str(former["coordination_partitions"])
    answer = call(capsys, "replay", str(path), "--json", "--coordination-partitions", partitions)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["groups"] == former["groups"]
