"""Sockets with and without keys: who is let in, what the others learn, and how soon they are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from queue_cases import WAIT_S, serving

from asyncrl.errors import ConfigError
from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.client.client import QueueClient
from asyncrl.rpc.keys import ClientKeys, client_keys, make_keys, server_keys


@pytest.fixture
def folder(tmp_path: Path) -> str:
    make_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


@pytest.fixture
def broker(folder: str) -> Iterator[Broker]:
    with serving(Broker("tcp://127.0.0.1:*", "run", keys=server_keys(folder))) as broker:
        yield broker


async def refused(broker: Broker, keys: ClientKeys | None) -> str:
    """What a client with these keys is told. It would wait for an answer far longer than this test may take."""
    client = QueueClient(broker.bound_address, run="run", who="stranger", deadline_s=600.0, keys=keys)
    with pytest.raises(ConfigError) as error:
        await client.connect()
    with pytest.raises(ConfigError):
        await client.status()
    await client.close()
    assert error.value.key == "queue.keys"
    return str(error.value)


async def handshakes_refused(broker: Broker, folder: str | None) -> int:
    friend = QueueClient(
        broker.bound_address, run="run", who="friend", deadline_s=WAIT_S, keys=client_keys(folder)
    )
    await friend.connect()
    status = await friend.status()
    await friend.close()
    assert status["run"] == "run"
    return int(status["refused"].get("handshake", 0))


async def test_the_right_key_opens(broker: Broker, folder: str) -> None:
    assert await handshakes_refused(broker, folder) == 0


async def test_without_a_key_nobody_gets_in_and_is_counted(broker: Broker, folder: str) -> None:
    assert "did not accept a client without keys" in await refused(broker, None)
    assert await handshakes_refused(broker, folder) >= 1


async def test_with_keys_of_another_queue_nobody_gets_in(broker: Broker, folder: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "others")
    other = client_keys(str(tmp_path / "others"))
    assert "did not accept these keys" in await refused(broker, other)
    assert await handshakes_refused(broker, folder) >= 1


async def test_who_knows_only_the_brokers_public_key_does_not_get_in(broker: Broker, folder: str) -> None:
    good = client_keys(folder)
    assert good is not None
    await refused(broker, ClientKeys("forged", *zmq.curve_keypair(), good.server))
    assert await handshakes_refused(broker, folder) >= 1


async def test_keys_against_a_queue_without_are_a_misunderstanding(folder: str) -> None:
    with serving(Broker("tcp://127.0.0.1:*", "run")) as broker:
        assert "leave both without" in await refused(broker, client_keys(folder))
        assert await handshakes_refused(broker, None) >= 1


async def test_a_broker_that_is_started_again_on_its_address_is_found_by_its_clients(folder: str) -> None:
    with serving(Broker("tcp://127.0.0.1:*", "run", keys=server_keys(folder))) as broker:
        address = broker.bound_address
        keys = client_keys(folder)
        client = QueueClient(address, run="run", who="patient", deadline_s=WAIT_S, keys=keys)
        await client.connect()
    again = Broker(address, "run", keys=server_keys(folder))
    with serving(again):
        assert (await client.status())["run"] == "run"
        await client.close()
