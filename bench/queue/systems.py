"""What is compared, in the order of the table and in time: the yardstick beside what is measured by it."""

from __future__ import annotations

from typing import Any

from bench.queue.runner import System

ASYNCRL = "asyncrl_queue"


def _ours(name: str, short: int, long: int, **options: Any) -> System:
    return System(name, ASYNCRL, {512: short, 8192: long}, options)


SYSTEMS = (
    _ours("asyncrl_memory", 12_000, 3_200, store="memory"),
    System("pyzmq_bare", "pyzmq_bare", {512: 24_000, 8192: 4_000}),
    _ours("asyncrl_journal", 12_000, 3_200, store="file"),
    _ours("asyncrl_journal_payload", 4_000, 640, store="file", durable="payload", fsync=True),
    _ours("asyncrl_redis", 6_000, 1_600, store="redis", redis=True, durable="payload"),
    _ours("asyncrl_redis_metadata", 12_000, 3_200, store="redis", redis=True),
    _ours("asyncrl_curve", 6_000, 1_600, store="memory", curve=True),
    System("transferqueue", "transferqueue", {512: 800, 8192: 480}, peer=True),
    System("ray_queue", "ray_queue", {512: 1_200, 8192: 800}, peer=True),
    System("redis_list", "redis_list", {512: 12_000, 8192: 1_600}, peer=True),
)

WHAT = {
    "asyncrl_memory": "nothing outlives the broker",
    "asyncrl_journal": "metadata in a file (the default)",
    "asyncrl_journal_payload": "payloads too, each burst with fsync",
    "asyncrl_redis": "journal and payloads in Redis",
    "asyncrl_redis_metadata": "journal in Redis",
    "asyncrl_curve": "as memory, encrypted",
    "pyzmq_bare": "a broker that only holds and hands on",
    "transferqueue": "TransferQueue 0.1.11",
    "ray_queue": "ray.util.queue and the object store",
    "redis_list": "redis-py, RPUSH and BLMPOP",
}
