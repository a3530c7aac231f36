"""The section `sync`: how weights travel to the generators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.sections.rules import Amount, Count, Positive, Rule, Seconds, Section, key, redis_url_rule


@dataclass(frozen=True)
class SyncConfig(Section):
    backend: Literal["auto", "shm", "nccl", "gloo", "file", "redis"] = key(
        "auto",
        "how weights travel; auto: shm where both ends can map each other's memory, else nccl between GPUs, "
        "else gloo; file and redis: the learner stores versions there, and generators read them",
    )
    folder: str | None = key(
        None, "backend file: where versions are stored; every process of the run must see it"
    )
    redis_url: str | None = key(None, "backend redis: as queue.redis_url; may be the same server")
    keep: Count = key(2, "backends file and redis: newest versions that stay stored; more help slow readers")
    fsync: bool = key(False, "backend file: a stored version survives a power failure")
    host: str | None = key(
        None,
        "of the learner's machine, as the generators see it, each machine its own; none: the address of its "
        "route to queue.address",
    )
    bucket_mb: Positive = key(64.0, "size of one message of the weight stream")
    verify: bool = key(True, "after every flip, hash the engine's live parameters against the learner's")
    deadline_s: Seconds = key(120.0, "of one weight transfer")
    snapshots: int = key(
        2,
        "copies of its shards that a learner rank keeps; with 1, half the memory, a transfer that takes "
        "longer than a step is started over, and a generator that always does gets no versions",
    )
    fanout: Amount | None = key(
        None,
        "most generators that one feeds with what it takes (0: the learner feeds all); none: by predicted "
        "time, and those on the learner's own host take directly from it",
    )
    silence_s: Seconds = key(
        300.0, "a generator that the learner has not heard of for so long is fenced: it must join anew"
    )
    delta: Literal["never", "auto", "always"] = key(
        "auto",
        "send generators what changed since the version that they have, if that is less; auto: over links "
        "slower than 1 GB/s. Needs snapshots=2",
    )
    delta_share: Positive = key(
        0.5, "memory for changes of past versions, which laggards replay: share of a rank's parameters"
    )
    network_gb_s: Positive = key(
        12.5, "what one rank sends to other machines, by which the tree is chosen: 100 Gbit/s"
    )
    local_gb_s: Positive = key(
        9.0, "to ranks of its own machine: shared memory of two CPU cores; NVLink does 100"
    )
    hop_ms: Positive = key(
        2.0, "what each generator between the learner and the last one adds, beside its bucket"
    )

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    @property
    def stored(self) -> bool:
        """Whether weights travel through a store, not over channels."""
        return self.backend in ("file", "redis")

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.silence_s >= self.deadline_s,
            "silence_s",
            f"a generator is silent during a transfer, for up to sync.deadline_s={self.deadline_s}",
            "raise sync.silence_s",
        )
        yield Rule(
            self.snapshots in (1, 2),
            "snapshots",
            "a learner rank keeps 1 or 2 copies",
            "set sync.snapshots=2, or 1 to save memory",
        )
        yield Rule(
            self.delta != "always" or self.snapshots == 2,
            "delta",
            "two versions are compared, but sync.snapshots=1 keeps one",
            "set sync.snapshots=2 or sync.delta=never",
        )
        yield redis_url_rule(at, self.redis_url)
        for name, value, backend, example in (
            ("folder", self.folder, "file", "/shared/weights"),
            ("redis_url", self.redis_url, "redis", "redis://127.0.0.1:6379/0"),
        ):
            yield Rule(
                (value is not None) == (self.backend == backend),
                name,
                f"goes with sync.backend={backend}, and only with that",
                f"set sync.backend={backend} sync.{name}={example}",
            )
