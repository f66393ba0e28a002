"""The mutation gate: deliberately broken variants of the harvest and the election, which the simulator must catch.

`python -m tests.outbox_simulator.mutants` breaks a copy of the library in one way after another and runs seeds until
one finds a violation. It prints which promise caught each mutant, and after how many seeds. A mutant that survives is a
bug in the checkers.
"""

import sys
from typing import Final

from tests.mutation_gate import Mutant, gate
from tests.outbox_simulator.runner import CODE

HARVEST: Final = "outbox/harvest.py"
HOLDS: Final = "outbox/backoff.py"
STORE: Final = "outbox/store.py"
PORTS: Final = "outbox/interfaces.py"
PUBLISHER: Final = "outbox/publisher.py"
HARVESTER: Final = "outbox/harvester.py"
RULES: Final = "election/rules.py"
NUMBER_RUNS: Final = "_internal/number_runs.py"

MUTANTS: Final = (
    Mutant("a turn does not check that its session is current", STORE, "present[0] != session", "False"),
    Mutant(
        "a turn that strikes holds no lock on the registry",
        STORE,
        'ask + " FOR SHARE" if writes else ask',
        "ask",
    ),
    Mutant("a turn is not committed", STORE, "for found in rows]\n        connection.commit()", "for found in rows]"),
    Mutant("rows are taken in any order", STORE, "WHERE {free} ORDER BY id LIMIT", "WHERE {free} LIMIT"),
    Mutant("rows come in any order", STORE, "<= %(limit_bytes)s ORDER BY id", "<= %(limit_bytes)s"),
    Mutant("lanes that are held are taken", STORE, "        if lanes:\n", "        if False:\n"),
    Mutant("topics that are held are taken", STORE, "        if turn.held_topics:\n", "        if False:\n"),
    Mutant(
        "a session begins at Kafka's end first",
        HARVEST,
        "        self._session = self._store.begin()\n        self._publisher.begin()\n",
        "        self._publisher.begin()\n        self._session = self._store.begin()\n",
    ),
    Mutant("the note is not read", HARVEST, "self._done = self._publisher.noted()", "pass"),
    Mutant(
        "the note is read before the session begins",
        HARVEST,
        "        self._session = self._store.begin()\n"
        "        self._publisher.begin()\n"
        "        self._done = self._publisher.noted()\n",
        "        self._done = self._publisher.noted()\n"
        "        self._session = self._store.begin()\n"
        "        self._publisher.begin()\n",
    ),
    Mutant(
        "a batch is published before the last is struck",
        HARVEST,
        "if self._done.ranges or self._parked or self._restarts:",
        "if self._parked or self._restarts:",
        (
            (
                HARVEST,
                "self._done = PublishedBatch.of(batch)",
                "self._done = PublishedBatch([*self._done.ranges, *PublishedBatch.of(batch).ranges])",
            ),
        ),
    ),
    Mutant(
        "only the last batch of a turn is struck",
        HARVEST,
        "if self._done.ranges or self._parked or self._restarts:",
        "if self._parked or self._restarts:",
    ),
    Mutant(
        "a row is set aside after its successors go",
        HARVEST,
        "            self._parked,\n            limit,",
        "            self._parked if limit else [],\n            limit,",
        (
            (
                HARVEST,
                "self._done, self._parked, self._restarts = PublishedBatch(), [], 0",
                "self._done, self._parked, self._restarts = PublishedBatch(), [] if limit else self._parked, 0",
            ),
        ),
    ),
    Mutant(
        "after a refusal the session is not checked again",
        HARVEST,
        "if self._done.ranges or self._parked or self._restarts:",
        "if self._done.ranges or self._parked:",
    ),
    Mutant(
        "what is held is published",
        HARVEST,
        "self._holds.open_rows(batches.popleft())",
        "batches.popleft()",
    ),
    Mutant(
        "a row that is refused is left out, its lane is not held",
        HOLDS,
        "            self._lanes[lane] = hold\n            return None",
        "            return None",
    ),
    Mutant(
        "time passes within a turn",
        HOLDS,
        "all(hold is None or hold.until_ms <= self._turn_ms for hold in holds)",
        "all(hold is None or hold.until_ms <= self._now_ms() for hold in holds)",
    ),
    Mutant("a row is never set aside", HOLDS, "        if hold.tries < self._max_attempts:\n", "        if True:\n"),
    Mutant(
        "a topic's rows are never set aside",
        HOLDS,
        "hold.tries >= self._max_attempts and waited_ms >= self._topic_patience_ms",
        "False",
    ),
    Mutant(
        "halves are published in the wrong order",
        HARVEST,
        "return [batch[:middle], batch[middle:]]",
        "return [batch[middle:], batch[:middle]]",
    ),
    Mutant(
        "a session has a transactional id of its own",
        PUBLISHER,
        'f"{ID_PREFIX}{self._uid}",\n            id_prefix',
        'f"{ID_PREFIX}{self._uid}-{id(self)}",\n            id_prefix',
    ),
    Mutant(
        "a publisher is not initialised again in the next session",
        PUBLISHER,
        '        """Start a session (`Publisher.begin`)."""\n        self._end()\n',
        '        """Start a session (`Publisher.begin`)."""\n'
        "        if self._transaction is not None:\n"
        "            return\n",
        (
            (
                PUBLISHER,
                "        except MarshalError as error:\n            self._end()\n",
                "        except MarshalError as error:\n",
            ),
        ),
    ),
    Mutant(
        "a commit that failed counts as done",
        PUBLISHER,
        'raise BatchUnsettledError(f"it is unknown whether rows were published: {error}") from None',
        "return",
    ),
    Mutant(
        "a commit that failed counts as a refusal",
        PUBLISHER,
        'raise BatchUnsettledError(f"it is unknown whether rows were published: {error}") from None',
        "self.begin(); raise RowRejectedError(str(error)) from None",
    ),
    Mutant(
        "a note does not name the last row",
        PUBLISHER,
        "render_note(PublishedBatch.of(rows))",
        "render_note(PublishedBatch.of(rows[:-1] or rows))",
    ),
    Mutant("a note has all between first and last", NUMBER_RUNS, "first <= found[-1][1] + 1", "True"),
    Mutant(
        "rows are struck by their ids alone",
        STORE,
        "DELETE FROM {rows} WHERE {is_done}",
        "DELETE FROM {rows} WHERE id BETWEEN %(first_id)s AND %(last_id)s",
    ),
    Mutant(
        "a session strikes what it has published itself by its ids alone",
        PORTS,
        "rows[end - 1].id, rows[start].created_us, rows[start].created_us)",
        "rows[end - 1].id, -(2**63), 2**63 - 1)",
    ),
    Mutant(
        "a note lacks the time until which its rows were written",
        PUBLISHER,
        '"created_until_us": max(rows.created_until_us for rows in batch.ranges)',
        '"created_until_us": 2**63 - 1',
    ),
    Mutant(
        "a session continues after an unknown result",
        HARVESTER,
        "            while leads():\n                harvest = self._harvest(store, publisher, leads)\n",
        "            harvest = self._harvest(store, publisher, leads); harvest.begin()\n            while leads():\n",
        ((HARVESTER, "                    harvest.begin()\n", "                    publisher.begin()\n"),),
    ),
    Mutant(
        "a term counts from the arrival of its heartbeat",
        RULES,
        "ends_ms = sent_ms + self._timing.receive_deadline_ms",
        "ends_ms = now_ms + self._timing.receive_deadline_ms",
    ),
    Mutant(
        "the id is kept after a term",
        RULES,
        "        self._id = next(self._ids)\n",
        "        self._id = self._id or next(self._ids)\n",
        (
            (
                RULES,
                "        self._number = 0\n        self._next_beat_ms = now_ms",
                "        self._next_beat_ms = now_ms",
            ),
        ),
    ),
    Mutant(
        "a term that was resigned continues",
        RULES,
        "        events = self._resign(reason)\n"
        "        if self._id is not None:\n"
        "            self._start_new_candidacy(now_ms)\n"
        "        return events",
        "        return []",
    ),
    Mutant(
        "a leader does not look at its deadline",
        RULES,
        "return self.term is not None and now_ms < self._ends_ms",
        "return self.term is not None",
    ),
    Mutant(
        "a term outlives the loss of the partition",
        RULES,
        "        events = self._resign(reason)\n        self._id = None\n        return events",
        "        self._id = None\n        return []",
        (
            (
                "election/elector.py",
                "candidacy = self._candidacies.pop(taken.partition, None)",
                "candidacy = self._candidacies.get(taken.partition)",
            ),
        ),
    ),
    Mutant(
        "anybody's beat begins a term",
        RULES,
        "sent_ms = self._sent_ms.get(beat.number) if beat.leader_id == self._id else None",
        "sent_ms = self._sent_ms.get(beat.number)",
    ),
    Mutant(
        "the fence is a beat's number",
        RULES,
        "self.term = Term(offset, beat.leader_id)",
        "self.term = Term(beat.number, beat.leader_id)",
    ),
)


if __name__ == "__main__":
    sys.exit(gate(MUTANTS, "tests.outbox_simulator", CODE, seeds=2_000))
