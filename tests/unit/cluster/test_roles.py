"""The roles of a run, alike on every cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.cluster.roles import fewest_nodes, reachable, refuse_devices, roles
from asyncrl.config.schema import Config, GeneratorConfig, LearnerConfig, QueueConfig, RunConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig
from asyncrl.errors import ConfigError
from asyncrl.rpc.keys import client_keys, server_keys


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run=RunConfig(name="it", dir=str(tmp_path)))


def test_each_role_has_the_command_of_its_processes() -> None:
    placement = PlacementConfig(teacher=PlaceConfig(where="pool", processes=2), generators={"small": {}})
    config = Config(placement=placement)
    assert [role.words("c.yaml") for role in roles(config, gpus=False)] == [
        ["queue", "c.yaml"],
        ["learner", "c.yaml"],
        ["generator", "c.yaml"],
        ["generator", "c.yaml", "--pool", "small"],
        ["pool", "c.yaml", "teacher"],
    ]


def test_a_pool_of_generators_is_a_role_of_its_own() -> None:
    small = {"count": 2, "engine": "vllm", "grace_s": 9, "vllm": {"tensor_parallel": 4}}
    generators = {"small": small, "cpus": {"devices": "", "threads": 3}}
    config = Config(placement=PlacementConfig(generators=generators))
    refuse_devices(config, "Ray")
    first, many, cpus = (role for role in roles(config, gpus=True) if role.verb == "generator")
    assert (first.name, first.processes, first.gpus) == ("generators", ("generator-0",), 1)
    assert many.name == "generators_small"
    assert many.processes == ("generator-small-0", "generator-small-1")
    assert (many.gpus, many.ranks, many.grace_s) == (4, 4, 9)
    assert (cpus.gpus, cpus.threads, cpus.cpus) == (0, 3, 3)


@given(st.integers(1, 24), st.lists(st.integers(0, 12), max_size=6))
def test_the_fewest_nodes_that_have_room(ranks: int, cpus: list[int]) -> None:
    def fits(count: int) -> bool:
        return ranks % count == 0 and sum(have >= ranks / count for have in cpus) >= count

    found = fewest_nodes(ranks, {"CPU": 1, "GPU": 0}, [{"CPU": have} for have in cpus])
    possible = [count for count in range(1, ranks + 1) if fits(count)]
    assert found == min(possible, default=1)


@pytest.mark.parametrize(("host", "address"), [("10.0.0.7", "10.0.0.7"), ("fd00::1", "[fd00::1]")])
def test_the_queue_listens_on_its_node_for_owners_of_the_keys_of_the_run(
    config: Config, tmp_path: Path, host: str, address: str
) -> None:
    config = dataclasses.replace(config, queue=QueueConfig(address="tcp://127.0.0.1:5555"))
    queue = reachable(config, host).queue
    assert (queue.address, queue.keys) == (f"tcp://{address}:5555", str(tmp_path / "it" / "keys"))
    made = server_keys(queue.keys), client_keys(queue.keys)
    assert (server_keys(reachable(config, host).queue.keys), client_keys(queue.keys)) == made
    own = dataclasses.replace(config.queue, keys="mine")
    assert reachable(dataclasses.replace(config, queue=own), host).queue.keys == "mine"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Config(generator=GeneratorConfig(devices="0")), "generator.devices"),
        (Config(learner=LearnerConfig(devices="0")), "learner.devices"),
        (Config(learner=LearnerConfig(devices="")), "learner.devices"),
        (
            Config(
                generator=GeneratorConfig(devices=""),
                placement=PlacementConfig(generators={"small": {"devices": "0"}}),
            ),
            "placement.generators.small.devices",
        ),
        (
            Config(placement=PlacementConfig(teacher=PlaceConfig(where="pool", devices="0"))),
            "placement.teacher.devices",
        ),
    ],
)
def test_devices_are_rays_to_give(config: Config, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = '0?': names devices of one machine"):
        refuse_devices(config, "Ray")
