"""The axes of the learner's processes: sizes, places, who leads a data rank, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, Qwen2Config

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.parallel.mesh import AXES, Mesh, ModelShape, axis_sizes, coordinates, is_data_leader

SHAPE = ModelShape(heads=4, key_heads=2, layers=2)


def test_what_is_left_of_the_world_is_the_shard_axis() -> None:
    assert axis_sizes(ParallelConfig(), 8) == {"pp": 1, "replicate": 1, "shard": 8, "cp": 1, "tp": 1}
    assert axis_sizes(ParallelConfig(replicate=2), 8) == {
        "pp": 1,
        "replicate": 2,
        "shard": 4,
        "cp": 1,
        "tp": 1,
    }


def test_places_by_hand() -> None:
    sizes = {"pp": 2, "replicate": 1, "shard": 2, "cp": 1, "tp": 2}
    assert coordinates(sizes, 0) == dict.fromkeys(AXES, 0)
    assert coordinates(sizes, 5) == {"pp": 1, "replicate": 0, "shard": 0, "cp": 0, "tp": 1}
    assert [rank for rank in range(8) if is_data_leader(sizes, coordinates(sizes, rank))] == [4, 6]


@given(st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_each_data_rank_has_one_leader_in_its_order(lengths: list[int]) -> None:
    sizes = dict(zip(AXES, lengths, strict=True))
    world = 1
    for length in lengths:
        world *= length
    places = [coordinates(sizes, rank) for rank in range(world)]
    assert len({tuple(place.values()) for place in places}) == world
    data_ranks = [
        at["replicate"] * sizes["shard"] + at["shard"] for at in places if is_data_leader(sizes, at)
    ]
    assert data_ranks == list(range(sizes["replicate"] * sizes["shard"]))


def test_one_process_needs_no_device_mesh() -> None:
    mesh = Mesh(axis_sizes(ParallelConfig(), 1), 0)
    assert mesh.device_mesh is None
    assert mesh.fsdp is None
    assert mesh.axis("tp") is None
    assert (mesh.data_rank, mesh.data_leaders) == (0, [0])


@pytest.mark.parametrize(
    ("parallel", "world", "key"),
    [
        ({"replicate": 3}, 4, "learner.parallel"),
        ({"replicate": 2}, 1, "learner.parallel"),
    ],
)
def test_what_does_not_go_up_is_refused(parallel: dict[str, Any], world: int, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        axis_sizes(ParallelConfig(**parallel), world, SHAPE)
    assert error.value.key == key
    assert error.value.remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [("tensor", 0), ("replicate", -1)],
)
def test_the_section_checks_itself(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        Config(learner=LearnerConfig(parallel=ParallelConfig(**{key: value})))
    assert error.value.key == f"learner.parallel.{key}"


def test_shapes_come_from_configurations() -> None:
    dense = Qwen2Config(num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3)
    assert ModelShape.of(dense) == ModelShape(heads=6, key_heads=2, layers=3)
    experts = MixtralConfig(num_local_experts=5)
    assert ModelShape.of(experts).experts == 5


def test_contexts_and_experts_take_processes_of_the_shard_axis() -> None:
    both = ParallelConfig(context=2, expert=8)
    mixture = ModelShape(heads=4, key_heads=2, layers=2, experts=8)
    assert axis_sizes(both, 8, mixture) == {"pp": 1, "replicate": 1, "shard": 4, "cp": 2, "tp": 1}
    more_than_heads = ParallelConfig(context=8, context_way="all_gather")
    assert axis_sizes(more_than_heads, 8, SHAPE)["cp"] == 8


@pytest.mark.parametrize(
    ("parallel", "rule"),
    [
        ({"context": 8}, "must divide the 4 attention heads"),
        ({"expert": 3}, "must divide the 8 processes"),
        ({"expert": 2, "replicate": 8}, "must divide the 1 processes"),
        ({"expert": 4}, "must divide the 6 experts"),
    ],
)
def test_contexts_and_experts_that_do_not_go_up_are_refused(parallel: dict[str, int], rule: str) -> None:
    mixture = ModelShape(heads=4, key_heads=2, layers=2, experts=6)
    with pytest.raises(ConfigError, match=rule):
        axis_sizes(ParallelConfig(**parallel), 8, mixture)
