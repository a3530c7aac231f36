"""The generator's end of one channel, in a process of its own: `channel_peer.py KIND PORT NAME`.

It says "ready", then obeys one word per line: `recv N` and `send N` (N bytes of i mod 251), each answered with "done".
"""

from __future__ import annotations

import sys

import torch

from asyncrl.sync.channels.channel import Meeting
from asyncrl.sync.channels.choose import open_channel
from asyncrl.sync.channels.torch_transport import TARGET, join_store


def main(kind: str, port: str, name: str) -> None:
    device = torch.device("cuda" if kind in ("nccl", "cuda-ipc") else "cpu")
    store = join_store("127.0.0.1", int(port), 20.0)
    channel = open_channel(
        "shm" if kind == "cuda-ipc" else kind,  # type: ignore[arg-type]
        Meeting(store, name, TARGET, "generator-0", "learner rank 0", "127.0.0.1", device, 20.0),
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
