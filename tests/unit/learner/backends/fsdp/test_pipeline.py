"""Pipeline stages on real gloo processes: they train what one process trains, whatever the schedule."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import TINY, random_group, small_config, without_counts
from rank_processes import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import Config, LearnerConfig, ModelConfig, TeacherConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, KlLossConfig, TeacherLossConfig
from asyncrl.config.sections.learner import OptimizerConfig, ParallelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.backends.fsdp.pipeline import turns_of
from asyncrl.learner.backends.fsdp.stages import cut_stage, load_stages
from asyncrl.learner.checks.logprob_check import probe_batch
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.networks import load_network
from asyncrl.learner.parallel.mesh import ModelShape, axis_sizes, layers_of
from asyncrl.learner.parallel.tensor_parallel import local_part
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import version_step
from asyncrl.probes import prompts
from asyncrl.sync.layout.layout import Box, from_wire, to_wire
from asyncrl.system.rank_process import end_rank

pytestmark = pytest.mark.timeout(300)

LAYERS = 5


@dataclass(frozen=True)
class Case:
    """world: processes · kind: of transformers' models"""

    world: int
    parallel: ParallelConfig
    kind: str = "qwen2"
    tied: bool = True
    algorithm: AlgorithmConfig = field(
        default_factory=lambda: AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1))
    )


TAUGHT = AlgorithmConfig(teacher_loss=TeacherLossConfig(coef=0.5, form="topk", top_k=3))
INTERLEAVED = ParallelConfig(pipeline=2, pipeline_schedule="interleaved")
CASES = {
    "1f1b": Case(2, ParallelConfig(pipeline=2)),
    "1f1b_untied": Case(2, ParallelConfig(pipeline=2), tied=False),
    "interleaved": Case(2, INTERLEAVED),
    "interleaved_untied": Case(2, INTERLEAVED, tied=False),
    "critic": Case(2, ParallelConfig(pipeline=2), algorithm=AlgorithmConfig(advantage="gae")),
    "gemma": Case(2, ParallelConfig(pipeline=2), kind="gemma3_text"),
    "experts": Case(2, INTERLEAVED, kind="qwen3_moe", tied=False),
    "sharded": Case(4, ParallelConfig(pipeline=2)),
    "sharded_interleaved": Case(4, INTERLEAVED, tied=False),
    "replicated": Case(4, ParallelConfig(pipeline=2, replicate=2), tied=False),
    "taught": Case(2, INTERLEAVED, algorithm=TAUGHT),
    "deep": Case(4, ParallelConfig(pipeline=4)),
    "context": Case(4, ParallelConfig(pipeline=2, context=2)),
    "spread_experts": Case(
        4,
        ParallelConfig(pipeline=2, expert=2, pipeline_schedule="interleaved"),
        kind="qwen3_moe",
        tied=False,
    ),
    "tensor": Case(4, ParallelConfig(pipeline=2, tensor=2)),
    "tensor_whole": Case(
        4, ParallelConfig(pipeline=2, tensor=2, sequence=False, pipeline_schedule="interleaved"), tied=False
    ),
}


WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")


def model_in(folder: Path, kind: str, tied: bool) -> ModelConfig:
    """A folder with the configuration of a tiny model. One that is there already is left alone: ranks share it."""
    place = folder / f"{kind}_{'tied' if tied else 'untied'}"
    if not (place / "config.json").exists():
        AutoConfig.for_model(
            kind,
            **{**TINY, "num_hidden_layers": LAYERS},
            head_dim=8,
            moe_intermediate_size=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            q_lora_rank=16,
            kv_lora_rank=16,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts=4,
            num_experts_per_tok=2,
            tie_word_embeddings=tied,
        ).save_pretrained(place)
    dtype: Any = "float32" if kind in WITH_EXPERTS else "float64"  # grouped_mm knows no float64
    return ModelConfig(path=str(place), dtype=dtype)


def config_of(folder: Path, case: Case, parallel: ParallelConfig) -> Config:
    # With Adam's usual epsilon, the rounding of gradients near 0 decides on whole steps.
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=1, grad_clip=0.5, eps=1e-3)
    learner = LearnerConfig(micro_batch_tokens=24, optimizer=optimizer, parallel=parallel)
    model = model_in(folder, case.kind, case.tied)
    beside: dict[str, Any] = {"teacher": TeacherConfig(model.path)} if case.algorithm is TAUGHT else {}
    return small_config(folder, model=model, learner=learner, algorithm=case.algorithm, **beside)


def train(backend: FsdpBackend, config: Config, versions: range) -> list[dict[str, float]]:
    """The metrics of versions of three groups each. The second of two data ranks has one of them, in the first claim;
    the claims are of different sizes, and so are their micro-batches."""
    step, rows = version_step(backend, config), []
    for version in versions:
        a, b, c = (random_group(3 * version + i, size=4 + 2 * i, version=version) for i in range(3))
        claims = [[[a], [c]], [[b], []]] if backend.data_world == 2 else [[[a, b], [c]]]
        for groups in claims[backend.data_rank]:
            step.add(groups, version)
        rows.append(without_counts(step.step(version).values))
    return rows


def answers(backend: FsdpBackend) -> dict[str, Any]:
    """What the policy says of a batch of a length that no other has."""
    batch = MicroBatch.of([random_group(77, size=5)])
    return {
        "predicted": backend.policy.predict(batch).tolist(),
        "following": backend.policy.predict_next(probe_batch(prompts(33, 32))).tolist(),
    }


def table(backend: FsdpBackend) -> list[list[float]] | None:
    """This rank's part of the token table, if it has some: of a tied one the last stage has it too."""
    masters = backend.policy.state().masters
    held = masters.get("model.embed_tokens.weight")
    return None if held is None else local_part(held).detach().tolist()


def rank_main(folder: Path) -> None:
    """Every case of this world, one after the other: two versions, save, one more version, export."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    says: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.world == world:
            config = config_of(folder, case, case.parallel)
            backend = FsdpBackend(config, requirements.models(config))
            rows = train(backend, config, range(2))
            backend.save(folder / f"{name}_saved")
            rows += train(backend, config, range(2, 3))
            backend.export_hf(folder / f"{name}_exported")
            says[name] = {"rows": rows, "layout": to_wire(backend.layout()), **answers(backend)}
            says[name]["table"] = table(backend)
            if name == "1f1b":
                says["loaded"] = loaded(folder, rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(says))
    end_rank()


def loaded(folder: Path, rank: int) -> list[dict[str, float]]:
    """Version 2 once more, from the checkpoint and with the other schedule."""
    config = config_of(folder, CASES["interleaved"], INTERLEAVED)
    backend = FsdpBackend(config, requirements.models(config))
    backend.load(folder / "1f1b_saved")
    return train(backend, config, range(2, 3))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder in which the cases of a world have run, all of them together and once."""

    @cache
    def folder_of(world: int) -> Path:
        folder = tmp_path_factory.mktemp("pipeline")
        for case in CASES.values():
            model_in(folder, case.kind, case.tied)
        run_ranks("test_pipeline:rank_main", folder, world, stuck_s=200)
        return folder

    return lambda name: folder_of(CASES[name].world)


def of_ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{r}.json").read_text())[name] for r in range(CASES[name].world)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stages_train_what_one_process_does(ran: Callable[[str], Path], name: str) -> None:
    """Three versions: what a later one measures depends on what the earlier ones did to every weight."""
    folder = ran(name)
    config = config_of(folder, CASES[name], ParallelConfig())
    alone = FsdpBackend(config, requirements.models(config))
    rows, here = train(alone, config, range(3)), answers(alone)
    for rank in of_ranks(folder, name):
        for theirs, mine in zip(rank["rows"], rows, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6)
            assert theirs["train/grad_norm"] == pytest.approx(mine["train/grad_norm"], rel=1e-5)
        for key, values in here.items():
            torch.testing.assert_close(
                torch.tensor(rank[key]), torch.tensor(values), atol=2e-5, rtol=1e-5, msg=key
            )
    exported = AutoModelForCausalLM.from_pretrained(folder / f"{name}_exported")
    weights = alone.policy.parameters()
    assert {n for n, _ in exported.named_parameters()} == weights.keys()
    for n, tensor in exported.named_parameters():
        torch.testing.assert_close(
            tensor.detach(), weights[n], atol=1e-6 if tensor.dtype == torch.float64 else 1e-5, rtol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_stages_goes_on_without_them(ran: Callable[[str], Path], name: str) -> None:
    folder = ran(name)
    config = config_of(folder, CASES[name], ParallelConfig())
    alone = FsdpBackend(config, requirements.models(config))
    alone.load(folder / f"{name}_saved")
    (row,) = train(alone, config, range(2, 3))
    assert row["train/grad_norm"] == pytest.approx(
        of_ranks(folder, name)[0]["rows"][2]["train/grad_norm"], rel=1e-4
    )


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_schedule(ran: Callable[[str], Path]) -> None:
    folder = ran("1f1b")
    through = of_ranks(folder, "1f1b")[0]["rows"][2]
    for rank in range(2):
        (row,) = json.loads((folder / f"rank{rank}.json").read_text())["loaded"]
        assert row == pytest.approx(through, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tied])
def test_both_copies_of_a_tied_table_are_the_same_bits(ran: Callable[[str], Path], name: str) -> None:
    tables = [rank["table"] for rank in of_ranks(ran(name), name)]
    stage = CASES[name].world // CASES[name].parallel.pipeline
    assert tables[:stage] == tables[-stage:]
    assert all(held is None for held in tables[stage:-stage])


def has_copies(parallel: ParallelConfig) -> bool:
    return parallel.replicate > 1 or parallel.tensor > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_ranks_boxes_tile_every_parameter(ran: Callable[[str], Path], name: str) -> None:
    folder = ran(name)
    layouts = [from_wire(rank["layout"]) for rank in of_ranks(folder, name)]
    for param, whole in FsdpBackend(config_of(folder, CASES[name], ParallelConfig())).layout().items():
        held = [layout[param] for layout in layouts if param in layout]
        assert {(each.shape, each.dtype) for each in held} == {(whole.shape, whole.dtype)}
        every = [box for each in held for box in each.boxes]
        boxes = sorted(set(every))
        assert len(every) == len(boxes) or has_copies(CASES[name].parallel)
        assert sum(box.elements for box in boxes) == Box.whole(whole.shape).elements
        assert all(a.intersection(b) is None for i, a in enumerate(boxes) for b in boxes[:i])


def test_layers_are_spread_evenly_and_in_order() -> None:
    assert [list(layers_of(stage, 4, 7)) for stage in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]
    for stages in range(1, 8):
        assert [i for stage in range(stages) for i in layers_of(stage, stages, 7)] == list(range(7))


def test_schedules_have_a_turn_for_every_rank_and_whole_rounds() -> None:
    assert [turns_of(n, 2, "1f1b") for n in (1, 2, 3)] == [2, 2, 3]
    assert [turns_of(n, 2, "interleaved") for n in (1, 2, 3)] == [2, 2, 4]


def test_a_stage_keeps_its_layers_under_their_names(tmp_path: Path) -> None:
    case = CASES["interleaved"]
    config = config_of(tmp_path, case, case.parallel)
    first, last = (load_stages("policy", config, rank) for rank in range(2))
    kept = [
        {int(n.split(".")[2]) for n in s.named_parameters_here() if ".layers." in n} for s in (first, last)
    ]
    assert kept == [{0, 1, 3}, {2, 4}]
    assert "model.embed_tokens.weight" in first.named_parameters_here()
    assert "model.embed_tokens.weight" in last.named_parameters_here()  # its head, which is tied to it
    whole = load_network("policy", config)
    for stages in (first, last):
        for name, parameter in stages.named_parameters_here().items():
            assert torch.equal(parameter, whole.get_parameter(f"causal_lm.{name}"))


KINDS = ("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_hands_its_states_to_the_next(tmp_path: Path, kind: str) -> None:
    case = Case(1, ParallelConfig(pipeline=3), kind=kind)
    config = config_of(tmp_path, case, case.parallel)
    batch = MicroBatch.of([random_group(0)])
    state = torch.empty(0)
    for index in range(3):
        stage = cut_stage(load_network("policy", config), index, 3)
        documents = Documents(batch.lengths_R, mask_N=batch.loss_mask_N)
        stage.expect([(batch, documents)], batch.tokens + 5)
        if not stage.last:
            state = stage(state).detach()
            assert state.shape == (batch.tokens + 5, 32)
            assert not state[batch.tokens :].any()
            state[batch.tokens :] = torch.nan  # nobody looks at it
        else:
            (logp_N, _) = stage(state)
    alone = FsdpBackend(config_of(tmp_path, case, ParallelConfig()))
    torch.testing.assert_close(logp_N.float(), alone.policy.predict(batch))


def test_more_stages_than_layers_are_refused() -> None:
    shape = ModelShape(heads=4, key_heads=4, layers=3)
    with pytest.raises(ConfigError, match=r"learner.parallel.pipeline.*4 stages of the model's 3 layers"):
        axis_sizes(INTERLEAVED, 2, shape)


def test_a_model_of_other_parts_is_refused_by_name(tmp_path: Path) -> None:
    gpt2 = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=33)
    gpt2.save_pretrained(tmp_path / "gpt2")
    config = small_config(
        tmp_path,
        model=ModelConfig(path=str(tmp_path / "gpt2")),
        learner=LearnerConfig(parallel=ParallelConfig(pipeline=2)),
    )
    with pytest.raises(ConfigError, match="GPT2Model cannot be cut into pipeline stages"):
        load_stages("policy", config, 0)
