"""The limit for a broker in Python: it holds groups and hands them on, and knows nothing of them.

    producer ── number · columns ──▸ ROUTER ── number · columns ──▸ consumer
             ◂── taken ────────────   │ ▴ ────── next, please ──────
                                      held: at most DEPTH, beyond which nothing is acknowledged

A group is three frames: its number, the token ids, all other columns one after another. Each
column in a frame of its own, uncopied, is slower for short groups and no faster for long ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from bench.queue.endpoint import Run
from bench.queue.load import DEPTH, DTYPES, IN_FLIGHT, ROWS, Arrays, Columns, Load


@contextmanager
def serve(folder: Path, options: Mapping[str, Any], load: Load) -> Iterator[str]:
    router: zmq.Socket = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    threading.Thread(target=_route, args=(router,), daemon=True).start()
    yield router.getsockopt_string(zmq.LAST_ENDPOINT)


def _route(router: zmq.Socket) -> None:
    held: deque[list[zmq.Frame]] = deque()
    unanswered: deque[zmq.Frame] = deque()
    asking: deque[zmq.Frame] = deque()
    while True:
        sender, *frames = router.recv_multipart(copy=False)
        if len(frames) > 1:
            held.append(frames)
            unanswered.append(sender)
        else:
            asking.append(sender)
        while held and asking:
            router.send_multipart([asking.popleft(), *held.popleft()], copy=False)
        while unanswered and len(held) < DEPTH:
            router.send_multipart([unanswered.popleft(), b"taken"])


def produce(address: str, run: Run) -> None:
    dealer, unacknowledged = _dealer(address), 0
    run.start()
    for i in range(run.load.groups):
        run.pause(i)
        run.sends(i)
        dealer.send_multipart(encode(i, run.columns(i)), copy=False)
        unacknowledged += 1
        while unacknowledged and (unacknowledged == IN_FLIGHT or dealer.poll(0)):
            dealer.recv()
            unacknowledged -= 1
    for _ in range(unacknowledged):
        dealer.recv()


def consume(address: str, run: Run) -> None:
    dealer = _dealer(address)
    run.start()
    for _ in range(IN_FLIGHT):
        dealer.send(b"get")
    while len(run.times) < run.load.groups:
        frames = dealer.recv_multipart(copy=False)
        run.got(*decode(frames, run.load.tokens))
        dealer.send(b"get")


def encode(i: int, columns: Arrays) -> list[Any]:
    ids, *others = columns.values()
    return [msgpack.packb(i), ids, b"".join(column.data for column in others)]


def decode(frames: list[zmq.Frame], tokens: int) -> tuple[int, Columns]:
    number, ids, others = (frame.buffer for frame in frames)
    columns, at = {"token_ids": np.frombuffer(ids, np.int64).reshape(ROWS, tokens)}, 0
    for name, dtype in list(DTYPES.items())[1:]:
        columns[name] = np.frombuffer(others, dtype, ROWS * tokens, at).reshape(ROWS, tokens)
        at += columns[name].nbytes
    return msgpack.unpackb(number), columns


def _dealer(address: str) -> zmq.Socket:
    dealer: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(address)
    return dealer
