"""What each role of a run needs of a cluster."""

from __future__ import annotations

from asyncrl.cluster.ray.needs import run_needs
from asyncrl.config.schema import Config, GeneratorConfig, LearnerConfig
from asyncrl.config.sections.generator import ServerConfig, VllmConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig, RewardsPlaceConfig

BIG = {"CPU": 64.0, "GPU": 8.0}


def texts(config: Config, *nodes: dict[str, float], gpus: bool = True) -> list[str]:
    return [str(need) for need in run_needs(config, nodes or [BIG], gpus)]


def test_without_gpus_each_rank_has_its_threads() -> None:
    config = Config(
        learner=LearnerConfig(processes=2, threads=3), generator=GeneratorConfig(count=2, threads=5)
    )
    assert texts(config, gpus=False) == ["queue 1 × (CPU 1)", "learner 1 × (CPU 6)", "generators 2 × (CPU 5)"]
    assert [need.threads for need in run_needs(config, [BIG], False)] == [1, 3, 5]


def test_each_rank_with_a_model_has_a_gpu() -> None:
    vllm = GeneratorConfig(
        count=2, engine="vllm", vllm=VllmConfig(tensor_parallel=2, data_parallel=2), threads=1
    )
    pools = PlacementConfig(
        teacher=PlaceConfig(where="pool", processes=3, ranks=2),
        rewards=RewardsPlaceConfig(where="pool", processes=2),
    )
    config = Config(learner=LearnerConfig(processes=8), generator=vllm, placement=pools)
    assert texts(config) == [
        "queue 1 × (CPU 1)",
        "learner 1 × (CPU 8, GPU 8)",
        "generators 2 × (CPU 4, GPU 4)",
        "teacher 3 × (CPU 2, GPU 2)",
        "rewards 2 × (CPU 1)",
    ]


def test_processes_have_the_names_of_the_launcher() -> None:
    pools = PlacementConfig(teacher=PlaceConfig(where="pool", processes=2))
    needs = run_needs(Config(generator=GeneratorConfig(count=2), placement=pools), [BIG], False)
    assert [need.processes for need in needs] == [
        ("queue",),
        ("learner",),
        ("generator-0", "generator-1"),
        ("teacher-0", "teacher-1"),
    ]


def test_a_generator_of_a_server_needs_no_gpu() -> None:
    server = ServerConfig(urls=["http://127.0.0.1:8000"])
    behind = Config(generator=GeneratorConfig(engine="vllm_server", server=server))
    scripted = Config(generator=GeneratorConfig(engine="scripted"))
    assert texts(behind)[2] == texts(scripted)[2] == "generators 1 × (CPU 1)"


def test_a_learner_larger_than_a_node_is_spread_over_several() -> None:
    (_, learner, _) = run_needs(Config(learner=LearnerConfig(processes=16)), [BIG, BIG], True)
    assert str(learner) == "learner 2 × (CPU 8, GPU 8)"
    assert (learner.processes, learner.strategy) == (("learner", "learner"), "STRICT_SPREAD")
