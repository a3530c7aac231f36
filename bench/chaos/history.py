"""How every task of a run has ended, read from the journal of its queue; not by the ledger, which is on trial.

journal ──▸ records, as a next broker would read them ──▸ History: ordinal -> version that trained it, or reason
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.launch.folder.run_folder import run_folder
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.state.tasks import END
from asyncrl.queue.storage.file_journal import FileJournal
from asyncrl.queue.storage.journal import split
from asyncrl.queue.storage.records import SCHEMA, Happened, Record, StreamState, decode_record
from asyncrl.queue.storage.redis_run import KEY
from asyncrl.system.redis_place import RedisPlace

BEFORE = "before"
"""How a task has ended of which a snapshot only says that it has."""


class History:
    """The ends of one stream's tasks, event by event.

    ends    ordinal -> the version that trained it, or the reason for which it was dropped; a rewind takes back the ends
            that came after its checkpoint
    twice   ordinals that ended though they had ended
    counts  events by kind
    """

    def __init__(self) -> None:
        self.ends: dict[int, int | str] = {}
        self.twice: list[int] = []
        self.counts: Counter[type] = Counter()
        self._submitted = 0
        self._claimed: list[int] = []

    @property
    def unended(self) -> list[int]:
        return sorted(set(range(self._submitted)) - self.ends.keys())

    @property
    def trained(self) -> list[int]:
        return sorted(ordinal for ordinal, end in self.ends.items() if isinstance(end, int))

    @property
    def dropped(self) -> dict[int, str]:
        return {ordinal: end for ordinal, end in sorted(self.ends.items()) if isinstance(end, str)}

    def read(self, records: Iterable[Record], stream: str = "train") -> None:
        for record in records:
            if isinstance(record, Happened) and record.stream == stream:
                self.counts[type(record.event)] += 1
                self._happened(record.event)
            elif isinstance(record, StreamState) and record.stream == stream:
                self._snapshot(record)

    def _happened(self, event: ev.Event) -> None:
        match event:
            case ev.Submitted(first, count):
                self._submitted = first + count
            case ev.Dropped(ordinal, reason):
                self._end([ordinal], reason)
            case ev.StepClaimed(_, index, shares):
                before = self._claimed if index else []
                self._claimed = [*before, *(ordinal for share in shares for ordinal in share)]
            case ev.StepTrained(step):
                self._end(self._claimed, step + 1)
                self._claimed = []
            case ev.StepRejected(_, reason):
                self._end(self._claimed, reason)
                self._claimed = []
            case ev.StepAbandoned(_, dropped, reason):
                self._end(dropped, reason)
                self._claimed = []
            case ev.SteppedBack(frontier=frontier):
                undone = [
                    o for o, end in self.ends.items() if isinstance(end, int) and end > frontier.version
                ]
                self._forget(undone)
            case ev.Rewound(frontier=frontier):
                kept = {*range(frontier.frontier), *frontier.trained, *frontier.dropped_ordinals}
                self._forget(self.ends.keys() - kept)
            case ev.Finished():
                self._end(self.unended, END)
            case ev.Drained():
                raise ValueError("what a drain drops is not in its event: a drained run cannot be read here")

    def _snapshot(self, snapshot: StreamState) -> None:
        """All that was before it is gone from the journal, and known only if it was read in time."""
        tasks, steps = snapshot.state.tasks, snapshot.state.steps
        ended = {*range(tasks.ranks.frontier), *tasks.ranks.trained, *tasks.ranks.dropped}
        self.ends = {ordinal: self.ends.get(ordinal, BEFORE) for ordinal in ended}
        for version, step in steps.retained.steps.items():
            self.ends |= dict.fromkeys(step.ordinals(), version + 1)
        self._submitted = tasks.next
        self._claimed = [o for claim in steps.claims for share in claim.shares for o in share]

    def _end(self, ordinals: Iterable[int], how: int | str) -> None:
        for ordinal in ordinals:
            if ordinal in self.ends:
                self.twice.append(ordinal)
            self.ends[ordinal] = how

    def _forget(self, ordinals: Iterable[int]) -> None:
        self._claimed = []
        for ordinal in ordinals:
            del self.ends[ordinal]


class JournalReader:
    """Reads along while a broker writes. What a snapshot took the place of is never read, if it was not before."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._read = 0
        self._first: list[bytes] = []

    def new_records(self) -> Iterator[Record]:
        """Those that were not there the last time."""
        packed = self._redis_records() if self._config.queue.store == "redis" else self._file_records()
        if packed[:1] != self._first:  # a snapshot has taken the place of what was read
            self._read, self._first = 0, packed[:1]
        for record in islice(packed, self._read, None):
            self._read += 1
            yield decode_record(record)

    def _file_records(self) -> list[bytes]:
        journal = run_folder(self._config) / "queue" / "journal"
        if not journal.exists():
            return []
        with tempfile.TemporaryDirectory() as folder:  # a copy: the broker's own is locked
            shutil.copy(journal, folder)
            copy = FileJournal(Path(folder), self._config.run.name, SCHEMA)
            try:
                return list(copy.replay())
            finally:
                copy.close()

    def _redis_records(self) -> list[bytes]:
        assert self._config.queue.redis_url is not None
        place = RedisPlace(self._config.queue.redis_url, who="bench.chaos", key=KEY)
        name = f"asyncrl:{{{self._config.run.name}}}:journal"
        batches = place.call(lambda: place.client.lrange(name, 1, -1))  # 0 is the header
        place.close()
        return [record for batch in batches for record in split(batch)]
