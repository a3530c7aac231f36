"""One generator rank of asyncrl: python -m bench.sync.generator. Stages a version, flips its live parameters to it and
verifies them, as a generator does."""

from __future__ import annotations

import time

import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.rpc.keys import client_keys
from asyncrl.sync.channels.shared_memory import allocated_bytes
from asyncrl.sync.layout.layout import layout_bytes
from asyncrl.sync.stream.subscriber import Subscriber
from asyncrl.sync.tensors.shards import Shards, TensorBuffer
from bench.process import Talk
from bench.sync.model import generator_layout
from bench.sync.tensors import check, empty_shards

WAIT_S = 60.0
CLEAR = "clear"
"""An order between two versions, once all have the first: what arrives next is not there already."""


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    backend, rank, world = said["backend"], said["rank"], said["world"]
    layout = generator_layout(said["millions"], rank, world)
    live = empty_shards(layout)
    arena = TensorBuffer(layout, torch.device("cpu"))
    staging = arena.shards
    engine = Shards(layout, live)
    config = SyncConfig(backend=backend, **{"delta": "never", **said.get("sync", {})})
    who = said.get("who", f"tp{world}-{rank}-{backend}")
    keys = client_keys(said.get("keys"))
    subscriber = Subscriber(who, said["endpoints"], staging, config, lineage=1, keys=keys)
    talk.tell({"bytes": layout_bytes(layout), "flip_floor_ms": 1e3 * min(arena.floor() for _ in range(3))})
    while (version := talk.hears()) is not None:
        if version == CLEAR:
            for tensor in (*live.values(), *staging.parts):
                tensor.zero_()
            talk.tell(CLEAR)
            continue
        newest = subscriber.newest(version - 1, WAIT_S)
        if newest != version:
            raise RuntimeError(f"version {version} did not come, but {newest}")
        staged = subscriber.stage(version)
        arrived = time.monotonic()
        torch._foreach_copy_(list(live.values()), staging.parts)
        flipped = time.monotonic()
        assert staged.checksum is not None
        staged.checksum.check(engine, "the live parameters")
        ended = time.monotonic()
        if not said.get("drifts"):
            check(layout, live)
        talk.tell(
            {
                "ended": ended,
                "stage_ms": 1e3 * staged.seconds,
                "flip_ms": 1e3 * (flipped - arrived),
                "verify_ms": 1e3 * (ended - flipped),
                "received": staged.bytes,
                "extra": allocated_bytes(),
                "shard": layout_bytes(layout),
            }
        )
    subscriber.close()


if __name__ == "__main__":
    main()
