"""Check the fuzzer: its corpus passes without atheris, its checks can fail, and a soak continues where it stopped."""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from marshal_dagster.coordinator.group import GroupCoordinator, GroupEventKind
from marshal_dagster.coordinator.messages import CoordinatorMessage, parse_coordinator_message
from marshal_dagster.coordinator.transport import NewestMessages, ReceivedRecord
from marshal_dagster.election.rules import Beat, Candidacy
from marshal_dagster.outbox import publisher
from marshal_dagster.protocol import messages, snapshots
from marshal_dagster.protocol.messages import Message
from marshal_dagster.protocol.rules import RecordNote, Refusal
from marshal_dagster.protocol.snapshots import StoredSnapshot
from marshal_dagster.protocol.state import Group, Key
from marshal_dagster.protocol.world import PartitionWorld, Verdict
from tests.fuzz import __main__ as command_line
from tests.fuzz import coordinator as fuzzed_coordinator
from tests.fuzz import notes, promises, world
from tests.fuzz.counts import Count, read_count
from tests.fuzz.logs import Log
from tests.fuzz.parser import check_value
from tests.fuzz.promises import PromiseError, TooSlowError, check_repeatedly, in_time
from tests.fuzz.supply import Supply
from tests.fuzz.targets import CORPUS, TARGETS


def run_corpus(target: str) -> int:
    """Run each file of a target's corpus once, and return the number of records."""
    return sum(TARGETS[target](path.read_bytes()) for path in sorted((CORPUS / target).iterdir()))


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_keeps_every_promise(target: str) -> None:
    """The corpus has all inputs that the fuzzer kept, and each input that ever broke a promise."""
    assert run_corpus(target) > 100


@pytest.mark.thorough
def test_the_corpus_reaches_every_verdict() -> None:
    """The logs of the corpus cause every refusal, every note, and every kind of invalid record."""
    seen: Counter[object] = Counter()
    for path in (CORPUS / "world").iterdir():
        readers = world.Readers(Log(Supply(path.read_bytes())))
        readers.run()
        for counts in (readers.by_one.refused, readers.by_one.invalid, readers.by_one.noted):
            seen.update(counts.keys())
    assert {*Refusal, *RecordNote, *messages.Invalid} == set(seen)


def test_a_record_without_value_is_judged_too() -> None:
    """A null value is no message for either reader."""
    check_value(None)


# The checks can fail


def test_a_parser_that_accepts_a_leading_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the reference reader calls invalid must be invalid."""
    monkeypatch.setattr(messages, "NUMBER", re.compile("[0-9]{1,19}"))
    messages._repeated_number.cache_clear()
    try:
        with pytest.raises(PromiseError, match="section 1 calls invalid"):
            run_corpus("parser")
    finally:
        messages._repeated_number.cache_clear()


def test_a_parser_that_loses_a_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that was read must be written back unchanged."""
    render = messages.render
    monkeypatch.setattr(messages, "render", lambda message: render(message)[:-1])
    with pytest.raises(PromiseError, match="byte for byte"):
        run_corpus("parser")


def test_a_parser_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing must never raise."""
    monkeypatch.setattr(messages, "MAX_VALUE_BYTES", None)
    with pytest.raises(TypeError):
        run_corpus("parser")


def test_a_world_that_keeps_a_trace_of_a_refused_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that occurs only in a refused record must not exist."""
    judge = PartitionWorld._judge

    def keep(self: PartitionWorld, message: Message, *rest: object) -> Verdict:
        self.groups.setdefault(message.group, Group(self.defaults))
        return judge(self, message, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PartitionWorld, "_judge", keep)
    with pytest.raises(PromiseError, match="the state after"):
        run_corpus("world")


def test_a_world_that_remembers_what_it_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory outside of the state must not grow either."""
    judge = PartitionWorld._judge

    def remember(self: PartitionWorld, message: Message, offset: int, log_time_ms: int, value: bytes | None) -> Verdict:
        verdict = judge(self, message, offset, log_time_ms, value)
        self._beats.setdefault(value or b"", Key())
        return verdict

    monkeypatch.setattr(PartitionWorld, "_judge", remember)
    with pytest.raises(PromiseError, match="not remembered"):
        run_corpus("world")


def test_a_world_that_keeps_more_than_a_record_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The growth for an accepted record has a limit."""

    def hoard(self: PartitionWorld, _: Message, value: bytes | None, key: Key) -> None:
        self._beats.clear()
        self._beats[(value or b"") * 1_000] = key

    monkeypatch.setattr(PartitionWorld, "_remember_beat", hoard)
    with pytest.raises(PromiseError, match="grow a reader no more"):
        run_corpus("world")


def test_a_world_that_remembers_former_owners_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many owners a key has had, only one heartbeat is remembered."""
    remember = PartitionWorld._remember_beat

    def keep_all(self: PartitionWorld, message: Message, value: bytes | None, key: Key) -> None:
        self._beat_of.clear()
        remember(self, message, value, key)

    monkeypatch.setattr(PartitionWorld, "_remember_beat", keep_all)
    with pytest.raises(PromiseError, match="one heartbeat is remembered"):
        run_corpus("world")


def test_a_lease_that_ends_a_millisecond_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus has logs with a record in the last millisecond of a lease."""

    def is_live(self: Group, key: Key, at_ms: int) -> bool:
        return key.owner is not None and at_ms - key.last_beat_ms < 2 * self.settings.heartbeat_interval_ms

    monkeypatch.setattr(Group, "is_live", is_live)
    with pytest.raises(PromiseError, match="verdict"):
        run_corpus("world")


def test_a_fast_path_that_takes_any_owner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applying many records must have the result of applying one by one."""
    apply_many = PartitionWorld.apply_many

    def lose_one(self: PartitionWorld, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        apply_many(self, list(records)[1:])

    monkeypatch.setattr(PartitionWorld, "apply_many", lose_one)
    with pytest.raises(PromiseError, match="many at once"):
        run_corpus("world")


def test_a_snapshot_that_forgets_plans_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot in the middle of a log must restore every field."""
    read = snapshots._read_key_row

    def forget(*row: object) -> Key:
        key = read(*row)  # type: ignore[arg-type]
        key.last_beat_ms += 1
        return key

    monkeypatch.setattr(snapshots, "_read_key_row", forget)
    with pytest.raises(PromiseError, match="brings the whole state back"):
        run_corpus("world")
    with pytest.raises(PromiseError):
        run_corpus("snapshots")


def test_a_snapshot_whose_checksum_nobody_looks_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that does not match the checksum must not be read."""

    def text(stored: StoredSnapshot) -> bytes | snapshots.RejectedSnapshot:
        closing = stored.closing
        if closing is None:
            return snapshots.RejectedSnapshot.INCOMPLETE
        return b"".join(stored.parts[str(part)] for part in range(closing.parts))

    monkeypatch.setattr(StoredSnapshot, "text", property(text))
    with pytest.raises(PromiseError):
        run_corpus("snapshots")


def test_a_name_that_cannot_be_written_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forged snapshot must not restore a state that its reader could not write."""
    monkeypatch.setattr(messages, "_NOT_IN_NAMES", frozenset({"Cc"}))
    messages.shared_name.cache_clear()
    try:
        with pytest.raises(UnicodeEncodeError):
            run_corpus("snapshots")
    finally:
        messages.shared_name.cache_clear()


def test_a_note_whose_fields_nobody_looks_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object without rows would end every harvester."""
    monkeypatch.setattr(publisher, "_is_run", lambda _: True)
    with pytest.raises((TypeError, ValueError)):
        notes.check(random.Random(0).randbytes(300_000))


def test_a_term_that_another_may_begin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own heartbeat makes a member the leader."""
    receive = Candidacy.receive

    def believe(self: Candidacy, beat: Beat, *rest: float) -> object:
        self._sent_ms.setdefault(beat.number, rest[1])
        return receive(self, Beat(self._id or "", beat.number), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Candidacy, "receive", believe)
    with pytest.raises(PromiseError, match="no term begins by another's beat"):
        run_corpus("election")


def test_a_successor_that_no_beat_shows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence must be the offset of another member's heartbeat."""
    monkeypatch.setattr(Candidacy, "may_have_successor", lambda *_: True)
    with pytest.raises(PromiseError, match="a successor comes after the own term"):
        run_corpus("election")


def test_a_coordinator_that_believes_every_epoch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise any member could end the coordinator's term with one record."""

    def believe(self: GroupCoordinator, _: int) -> list[CoordinatorMessage]:
        self._report(GroupEventKind.SUPERSEDED)
        return []

    monkeypatch.setattr(GroupCoordinator, "_hear_of_successor", believe)
    with pytest.raises(PromiseError, match="no member ends a term by a number"):
        run_corpus("coordinator")


def test_a_message_under_any_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a message would count forever."""

    def keep(found: NewestMessages, record: ReceivedRecord) -> None:
        message = parse_coordinator_message(record.value)
        if message is not None:
            found[record.partition, record.key] = message, record

    monkeypatch.setattr(fuzzed_coordinator, "keep_newest", keep)
    with pytest.raises(PromiseError, match="counts under its own key"):
        run_corpus("coordinator")


def test_what_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor time for a record has a limit."""
    assert in_time("nothing", lambda: 7) == 7
    monkeypatch.setattr(promises, "CPU_MS_PER_RECORD", 1)
    with pytest.raises(PromiseError, match="work takes no longer"):
        in_time("work", lambda: sum(range(1_000_000)))


def test_an_input_is_too_slow_only_if_it_is_so_each_time() -> None:
    """A pause of the machine is no finding; work that is slow in each repetition is one."""
    slow_runs = [True, True, False]

    def sometimes(_: bytes) -> int:
        if slow_runs.pop(0):
            raise TooSlowError("slow")
        return 7

    assert check_repeatedly(sometimes, b"") == 7

    def always(_: bytes) -> int:
        raise TooSlowError("slow")

    with pytest.raises(TooSlowError):
        check_repeatedly(always, b"")


# The command


def fake(exit_code: int, *, finding: bool) -> Callable[[str, Path], list[str]]:
    """Return the command of a fake fuzzing process that reads 30 records from 20 inputs."""
    lines = [
        "import sys; from pathlib import Path; from tests.fuzz.counts import Counter",
        "counter = Counter(Path(sys.argv[1]))",
        "[counter.add(1 + number % 2) for number in range(20)]",
        "[folder] = [each.split('=')[1] for each in sys.argv if each.startswith('-artifact_prefix=')]",
        "Path(folder, 'crash-1').write_bytes(b'x')" if finding else "",
        f"print('the promise'); sys.exit({exit_code})",
    ]
    return lambda _, counts: [sys.executable, "-c", "\n".join(lines), str(counts)]


def test_a_finding_is_shown_with_the_command_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output has the broken promise, the file and the command; the outcome is not clean."""
    monkeypatch.setattr(command_line, "child", fake(77, finding=True))
    outcome = command_line.run(command_line.Stretch("parser", 1, 1, tmp_path))
    assert outcome.count == Count(20, 30)
    assert not command_line.report([outcome])
    printed = capsys.readouterr().out
    path = tmp_path / "findings" / "parser" / "crash-1"
    assert "the promise" in printed
    assert f"python -m tests.fuzz --replay {path}" in printed


def test_a_process_that_dies_is_not_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit code other than 0 is enough, even without a finding."""
    monkeypatch.setattr(command_line, "child", fake(1, finding=False))
    assert not command_line.run(command_line.Stretch("parser", 1, 1, tmp_path)).is_clean
    monkeypatch.setattr(command_line, "child", fake(0, finding=False))
    assert command_line.run(command_line.Stretch("parser", 1, 1, tmp_path)).is_clean


def test_an_input_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of an input shows its target."""
    path = tmp_path / "parser" / "crash-2"
    path.parent.mkdir()
    path.write_bytes(b"Mark/1/1/a/c/g//0")
    assert command_line.replay(path, None) == 0
    assert "1 records" in capsys.readouterr().out


def test_a_soak_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sittings on one commit add up, each with its own seed; findings are kept."""
    results = tmp_path / "results" / "fuzz.jsonl"
    monkeypatch.setattr(command_line, "code_version", lambda _: "one")
    monkeypatch.setattr(command_line, "BUILD", tmp_path)
    seeds = []

    def run(stretch: command_line.Stretch) -> command_line.Outcome:
        seeds.append(stretch.seed)
        return command_line.Outcome(stretch, Count(10, 30), 1.0)

    monkeypatch.setattr(command_line, "run", run)
    assert command_line.soak(100, results, 1, 1, 1)
    before = results.read_text()
    assert len(before.splitlines()) == 2  # a sitting counts 60 log records; records of snapshots do not count
    assert command_line.soak(130, results, 1, 1, 1)
    assert results.read_text().startswith(before)
    assert sorted(set(seeds)) == [1, 2, 3]
    assert command_line.soaked(results, "one").records == 180
    assert command_line.soaked(results, "another").records == 0

    broken = json.loads(before.splitlines()[0]) | {"findings": 1}
    results.write_text(f"{json.dumps(broken)}\n{before}")
    assert not command_line.soak(100, results, 1, 1, 1)


def test_a_process_that_never_began_has_counted_nothing(tmp_path: Path) -> None:
    """Without a file, the count is empty."""
    assert read_count(tmp_path / "none") == Count()
