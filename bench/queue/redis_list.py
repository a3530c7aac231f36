"""A Redis list with redis-py: short groups as one blob each, long ones as a pipeline of rows, whichever is faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.queue.endpoint import Run
from bench.queue.load import DEPTH, DTYPES, ROWS, Arrays, Columns, Load
from bench.queue.redis_server import redis_server

KEY = "groups"
BLOB_TOKENS = 2048
"""Longest rows that travel in one blob with the others of their group."""

WAIT_S = 30.0


@contextmanager
def serve(folder: Path, options: Mapping[str, Any], load: Load) -> Iterator[str]:
    with redis_server(folder) as path:
        yield path


def produce(address: str, run: Run) -> None:
    client, rows = _client(address), _rows(run.load)
    run.start()
    for i in range(run.load.groups):
        run.pause(i)
        run.sends(i)
        with client.pipeline(transaction=False) as pipeline:
            for blob in encode(i, run.columns(i), rows):
                pipeline.rpush(KEY, blob)
            length = pipeline.execute()[-1]
        while length > DEPTH * rows:
            length = client.llen(KEY)


def consume(address: str, run: Run) -> None:
    client, rows = _client(address), _rows(run.load)
    run.start()
    blobs: list[bytes] = []
    while len(run.times) < run.load.groups:
        blobs += client.blmpop(WAIT_S, 1, KEY, direction="LEFT", count=rows - len(blobs))[1]
        if len(blobs) == rows:
            run.got(*decode(blobs, run.load.tokens))
            blobs = []


def encode(i: int, columns: Arrays, blobs: int) -> list[bytes]:
    number = i.to_bytes(8, "little")
    return [
        b"".join([number, *(column[at::blobs].data for column in columns.values())]) for at in range(blobs)
    ]


def decode(blobs: list[bytes], tokens: int) -> tuple[int, Columns]:
    read = [_read(blob, ROWS // len(blobs), tokens) for blob in blobs]
    rows = {name: [row for columns in read for row in columns[name]] for name in DTYPES}
    return int.from_bytes(blobs[0][:8], "little"), rows


def _read(blob: bytes, rows: int, tokens: int) -> Arrays:
    columns, at = {}, 8
    for name, dtype in DTYPES.items():
        columns[name] = np.frombuffer(blob, dtype, rows * tokens, at).reshape(rows, tokens)
        at += columns[name].nbytes
    return columns


def _rows(load: Load) -> int:
    """Blobs of a group."""
    return 1 if load.tokens <= BLOB_TOKENS else ROWS


def _client(address: str) -> Any:
    import redis

    return redis.Redis(unix_socket_path=address, socket_timeout=2 * WAIT_S)
