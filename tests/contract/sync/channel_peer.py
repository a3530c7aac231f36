"""The generator's end of one channel, in a process of its own: `channel_peer.py KIND OFFER`.

It says "ready", then obeys one word per line: `recv N` and `send N` (N bytes of i mod 251), each answered with "done".
"""

from __future__ import annotations

import sys

import msgpack
import torch

from asyncrl.sync.channels.channel import TARGET, Meeting
from asyncrl.sync.channels.choose import connect


def main(kind: str, offer: str) -> None:
    device = torch.device("cuda" if kind in ("nccl", "cuda-ipc") else "cpu")
    channel = connect(
        "shm" if kind == "cuda-ipc" else kind,  # type: ignore[arg-type]
        msgpack.unpackb(bytes.fromhex(offer)),
        Meeting("epoch-1", TARGET, "generator-0", "learner rank 0", device, 20.0),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        verb, size = line.split()
        data = torch.arange(int(size), device=channel.device).remainder(251).to(torch.uint8)
        if verb == "send":
            channel.send(data).wait(20.0)
        else:
            into = torch.zeros_like(data)
            channel.recv(into).wait(20.0)
            assert torch.equal(into, data)
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
