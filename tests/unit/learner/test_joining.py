"""Where ranks meet, and where gloo listens: the variables of a process decide it."""

from __future__ import annotations

import logging
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.ranks import process_group
from asyncrl.system.rank_process import MEETING

Address = namedtuple("Address", ["address"])
IFNAME = "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of two on a machine with three interfaces. What a test adds is gone after it."""
    interfaces = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7"], "ib0": ["192.168.0.7", "fe80::1%ib0"]}
    found = {name: [*map(Address, addresses)] for name, addresses in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(os, "environ", {**os.environ, "RANK": "0", "WORLD_SIZE": "2"})
    monkeypatch.delitem(os.environ, IFNAME, raising=False)
    monkeypatch.setattr(process_group, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(process_group, "meeting", lambda: tuple(os.environ.get(MEETING, ":").split(":", 1)))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The words of each process group that is made."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **words: made.append(words))
    return made


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "lo"), ("10.0.0.7", "eth0"), ("fe80::1", "ib0")])
def test_gloo_listens_on_the_interface_of_an_address(address: str, name: str) -> None:
    process_group.bind_gloo(address)
    assert os.environ[IFNAME] == name


def test_an_interface_that_the_user_names_stays() -> None:
    os.environ[IFNAME] = "ib0"
    for address in ("10.0.0.7", "10.9.9.9"):
        process_group.bind_gloo(address)
        assert os.environ[IFNAME] == "ib0"


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"sync\.host = '10\.9\.9\.9': no interface .*GLOO_SOCKET_IFNAME"):
        process_group.bind_gloo("10.9.9.9")


def test_ranks_of_one_machine_meet_in_a_file_and_listen_on_loopback(
    tmp_path: Path, joined: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    os.environ[MEETING] = f"folder:{tmp_path}"
    process_group.join_process_group(torch.device("cpu"), Config())
    assert isinstance(joined[0]["store"], dist.FileStore)
    assert (joined[0]["rank"], joined[0]["world_size"]) == (0, 2)
    assert os.environ[IFNAME] == "lo"
    assert "torchrun" not in caplog.text


def test_torchrun_works_with_a_warning_that_names_the_risk(
    joined: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        process_group.join_process_group(torch.device("cpu"), Config())
    assert "store" not in joined[0]
    assert "started by torchrun: its store listens on all interfaces without a password" in caplog.text
