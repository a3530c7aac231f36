"""The processes of a comparison, all alive for all repetitions so that systems can take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

from asyncrl.config.schema import SyncConfig
from bench.process import Process
from bench.sync.generator import CLEAR
from bench.sync.gloo import RAW_BYTES
from bench.sync.model import LEARNERS, total_bytes

BACKENDS = ("auto", "tcp")
LARGE = 200
"""Millions of parameters: above that the processes of one backend are what fits into 24 GB."""
BUCKET = SyncConfig().bucket_bytes
FLIPS = 5
SINKS = 2
"""Generator ranks, at most."""


class Others:
    """What others do, in one gloo group of a learner and generator ranks.

    begins: for each rank what its process runs between fork and exec · interface: of gloo; its own choice without one
    """

    def __init__(
        self,
        millions: int,
        folder: Path,
        stack: ExitStack,
        begins: Sequence[Callable[[], None] | None] = (None,) * (1 + SINKS),
        interface: str | None = None,
    ) -> None:
        self._bytes = total_bytes(millions)
        said = {
            "world": len(begins),
            "millions": millions,
            "folder": "/dev/shm",
            "rendezvous": f"file://{folder}/meet",
            "interface": interface,
        }
        self._ranks = [
            stack.enter_context(
                Process(
                    ["bench.sync.gloo"], folder / f"gloo{rank}.log", {**said, "rank": rank}, begins=before
                )
            )
            for rank, before in enumerate(begins)
        ]
        for rank in self._ranks:
            rank.hears()

    def gb_per_s(self, method: str, sinks: int) -> float:
        ranks = self._ranks[: sinks + 1]
        for rank in ranks:
            rank.tell({"method": method, "sinks": sinks})
        said = [rank.hears() for rank in ranks]
        seconds = max(s["ended"] for s in said) - max(s["begun"] for s in said)
        return (RAW_BYTES if method == "raw" else self._bytes) / seconds / 1e9


class Ours:
    """Two learner ranks and, for each kind of channel, a generator of one rank and one of two."""

    def __init__(self, millions: int, folder: Path, stack: ExitStack) -> None:
        self._bytes, self._version = total_bytes(millions), 0
        self.backends = BACKENDS if millions < LARGE else BACKENDS[:1]
        self._learners = {
            backend: [
                stack.enter_context(
                    Process(
                        ["bench.sync.learner"],
                        folder / f"learner-{backend}-{rank}.log",
                        {"millions": millions, "backend": backend, "rank": rank},
                    )
                )
                for rank in range(LEARNERS)
            ]
            for backend in self.backends
        }
        endpoints = {b: [learner.hears() for learner in self._learners[b]] for b in self.backends}
        self._generators: dict[tuple[str, int], list[Process]] = {}
        self.flip_floor_ms: dict[int, float] = {}
        self._needed: dict[int, int] = {}
        for backend in self.backends:
            for world in (1, 2):
                told = {
                    "millions": millions,
                    "backend": backend,
                    "world": world,
                    "endpoints": endpoints[backend],
                }
                ranks = [
                    stack.enter_context(
                        Process(
                            ["bench.sync.generator"],
                            folder / f"generator-{backend}-{world}-{rank}.log",
                            {**told, "rank": rank},
                        )
                    )
                    for rank in range(world)
                ]
                heard = [rank.hears() for rank in ranks]
                self._generators[backend, world] = ranks
                self.flip_floor_ms[world] = max(h["flip_floor_ms"] for h in heard)
                self._needed[world] = sum(h["bytes"] for h in heard)
        self._millions, self._folder, self._endpoints = millions, folder, endpoints

    def round(self, backend: str, world: int) -> dict[str, float]:
        """Publish a version, and have one generator take it."""
        self._version += 1
        ranks = self._generators[backend, world]
        for rank in ranks:
            rank.tell(self._version)
        published = self._publish(backend)
        taken = [rank.hears() for rank in ranks]
        clear(ranks)
        seconds = max(t["ended"] for t in taken) - min(p["begun"] for p in published)
        return {
            "gb_per_s": self._bytes / seconds / 1e9,
            "transfer_ms": max(t["stage_ms"] for t in taken),
            "flip_ms": max(t["flip_ms"] for t in taken),
            "verify_ms": max(t["verify_ms"] for t in taken),
            "learner_pause_ms": max(p["pause_ms"] for p in published),
            "learner_floor_ms": max(p["floor_ms"] for p in published),
            "flip_floor_ms": self.flip_floor_ms[world],
            "wire_bytes_ratio": sum(t["received"] for t in taken) / self._needed[world],
            "peak_extra_bytes": max(p["extra"] for p in published) + max(t["extra"] for t in taken),
            "peak_extra_bar_bytes": max(p["shard"] for p in published)
            + max(t["shard"] for t in taken)
            + 2 * BUCKET,
        }

    def _publish(self, backend: str) -> list[dict[str, float]]:
        for learner in self._learners[backend]:
            learner.tell(self._version)
        return [learner.hears() for learner in self._learners[backend]]

    def pauses(self, name: str, link_bytes_per_s: float | None) -> dict[str, float]:
        """Of an engine that decodes all the while, over a link of that speed."""
        told = {
            "millions": self._millions,
            "who": name,
            "link_bytes_per_s": link_bytes_per_s,
            "endpoints": self._endpoints[BACKENDS[0]],
        }
        with Process(["bench.sync.engine"], self._folder / f"{name}.log", told) as engine:
            floor_ms, heard = engine.hears()["floor_ms"], []
            for _ in range(1 + FLIPS):
                self._version += 1
                engine.tell("next")
                self._publish(BACKENDS[0])
                heard.append(engine.hears())
        return {
            f"{name}_ms": median(h["pause_ms"] for h in heard[1:]),
            f"{name}_transfer_ms": median(h["fetch_ms"] for h in heard[1:]),
            f"{name}_floor_ms": floor_ms,
        }


def clear(generators: Sequence[Process]) -> None:
    """Let generator ranks forget the version that they have."""
    for generator in generators:
        generator.tell(CLEAR)
        generator.hears()


def memcpy_gb_per_s(millions: int) -> float:
    source = torch.ones(total_bytes(millions) // 2, dtype=torch.bfloat16)
    target = torch.ones_like(source)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begun)
    return total_bytes(millions) / min(times) / 1e9
