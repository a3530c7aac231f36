"""What bench.chaos and tests/chaos judge runs by: it must see a task that ends twice, or never."""

from __future__ import annotations

from pathlib import Path

from ledger_driver import DrivenLedger as Ledger

from asyncrl.config.schema import Config, RunConfig
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.queue.storage.file_journal import FileJournal
from asyncrl.queue.storage.records import SCHEMA, Happened, StreamState, encode_record
from bench.chaos.history import BEFORE, History, JournalReader

SETTINGS = StreamSettings(
    groups_per_version=2, max_staleness=1, window=1, depth=4, max_bytes=100, lease_s=1.0
)


def history(*events: ev.Event) -> History:
    found = History()
    found.read(Happened("train", event) for event in events)
    return found


def step(number: int, *ordinals: int) -> tuple[ev.Event, ev.Event]:
    return ev.StepClaimed(number, 0, (ordinals[:1], ordinals[1:]), True), ev.StepTrained(number)


def test_every_task_ends_as_its_last_event_says() -> None:
    found = history(
        ev.Submitted(0, 7, 0),
        ev.Dropped(3, "reward"),
        *step(0, 0, 1),
        ev.StepClaimed(1, 0, ((2,), (4,)), True),
        ev.StepAbandoned(1, (4,), "corrupt"),
        *step(1, 2, 5),
        ev.Finished("done"),
    )
    assert found.ends == {0: 1, 1: 1, 2: 2, 5: 2, 3: "reward", 4: "corrupt", 6: "end"}
    assert (found.twice, found.unended, found.trained) == ([], [], [0, 1, 2, 5])
    assert found.counts[ev.StepTrained] == 2


def test_a_task_that_ends_twice_and_one_that_never_does_are_seen() -> None:
    found = history(ev.Submitted(0, 4, 0), *step(0, 0, 1), *step(1, 1, 2))
    assert (found.twice, found.unended) == ([1], [3])
    assert history(ev.Submitted(0, 1, 0), ev.Dropped(0, "reward"), *step(0, 0)).twice == [0]


def test_a_rewind_takes_back_what_came_after_its_checkpoint() -> None:
    before = (ev.Submitted(0, 6, 0), *step(0, 0, 1), ev.Dropped(4, "reward"), *step(1, 2, 3))
    checkpoint = ev.Frontier(version=1, frontier=2, kept=2)
    back = history(*before, ev.SteppedBack(SETTINGS, 2, 1, checkpoint))
    assert back.ends == {0: 1, 1: 1, 4: "reward"}
    anew = history(*before, ev.Rewound(SETTINGS, 2, 1, checkpoint))
    assert anew.ends == {0: 1, 1: 1}


def test_a_snapshot_is_read_on_from(tmp_path: Path) -> None:
    """And a journal that is written while it is read."""
    ledger = Ledger()
    config = Config(run=RunConfig(name="it", dir=str(tmp_path)))
    reader, found = JournalReader(config), History()
    found.read(reader.new_records())  # there is none yet
    journal = FileJournal(tmp_path / "it" / "queue", "it", SCHEMA)
    list(journal.replay())
    for event in (
        ev.StreamOpened(SETTINGS, 1),
        ev.Submitted(0, 3, 0),
        ev.Leased(0, "w", 1, 0, 0.0, 1.0),
        ev.Dropped(0, "reward"),
    ):
        ledger.apply(event)
        journal.append(encode_record(Happened("train", event)))
    journal.flush()
    late = History()
    late.read(JournalReader(config).new_records())
    journal.compact([encode_record(StreamState("train", ledger.state))])
    for reads, how in ((found, BEFORE), (late, "reward")):
        reads.read(JournalReader(config).new_records())
        assert reads.ends == {0: how}
        assert reads.unended == [1, 2]
    journal.close()
