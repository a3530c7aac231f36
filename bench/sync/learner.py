"""One learner rank of asyncrl: python -m bench.sync.learner. Serves its shards, as FSDP2 cuts them, by a publisher for
each kind of channel."""

from __future__ import annotations

import time

import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.sync.publisher import Publisher
from bench.process import Talk
from bench.sync.model import LEARNERS, learner_layout
from bench.sync.tensors import shards_of


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    rank = said["rank"]
    layout = learner_layout(said["millions"], rank)
    live = shards_of(layout)
    publishers = {
        backend: Publisher(
            rank, LEARNERS, layout, live, SyncConfig(backend=backend, delta="never"), lineage=1
        )
        for backend in said["backends"]
    }
    talk.tell({backend: publisher.endpoint for backend, publisher in publishers.items()})
    while (order := talk.hears()) is not None:
        publisher = publishers[order["backend"]]
        begun = time.monotonic()
        report = publisher.publish(order["version"])
        ended = time.monotonic()
        talk.tell(
            {
                "begun": begun,
                "ended": ended,
                "pause_ms": 1e3 * report.pause_s,
                "floor_ms": 1e3 * report.floor_s,
                "sent": publisher.stats()["bytes"],
            }
        )
    for publisher in publishers.values():
        publisher.close()


if __name__ == "__main__":
    main()
