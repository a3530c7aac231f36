"""One learner rank of asyncrl: python -m bench.sync.learner. Serves its shards, as FSDP2 cuts them."""

from __future__ import annotations

import time

import torch

import asyncrl.sync.delta.link_speed as link_speed
from asyncrl.config.schema import SyncConfig
from asyncrl.rpc.keys import client_keys
from asyncrl.sync.channels.shared_memory import allocated_bytes
from asyncrl.sync.layout.layout import layout_bytes
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.tensors.shards import Shards
from bench.process import Talk
from bench.sync.model import LEARNERS, learner_layout
from bench.sync.tensors import Drift, shards_of


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    rank = said["rank"]
    layout = learner_layout(said["millions"], rank)
    live = shards_of(layout)
    drift = Drift(live) if said.get("drifts") else None
    if "deflate_bytes_s" in said:
        link_speed.DEFLATE_BYTES_S = said["deflate_bytes_s"]
    # One snapshot: every version is taken before the next.
    sync = {"snapshots": 1, "delta": "never", **said.get("sync", {})}
    config = SyncConfig(backend=said["backend"], **sync)
    keys = client_keys(said.get("keys"))
    publisher = Publisher(rank, LEARNERS, Shards(layout, live), config, lineage=1, keys=keys)
    talk.tell(publisher.endpoint)
    while (version := talk.hears()) is not None:
        if drift is not None:
            drift.step()
        begun = time.monotonic()
        report = publisher.publish(version)
        talk.tell(
            {
                "begun": begun,
                "pause_ms": 1e3 * report.pause_s,
                "floor_ms": 1e3 * report.floor_s,
                "extra": allocated_bytes(),
                "shard": layout_bytes(layout),
            }
        )
    publisher.close()


if __name__ == "__main__":
    main()
