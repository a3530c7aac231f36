"""A broker that dies, or whose disk is full, at each of its calls to the disk: what it has answered is there again.

The states of a run that is left alone, one per request, are what every other run is compared with.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from disk_calls import FULL, KILL, TORN, Watch, watched
from ledger_cases import comparable
from recovered_queue import Queue

from asyncrl.queue.broker.recovery import Recovery
from asyncrl.queue.storage import journal
from asyncrl.queue.storage.file_journal import FileJournal
from asyncrl.queue.storage.file_payloads import FilePayloads
from asyncrl.queue.storage.records import SCHEMA
from asyncrl.queue.storage.store import PayloadKey, PayloadStore

Report = Callable[[str], None]

FAULTS = [KILL, TORN, FULL]


class FileQueue(Queue):
    """A queue in files, of which a segment takes two groups."""

    def __init__(self, folder: Path, fsync: bool = False, report: Report = lambda line: None) -> None:
        self.folder, self._fsync, self._report = folder, fsync, report
        super().__init__(durable=True)
        report("opened")

    def start(self, anew: bool = False) -> None:
        events = FileJournal(self.folder, "run", SCHEMA, fsync=self._fsync, least_overgrown=500)
        backend = FilePayloads(self.folder / "payloads", fsync=self._fsync, segment_bytes=90)
        store = PayloadStore(backend, durable=True, cool_bytes=0)
        self.recovery = Recovery("run", events, store, now=self.now, anew=anew)

    def ask(self, *words: Any, **args: Any) -> Any:
        value = super().ask(*words, **args)
        assert not isinstance(value, str), f"{words[0]} is refused: {value}"
        self._report("answered")
        return value


def life(queue: Queue) -> None:
    """Two steps with a checkpoint between, a task that is dropped, progress, and groups that wait."""
    queue.open()
    queue.submit(0, 8)
    queue.make(2)
    queue.claim(0)
    queue.trained(0)
    queue.snapshot()
    ((ordinal, epoch, *_),) = queue.lease(1, 1)
    queue.ask("progress", frames=(b"half",), stream="train", ordinal=ordinal, epoch=epoch, nbytes=4)
    queue.ask("drop", stream="train", ordinal=ordinal, epoch=epoch, reason="reward")
    queue.ask("checkpointed", "learner", stream="train", learner_epoch=queue.epoch, version=1)
    queue.make(2)
    queue.claim(1)
    queue.trained(1)
    queue.ask("post", key="weights/0", value=b"endpoint")
    queue.make(2)
    queue.lease(1, 2)


class Found(NamedTuple):
    """streams: states of the ledgers · payloads: of all that the next learner or worker may want"""

    streams: dict[str, Any]
    registry: dict[str, bytes]
    payloads: dict[PayloadKey, list[bytes]]


def found(folder: Path) -> Found:
    """By the next broker, which can write, and by the one after it."""
    again = FileQueue(folder)
    first = _contents(again)
    again.recovery.close()
    last = FileQueue(folder)
    assert _contents(last) == first
    last.recovery.close()
    return first


def _contents(queue: FileQueue) -> Found:
    state = queue.state
    keys = [
        PayloadKey(name, ordinal, part)
        for name, stream in state.streams.items()
        for ordinal, part, _ in stream.needed()
    ]
    return Found(
        {name: comparable(stream.ledger.state) for name, stream in state.streams.items()},
        dict(state.registry),
        {key: [bytes(frame) for frame in state.store.get(*key)] for key in keys},
    )


class Reference:
    """The life of a queue that is left alone: what a broker finds after each report, and all calls to the disk."""

    def __init__(self, folder: Path, fsync: bool) -> None:
        self.folder, self._fsync, self._runs = folder, fsync, itertools.count()
        queue, copies, self.states = self._place(), itertools.count(), []

        def note(line: str) -> None:
            copy = folder / f"copy-{next(copies)}"
            shutil.copytree(queue, copy)
            self.states.append(found(copy))

        life(FileQueue(queue, fsync, note))
        self.empty = Found({}, {}, {})
        self.calls, *_ = self.run("", -1)

    def run(self, fault: str, at: int) -> tuple[list[str], int, list[str], Path]:
        """The same life with a fault: its calls, its exit code, its reports, its folder."""
        place, notes = self._place(), self._place()
        watch = Watch(str(place), str(notes), fault=fault, at=at)
        code, reports = watched(lambda report: life(FileQueue(place, self._fsync, report)), watch)
        return watch.calls(), code, reports, place

    def _place(self) -> Path:
        place = self.folder / f"run-{next(self._runs)}"
        place.mkdir()
        return place


@pytest.fixture(scope="module", params=[False, True], ids=["", "fsync"])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "GROWTH", 1)  # so that the journal is compacted every few requests
        yield Reference(tmp_path_factory.mktemp("reference"), request.param)


def test_the_life_has_calls_of_each_kind(reference: Reference) -> None:
    kinds = {(call.split()[0], Path(call.split()[1]).name.rstrip("0123456789")) for call in reference.calls}
    expected = {("rename", "journal.partial"), ("write", "journal"), ("write", "journal.partial")}
    assert kinds >= expected | {("write", "segment-"), ("open", "segment-"), ("unlink", "segment-")}
    assert sum(call.startswith("rename") for call in reference.calls) >= 3
    assert len(reference.states[-1].payloads) == 4


SAMPLE = 25
"""Of so many calls one is tried in the quick tests."""


@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_answered_is_there_again(reference: Reference, fault: str, every: int) -> None:
    for at in range(FAULTS.index(fault) % every, len(reference.calls), every):
        _, code, reports, place = reference.run(fault, at)
        where = f"{fault} at call {at}, {reference.calls[at]}"
        if fault == FULL:
            assert code in (0, 28), where  # what remained may have needed no room
            told = [line for line in reports if line not in ("opened", "answered")]
            assert all("No space left" in line and str(place) in line for line in told), (where, told)
            answered = len(reports) - len(told)
        else:
            assert code == -9, where
            answered = len(reports)
        before = reference.states[answered - 1] if answered else reference.empty
        possible = [before, *reference.states[answered : answered + 1]]
        assert found(place) in possible, where


def test_payloads_that_spill_leave_no_file_behind(tmp_path: Path) -> None:
    """Whenever the broker dies."""

    def spill(report: Report) -> None:
        spilled = FilePayloads(place, lasting=False)
        for ordinal in range(2):
            spilled.write(PayloadKey("train", ordinal, "group"), [b"group"], 0)

    for at in itertools.count():
        place, notes = tmp_path / f"{at}", tmp_path / f"{at}-notes"
        notes.mkdir()
        watch = Watch(str(place), str(notes), fault=KILL, at=at)
        code, _ = watched(spill, watch)
        assert not place.exists() or not list(place.iterdir()), watch.calls()
        if code == 0:
            break
    assert at > 1


@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.slow)])
def test_a_broker_goes_on_from_a_journal_that_was_cut_at_any_byte(
    reference: Reference, tmp_path: Path, every: int
) -> None:
    """As a power failure may leave it. Each task is in one place; groups whose payload is gone are made again."""
    *_, whole = reference.run("", -1)
    packed = (whole / "journal").read_bytes()
    (tmp_path / "empty").mkdir()
    FileQueue(tmp_path / "empty").recovery.close()
    for end in range((tmp_path / "empty" / "journal").stat().st_size, len(packed), every):
        cut = tmp_path / str(end)
        shutil.copytree(whole, cut)
        (cut / "journal").write_bytes(packed[:end])
        for state in found(cut).streams.values():
            ranks, records = state["tasks"]["ranks"], set(state["tasks"]["records"])
            ended = {*range(ranks["frontier"]), *ranks["trained"], *ranks["dropped"]}
            assert not ended & records
            assert ended | records == set(range(state["tasks"]["next"]))
