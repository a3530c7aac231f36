"""The section `sync`: how weights travel to the generators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.addresses import EVERY_ADDRESS, ports_of
from asyncrl.config.rules import Amount, Count, Positive, Rule, Seconds, Section, key, redis_url_rule

HOST_REMEDY = (
    "set it to the address where generators reach the learner, without scheme and port, or leave it out"
)


@dataclass(frozen=True)
class SyncConfig(Section):
    backend: Literal["auto", "shm", "nccl", "tcp", "gloo", "file", "redis", "vllm"] = key(
        "auto",
        "how weights travel; auto: shm where both ends can map each other's memory, else nccl between GPUs, "
        "else tcp; gloo: between CPUs; file and redis: the learner stores versions there, and generators "
        "read them; vllm: learner rank 0 sends whole versions by vLLM's own weight transfer",
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
    ports: str | None = key(
        None,
        "TCP ports at which learner ranks and relays listen, as 20000-20999: one for each process, and one while a "
        "generator attaches; none: any",
    )
    bucket_mb: Positive = key(64.0, "size of one message of the weight stream")
    verify: bool = key(True, "after every flip, hash the engine's live parameters against the learner's")
    deadline_s: Seconds = key(120.0, "of one weight transfer")
    snapshots: int = key(
        2,
        "copies of its shards that a learner rank keeps; with 1, half the memory, a transfer that takes "
        "longer than a step is started over, and a generator that always does gets no versions",
    )
    snapshot_device: Literal["device", "host"] = key(
        "device",
        "where a learner rank on a GPU keeps its snapshots; host: in pinned memory, which frees as much of the "
        "GPU's, and the learner waits for a copy over PCIe",
    )
    staging: Literal["auto", "device", "host"] = key(
        "auto",
        "where a generator on a GPU receives a version; host: in pinned memory, which leaves the GPU's to the KV "
        "cache, and each flip copies over PCIe; auto: on the device if a quarter of what vLLM may take is left for its "
        "cache",
    )
    fanout: Amount | None = key(
        None,
        "most generators that one feeds with what it takes (0: the learner feeds all); none: by predicted "
        "time, and those on the learner's own host take directly from it",
    )
    silence_s: Seconds = key(
        300.0, "a generator without a message to the learner for so long is fenced: it must join anew"
    )
    delta: Literal["never", "auto", "always"] = key(
        "auto",
        "send what changed since the version that a generator has, or store what changed since the last stored one, "
        "if that is less; deflated where link or store is slower than 25 MB/s; auto: where it is slower than 0.5 GB/s. "
        "Needs snapshots=2",
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
    def port_range(self) -> range:
        return range(1) if self.ports is None else ports_of(self.ports) or range(1)

    @property
    def stored(self) -> bool:
        """Whether weights travel through a store, not over channels."""
        return self.backend in ("file", "redis")

    @property
    def receives_on_host(self) -> bool:
        """Whether every version comes into the host's memory, by the backend or by the key."""
        return self.staging == "host" or self.stored or self.backend in ("tcp", "gloo")

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.staging != "device" or not self.receives_on_host,
            "staging",
            f"versions come into the host's memory with sync.backend={self.backend}",
            "set sync.staging=auto",
        )
        yield Rule(
            self.host not in EVERY_ADDRESS,
            "host",
            "is no address of one machine, and generators connect to it",
            HOST_REMEDY,
        )
        # An IPv6 address has several colons, a port behind a host has one.
        plain = self.host is None or ("/" not in self.host and self.host.count(":") != 1)
        yield Rule(plain, "host", "is no plain host name or address", HOST_REMEDY)
        yield Rule(
            self.ports is None or bool(ports_of(self.ports)),
            "ports",
            "is no range of ports from 1 to 65535",
            "write the first and the last one, as 20000-20999",
        )
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
        no = "is not for sync.backend=vllm, "
        for name, holds, why, remedy in (
            ("verify", not self.verify, f"{no}whose loader alone has the places of weights", "false"),
            ("delta", self.delta != "always", f"{no}which sends whole versions", "auto"),
            ("fanout", not self.fanout, f"{no}with which engines hand nothing on", "0"),
            ("staging", self.staging == "auto", f"{no}which loads a version as it comes", "auto"),
        ):
            yield Rule(self.backend != "vllm" or holds, name, why, f"set sync.{name}={remedy}")
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
