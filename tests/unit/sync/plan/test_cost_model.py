from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.memory import generator_memory, learner_memory, learner_pool, sent_cost
from asyncrl.launch.sync_plan import _broadcast_rows, print_plan
from asyncrl.sync.layout.predicted_sharding import Heads
from asyncrl.sync.plan.cost_model import (
    ModelCost,
    PoolShape,
    Speeds,
    forecast,
    parse_generators,
    parse_learner,
)

MB = 10**6
DENSE = ModelCost(
    {
        "model.layers.0.mlp.up_proj.weight": ((4000, 1000), "bfloat16"),
        "model.layers.0.mlp.down_proj.weight": ((1000, 4000), "bfloat16"),
        "model.norm.weight": ((1000,), "bfloat16"),
    },
    Heads(0, 0, 1),
)
SPEEDS = Speeds(network=100 * MB, local=1000 * MB, hop_s=0.0)


def test_words() -> None:
    assert parse_learner("tp 2 fsdp 64  ep 16") == PoolShape(fsdp=64, tp=2, ep=16)
    assert parse_generators("64 tp 8 ep 4 host 4") == PoolShape(count=64, tp=8, ep=4, host=4)
    assert parse_generators("3") == PoolShape(count=3)


@pytest.mark.parametrize("words", ["8 dp", "fsdp x", "dp 4", "fsdp 0", "fsdp 4 ep 3", "fsdp 4, tp 2"])
def test_words_that_mean_nothing_are_quoted(words: str) -> None:
    with pytest.raises(ValueError, match=f"'{words}'"):
        parse_learner(words)


@pytest.mark.parametrize("words", ["", "tp 8", "0 tp 8", "4 fsdp 2", "4 tp 8 ep 3"])
def test_generators_are_counted_first(words: str) -> None:
    with pytest.raises(ValueError, match=f"'{words}'"):
        parse_generators(words)


def test_one_generator_by_hand() -> None:
    made = forecast(DENSE, PoolShape(fsdp=4), PoolShape(tp=2), 1 * MB, SPEEDS)
    assert made.bytes == 16 * MB + 2000
    assert (made.held.least, made.held.most) == (4 * MB + 500, 4 * MB + 500)
    assert made.received.most == made.received.least == 8 * MB + 2000, "the norm goes to both"
    assert made.sent.mean == pytest.approx(4 * MB + 1000)
    # Rows of up are cut alike at both ends: each sender has them for one rank; of down and the norm for both.
    assert made.streams == 8
    assert made.first_s == made.last_s == pytest.approx((8 * MB + 2000) / (100 * MB))


def test_replicas_of_the_learner_share_and_many_generators_relay() -> None:
    made = forecast(DENSE, PoolShape(replicate=2, fsdp=2), PoolShape(count=8, tp=1), 100_000, SPEEDS)
    assert made.learner_ranks == 4
    assert made.sent.unevenness < 1.05
    assert made.hops > 1
    assert made.direct < 8
    assert 0.16 <= made.first_s <= made.last_s < 8 * 0.16 / 4 + 0.16


def test_each_pool_of_generators_has_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 4,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8}'
    )
    small = "placement.generators.small={count: 3, vllm: {tensor_parallel: 2, kv_cache_mb: 10}}"
    both = config("generator.engine=vllm", small)
    print_plan(both, str(tmp_path), None, None, device_gb=80.0)
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("pool generator, as if it were alone\n")
    assert second.startswith("pool placement.generators.small, as if it were alone\n")
    assert re.search(r"generators +1 of 1 ranks", first)
    assert re.search(r"generators +3 of 2 ranks", second)
    assert "kv_cache_mb" not in first
    assert "(placement.generators.small.vllm.kv_cache_mb)" in second
    print_plan(both, str(tmp_path), None, "6 tp 2", device_gb=80.0)
    assert re.search(r"^model(.|\n)*generators +6 of 2 ranks", capsys.readouterr().out)


def test_the_table_of_a_mixture_with_its_experts_dealt_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 4,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 8}'
    )
    print_plan(config(), str(tmp_path), "fsdp 4 ep 4", "6 tp 4 ep 2", device_gb=80.0)
    said = capsys.readouterr().out
    assert "of 80 GB, without activations" in said
    assert "71.6 GB: the rest of generator.vllm.gpu_memory_share" in said
    assert "69 parameters" in said
    assert "4 ranks, each holds" in said
    assert "6 of 4 ranks" in said
    assert "streams into a generator" in said
    assert "does not fit" not in said
    assert "no KV cache" not in said
    print_plan(config(), str(tmp_path), "fsdp 4 ep 4", "6 tp 4 ep 2", device_gb=0.01)
    said = capsys.readouterr().out
    assert said.count(" of 10 MB, without activations: does not fit") == 2
    assert "0 B: generator.vllm.gpu_memory_share leaves no KV cache" in said
    own = config("generator.engine=vllm", "sync.backend=vllm", "sync.verify=false")
    print_plan(own, str(tmp_path), "fsdp 4 ep 4", "6 tp 4 ep 2", device_gb=80.0)
    assert "streams into a generator" not in capsys.readouterr().out
    lora = config(
        "model.lora.rank=2", "model.lora.targets=[q_proj]"
    )  # A [2, 16] and B [16, 2], in two layers
    print_plan(lora, str(tmp_path), "fsdp 4 ep 4", "6 tp 4 ep 2", device_gb=80.0)
    said = capsys.readouterr().out
    assert "4 parameters, 512 B in float32" in said
    assert re.search(r"a generator rank takes +512 B\n", said)
    for learner, generators in (("fsdp 3 ep 3", None), ("up 3", None), (None, "two")):
        with pytest.raises(ConfigError, match="--learner or --generators"):
            print_plan(config(), str(tmp_path), learner, generators)


def test_a_whole_copy_and_pauses_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bias of 4 MB over links of 1 MB/s: it comes to rank 0, and from there to one engine after the other."""
    ours = config(
        "generator.engine=vllm", "sync.backend=vllm", "sync.verify=false", "sync.network_gb_s=0.001"
    )
    made = forecast(
        ModelCost({"bias": ((1000, 1000), "float32")}, Heads(0, 0, 1)),
        PoolShape(fsdp=2),
        PoolShape(count=3, tp=2),
        1 << 20,
        SPEEDS,
    )
    assert dict(_broadcast_rows(made, ours.sync.network_gb_s)) == {
        "a generator rank takes": "4 MB, all of the model",
        "whole copy": "4 MB in the memory of learner rank 0's host",
        "predicted time": "8.00 s the first, 16.00 s the last",
        "  a pause": "4.00 s, at 0.001 GB/s a rank (sync.network_gb_s)",
    }


def test_quantized_projections_by_hand() -> None:
    """Over two ranks, rows of q are cut and their scales with them; columns of down are cut, and each rank has its
    scales."""
    q, down = (f"model.layers.0.{name}_proj.weight" for name in ("self_attn.q", "mlp.down"))
    model = ModelCost({q: ((40, 10), "bfloat16"), down: ((10, 40), "bfloat16")}, Heads(0, 0, 1))
    ours = config("generator.quantization=int8", "generator.engine=vllm")
    sent = sent_cost(ours, model)
    assert sent.shapes[q] == ((40, 10), "int8")
    assert sent.shapes[down + "_scale"] == ((10, 1), "float32")
    made = forecast(sent, PoolShape(), PoolShape(tp=2), 1 * MB, SPEEDS)
    assert made.bytes == 400 + 4 * 40 + 400 + 4 * 10
    assert made.received.least == made.received.most == 200 + 4 * 20 + 200 + 4 * 10
    (state,) = (part for part in learner_memory(ours, model, PoolShape(), 1) if "Adam" in part.name)
    assert state.bytes == 16 * 800, "of what is trained, whatever is sent"
    parts = generator_memory(ours, model, PoolShape(tp=2), 1, None)
    assert next(part.bytes for part in parts if part.name == "weights") == 400 + (20 + 10) * 4


def test_the_learners_ranks_are_those_of_its_axes() -> None:
    axes = [f"learner.parallel.{axis}" for axis in ("replicate=2", "tensor=4", "expert=2")]
    spread = config("learner.processes=32", *axes)
    assert learner_pool(spread) == PoolShape(replicate=2, fsdp=4, tp=4, ep=2)
    assert learner_pool(config()) == PoolShape(fsdp=1)


def config(*overrides: str) -> Config:
    return load_config("configs/recipes/demo.yaml", overrides)
