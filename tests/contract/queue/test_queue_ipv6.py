"""A queue at an IPv6 address."""

from __future__ import annotations

import socket

import pytest
from queue_cases import serving

from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.client.client import QueueClient


async def test_a_client_finds_a_queue_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(Broker("tcp://[::1]:*", "run")) as broker:
        assert broker.bound_address.startswith("tcp://[::1]:")
        client = QueueClient(broker.bound_address, run="run", who="me", deadline_s=20.0)
        await client.connect()
        await client.close()
