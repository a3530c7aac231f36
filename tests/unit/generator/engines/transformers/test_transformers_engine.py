"""The slot batch against plain forwards of the same model."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from waiting import eventually

from asyncrl.counter_rng import stream_key, uniform_at
from asyncrl.errors import ConfigError, RunClosedError, WeightSyncError
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.rows import sample_tokens
from asyncrl.generator.engines.transformers.slots import SlotBatch
from asyncrl.generator.engines.transformers.transformers_engine import TransformersEngine, check_attention
from asyncrl.types import Sampling, Turn

SMALL = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "llama": LlamaConfig(**SMALL),
    "gpt2": GPT2Config(
        vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=23
    ),
}
END = 23


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(config: PretrainedConfig, attention: str = ATTENTION, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = copy.deepcopy(config)  # the model keeps it, and writes its attention into it
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():  # at their initial scale the logits say nothing
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def batch(model: PreTrainedModel, *, slots: int = 12, fixed_shape: bool = False, end: int = END) -> SlotBatch:
    return SlotBatch(model, slots=slots, max_length=64, end_ids=[end], version=0, fixed_shape=fixed_shape)


def requests(count: int, n: int = 3, max_tokens: int = 20, temperature: float = 1.0) -> list[SampleRequest]:
    """Prompts of 1 to 7 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, END, 1 + i % 7) for i in range(count)]
    sampling = Sampling(temperature, max_tokens, seed=5)
    return [SampleRequest(f"r{i}", prompt, sampling, i, n) for i, prompt in enumerate(prompts)]


def run(slots: SlotBatch, asked: list[SampleRequest], every: int = 0) -> dict[str, list[Turn]]:
    """Add all requests, a new one every so many steps (0: at once), and step until idle."""
    finished: dict[str, list[Turn]] = {}
    waiting = list(asked)
    steps = 0
    while waiting or not slots.idle:
        while waiting and (slots.idle or steps >= every * (len(asked) - len(waiting))):
            slots.add(waiting.pop(0))
        finished.update(slots.step())
        steps += 1
    return finished


@torch.no_grad()
def forward_logp(model: PreTrainedModel, turn: Turn, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the output tokens by one plain forward of the whole sample."""
    ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.output_ids]))
    logits = model(input_ids=ids[None]).logits[0] / temperature
    logp = logits.log_softmax(-1)[len(turn.prompt_ids) - 1 : -1]
    return logp.gather(1, torch.from_numpy(turn.output_ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("fixed_shape", [False, True], ids=["compact", "fixed shape"])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_those_of_a_plain_forward(name: str, fixed_shape: bool) -> None:
    """Requests of all lengths join and leave while others run; rows move; some end early."""
    reference = build(CONFIGS[name], "sdpa")
    finished = run(batch(build(CONFIGS[name]), fixed_shape=fixed_shape), requests(10), every=3)
    turns = [turn for one in finished.values() for turn in one]
    assert len(turns) == 30
    assert {turn.finish for turn in turns} == {"stop", "length"}
    for turn in turns:
        assert (turn.output_ids[-1] == END) == (turn.finish == "stop")
        assert END not in turn.output_ids[:-1]
        np.testing.assert_allclose(turn.logprobs, forward_logp(reference, turn), atol=2e-5)


@pytest.mark.parametrize(
    ("fixed_shape", "steps", "rows"),
    # The prompt of one token runs by itself and makes the first of 4 tokens; at fixed shape it is a step of all slots.
    [(False, 3, 3), (True, 4, 12)],
    ids=["compact", "fixed shape"],
)
def test_steps_are_timed_by_the_rows_in_them(fixed_shape: bool, steps: int, rows: int) -> None:
    slots = batch(build(CONFIGS["qwen2"]), fixed_shape=fixed_shape, end=10_000)
    run(slots, requests(1, max_tokens=4))
    times = slots.decode_times
    assert (times.steps, times.n, times.nn) == (steps, steps * rows, steps * rows**2)
    assert times.s > 0
    assert times.ns == pytest.approx(rows * times.s)


def test_prefills_are_timed_by_the_rows_that_join() -> None:
    """Of two requests of three samples, four slots take the first and one sample of the second; two join later. With a
    clock that counts its calls, each prefill and each decode step takes 1."""
    slots = batch(build(CONFIGS["qwen2"]), slots=4, end=10_000)
    slots._clock = itertools.count().__next__
    run(slots, requests(2, max_tokens=4))
    assert slots.prefill_times == (2, 4 + 2, 4**2 + 2**2, 2, 4 + 2)
    assert slots.decode_times.s == slots.decode_times.steps == 6


def test_samples_that_copy_their_prompt_join_without_a_prefill() -> None:
    """With three slots, a long request that has two samples leaves one slot; its second sample is the only one to join
    while a sibling is under way."""
    slots = batch(build(CONFIGS["qwen2"]), slots=2, end=10_000)
    short, long = (
        requests(2, n=1, max_tokens=3)[1],
        replace(requests(1, n=2, max_tokens=12)[0], request_id="long"),
    )
    run(slots, [replace(short, ordinal=0), replace(long, ordinal=1)])
    assert (slots.prefill_times.steps, slots.prefill_times.n) == (1, 2)


def test_greedy_is_the_arg_max_of_a_plain_forward() -> None:
    reference = build(CONFIGS["qwen2"], "sdpa")
    finished = run(batch(build(CONFIGS["qwen2"])), requests(6, n=2, temperature=0.0))
    for first, second in finished.values():
        assert first.output_ids.tolist() == second.output_ids.tolist()
        ids = torch.from_numpy(np.concatenate([first.prompt_ids, first.output_ids]))
        with torch.no_grad():
            best = reference(input_ids=ids[None]).logits[0, len(first.prompt_ids) - 1 : -1].argmax(-1)
        assert first.output_ids.tolist() == best.tolist()
        np.testing.assert_allclose(first.logprobs, forward_logp(reference, first), atol=2e-5)


def test_a_temperature_divides_the_logits() -> None:
    reference = build(CONFIGS["qwen2"], "sdpa")
    for (turn,) in run(batch(build(CONFIGS["qwen2"])), requests(4, n=1, temperature=0.7)).values():
        np.testing.assert_allclose(turn.logprobs, forward_logp(reference, turn, 0.7), atol=2e-5)


def test_at_fixed_shape_a_sample_is_the_same_to_the_last_bit_whatever_else_runs() -> None:
    """Alone, among others, in another order of arrival: log-probs compared bit by bit."""
    model = build(CONFIGS["qwen2"])
    asked = requests(9)
    among = run(batch(model, fixed_shape=True), asked, every=2)
    reversed_order = run(batch(model, fixed_shape=True), asked[::-1], every=5)
    for one in asked:
        alone = run(batch(model, fixed_shape=True), [one])[one.request_id]
        for other in (among[one.request_id], reversed_order[one.request_id]):
            for mine, theirs in zip(alone, other, strict=True):
                assert mine.output_ids.tobytes() == theirs.output_ids.tobytes()
                assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


def test_at_fixed_shape_single_samples_of_one_task_share_the_batch_where_their_places_differ() -> None:
    model = build(CONFIGS["qwen2"])
    (asked,) = requests(1, n=1, max_tokens=2)
    for places, running in (((4, 5, 17), 2), ((4, 5, 6), 3)):  # 17 is row 5 of 12
        slots = batch(model, fixed_shape=True)
        for place in places:
            slots.add(dataclasses.replace(asked, request_id=f"r{place}", place=place))
        slots.step()
        assert (slots.running, slots.waiting) == (running, 3 - running)


def test_the_tokens_of_a_sample_do_not_depend_on_rows_or_neighbours() -> None:
    """Compact mode shares the draws: the same tokens, log-probs within rounding."""
    model = build(CONFIGS["llama"])
    asked = requests(8)
    among = run(batch(model), asked, every=2)
    for one in asked:
        alone = run(batch(model, slots=3), [one])[one.request_id]
        for mine, theirs in zip(alone, among[one.request_id], strict=True):
            assert mine.output_ids.tolist() == theirs.output_ids.tolist()
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=2e-5)


@pytest.mark.parametrize("fixed_shape", [False, True], ids=["compact", "fixed shape"])
def test_a_flip_in_flight_keeps_the_cache_and_marks_every_token(fixed_shape: bool) -> None:
    """With the same weights staged, a flip changes the versions and nothing else."""
    model = build(CONFIGS["qwen2"])
    targets = {name: parameter.data for name, parameter in model.named_parameters()}
    staged = {name: live.clone() for name, live in targets.items()}
    (asked,) = requests(1, max_tokens=30)
    undisturbed = run(batch(model, fixed_shape=fixed_shape, end=-1), [asked])["r0"]
    slots = batch(model, fixed_shape=fixed_shape, end=-1)
    slots.add(asked)
    finished: dict[str, list[Turn]] = {}
    while not finished:
        if slots.tokens_made == 3 * 10:
            slots.flip(staged, targets, version=4)
        finished.update(slots.step())
    for turn, before in zip(finished["r0"], undisturbed, strict=True):
        assert turn.versions.tolist() == [0] * 10 + [4] * 20
        assert turn.output_ids.tolist() == before.output_ids.tolist()
        assert turn.logprobs.tobytes() == before.logprobs.tobytes()


@pytest.mark.parametrize("fixed_shape", [False, True], ids=["compact", "fixed shape"])
def test_recompute_draws_what_a_fresh_prefill_with_the_new_weights_would(fixed_shape: bool) -> None:
    """Each token by hand: plain logits of all before it, the arg max or the sample's own random number."""
    model, other = build(CONFIGS["qwen2"]), build(CONFIGS["qwen2"], "sdpa", seed=9)
    asked = requests(4, max_tokens=24)
    asked[3] = dataclasses.replace(asked[3], sampling=Sampling(0.0, 24))
    undisturbed = run(batch(model, fixed_shape=fixed_shape, end=-1), asked)
    slots = batch(model, fixed_shape=fixed_shape, end=-1)
    for one in asked:
        slots.add(one)
    for _ in range(13):
        slots.step()
    flip_to(other, slots, recompute=True)
    finished = run(slots, [])
    for one in asked:
        for sample, turn in enumerate(finished[one.request_id]):
            by_old = int((turn.versions == 0).sum())
            assert 0 < by_old < 24
            assert turn.versions.tolist() == [0] * by_old + [1] * (24 - by_old)
            before = undisturbed[one.request_id][sample]
            assert turn.output_ids[:by_old].tolist() == before.output_ids[:by_old].tolist()
            assert turn.logprobs[:by_old].tobytes() == before.logprobs[:by_old].tobytes()
            tokens, logprobs = by_hand(other, one, sample, turn)
            assert turn.output_ids[by_old:].tolist() == tokens[by_old:].tolist()
            np.testing.assert_allclose(turn.logprobs[by_old:], logprobs[by_old:], atol=2e-5)


@torch.no_grad()
def by_hand(
    model: PreTrainedModel, asked: SampleRequest, sample: int, turn: Turn
) -> tuple[np.ndarray, np.ndarray]:
    """What the model draws after each piece of this turn, and its log-prob."""
    ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.output_ids]))
    logits_TV = model(input_ids=ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1]
    key, place_T = stream_key(asked.sampling.seed, asked.ordinal, sample), np.arange(len(turn.output_ids))
    return sample_tokens(
        logits_TV, np.full(len(place_T), asked.sampling.temperature), uniform_at(key, place_T)
    )


def flip_to(other: PreTrainedModel, slots: SlotBatch, recompute: bool = False) -> None:
    """Version 1 has the weights of `other`."""
    targets = {name: parameter.data for name, parameter in slots.model.named_parameters()}
    slots.flip({name: p.data for name, p in other.named_parameters()}, targets, 1, recompute)


def test_recompute_takes_no_more_memory_than_a_prefill_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.generator.engines.transformers.slots.PREFILL_TOKENS", 40)
    slots = batch(build(CONFIGS["qwen2"]), end=-1)
    for one in requests(4, max_tokens=40):
        slots.add(one)
        for _ in range(9):
            slots.step()
    plain, padded = slots._forward, list[tuple[int, int]]()

    def counting(token_N: Any, position_N: Any, of: Any, keep: Any) -> torch.Tensor:
        padded.append(tuple(of.index_PT.shape))
        return plain(token_N, position_N, of, keep)

    slots._forward = counting  # type: ignore[method-assign]
    other = build(CONFIGS["qwen2"], "sdpa", seed=9)
    flip_to(other, slots, recompute=True)
    # Three rows each of 37, 29, 21 and 13 tokens: prompts of 1 to 4, and what was made in 36, 27, 18 and 9 steps.
    assert padded == [(1, 37)] * 3 + [(1, 29)] * 3 + [(1, 21)] * 3 + [(3, 13)]


def test_a_prefill_takes_no_more_prompts_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 to 7 tokens, in order; what is left waits for the next step."""
    monkeypatch.setattr("asyncrl.generator.engines.transformers.slots.PREFILL_TOKENS", 10)
    slots = batch(build(CONFIGS["qwen2"]), end=-1)
    for one in requests(7, n=1):
        slots.add(one)
    plain, prefills = slots._forward, list[int]()

    def counting(token_N: Any, position_N: Any, of: Any, keep: Any) -> torch.Tensor:
        prefills.extend([len(token_N)] if keep is not None else [])
        return plain(token_N, position_N, of, keep)

    slots._forward = counting  # type: ignore[method-assign]
    while slots.waiting:
        slots.step()
    assert prefills == [1 + 2 + 3 + 4, 5, 6, 7]


def test_at_fixed_shape_recompute_is_a_fresh_sample_to_the_last_bit() -> None:
    """Greedy, so that a prompt that holds the old tokens is answered by the same ones."""
    model, other = build(CONFIGS["qwen2"]), build(CONFIGS["qwen2"], seed=9)
    (asked,) = requests(1, n=1, max_tokens=20, temperature=0.0)
    slots = batch(model, fixed_shape=True, end=-1)
    slots.add(asked)
    for _ in range(8):
        slots.step()
    flip_to(other, slots, recompute=True)
    (turn,) = run(slots, [])["r0"]
    assert turn.versions.tolist() == [0] * 8 + [1] * 12
    read = np.concatenate([turn.prompt_ids, turn.output_ids[:8]])
    (fresh,) = run(batch(other, fixed_shape=True, end=-1), [dataclasses.replace(asked, prompt_ids=read)])[
        "r0"
    ]
    assert turn.output_ids[8:].tolist() == fresh.output_ids[:12].tolist()
    assert turn.logprobs[8:].tobytes() == fresh.logprobs[:12].tobytes()


def test_at_fixed_shape_an_abort_while_tokens_go_in_again_loses_none() -> None:
    slots = batch(build(CONFIGS["qwen2"]), fixed_shape=True, end=-1)
    (asked,) = requests(1, n=1)
    slots.add(asked)
    for _ in range(8):
        slots.step()
    flip_to(build(CONFIGS["qwen2"], seed=9), slots, recompute=True)
    slots.step()
    aborted = slots.remove("r0")
    assert aborted is not None
    assert (len(aborted[0].output_ids), aborted[0].versions.tolist()) == (8, [0] * 8)


def test_a_sample_whose_prompt_is_half_in_at_a_flip_has_nothing_of_the_old_weights_behind_it() -> None:
    """As there are at fixed shape. All of its tokens are of the new version, and so are the keys of its prompt."""
    other = build(CONFIGS["qwen2"], "sdpa", seed=9)
    slots = batch(build(CONFIGS["qwen2"]), fixed_shape=True, end=-1)
    asked = requests(7)[6]
    slots.add(asked)
    for _ in range(4):
        slots.step()
    flip_to(other, slots)
    for turn in run(slots, [])["r6"]:
        assert (turn.versions == 1).all()
        np.testing.assert_allclose(turn.logprobs, forward_logp(other, turn), atol=2e-5)


def test_after_a_flip_new_samples_follow_the_new_weights_tied_ones_too() -> None:
    model, other = build(CONFIGS["qwen2"]), build(CONFIGS["qwen2"], "sdpa", seed=9)
    targets = {name: parameter.data for name, parameter in model.named_parameters()}
    slots = batch(model)
    assert "lm_head.weight" not in targets
    slots.flip({name: p.data for name, p in other.named_parameters()}, targets, version=1)
    for (turn,) in run(slots, requests(3, n=1)).values():
        assert (turn.versions == 1).all()
        np.testing.assert_allclose(turn.logprobs, forward_logp(other, turn), atol=2e-5)


def test_removing_a_request_leaves_the_others_as_they_were() -> None:
    model = build(CONFIGS["qwen2"])
    asked = requests(4)
    undisturbed = run(batch(model, end=-1), asked)
    slots = batch(model, end=-1)
    for one in asked:
        slots.add(one)
    for _ in range(5):
        slots.step()
    removed = slots.remove("r1")
    assert removed is not None
    # The prefill made one token, and each of the five steps one more.
    assert [turn.output_ids.tolist() for turn in removed] == [
        turn.output_ids[:6].tolist() for turn in undisturbed["r1"]
    ]
    finished = run(slots, [])
    assert sorted(finished) == ["r0", "r2", "r3"]
    for name, turns in finished.items():
        for mine, theirs in zip(turns, undisturbed[name], strict=True):
            assert mine.output_ids.tolist() == theirs.output_ids.tolist()


def test_a_sample_that_fills_the_cache_ends_there() -> None:
    asked = SampleRequest("long", np.zeros(60, np.int64), Sampling(max_tokens=100), 0)
    (turn,) = run(batch(build(CONFIGS["qwen2"]), end=-1), [asked])["long"]
    assert (len(turn.output_ids), turn.finish) == (4, "length")


def test_weights_that_are_not_finite_stop_the_engine_by_name() -> None:
    model = build(CONFIGS["qwen2"])
    slots = batch(model)
    model.model.norm.weight.data.fill_(float("nan"))
    slots.add(requests(1)[0])
    with pytest.raises(WeightSyncError, match="version 0 cannot be sampled from"):
        slots.step()


def test_another_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 of 2 layers without plain attention"):
        check_attention(build(CONFIGS["qwen2"], "sdpa"), max_length=64)


async def test_one_request_id_twice_is_refused() -> None:
    model = build(CONFIGS["qwen2"])
    engine = TransformersEngine(model, slots=4, max_length=64, end_ids=[END], version=0)
    await engine.start()
    (one,) = requests(1)
    first = asyncio.ensure_future(engine.sample(one))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="in flight already"):
        await engine.sample(one)
    assert len(await first) == 3
    await engine.close()


@pytest.mark.parametrize("ended", [ValueError, "close"])
async def test_a_flip_is_settled_however_the_engine_ends(ended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at the flip in an unexpected way, or is closed in the middle of it. A second flip waits behind."""
    model = build(CONFIGS["qwen2"])
    engine = TransformersEngine(model, slots=4, max_length=64, end_ids=[END], version=0)
    staged = {name: tensor.clone() for name, tensor in engine.targets.items()}
    begun, may_end = threading.Event(), threading.Event()

    def flip(*_: Any) -> None:
        begun.set()
        assert may_end.wait(30)
        if ended != "close":
            raise ended("unexpected")

    monkeypatch.setattr(engine.batch, "flip", flip)
    await engine.start()
    flips = [asyncio.ensure_future(engine.flip(staged, version)) for version in (1, 2)]
    await eventually(begun.is_set)
    if ended == "close":
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        may_end.set()
        await closing
    may_end.set()
    async with asyncio.timeout(30):
        errors = await asyncio.gather(*flips, return_exceptions=True)
    assert [type(error) for error in errors] == [RunClosedError if ended == "close" else ended] * 2
    await engine.close()


def test_free_rows_are_filled_sample_by_sample_and_siblings_share_the_prompt() -> None:
    """5 rows, groups of 3: no row stays empty while something waits, and no prompt is run twice."""
    model, prompts_run = build(CONFIGS["qwen2"]), 0
    slots = batch(model, slots=5, end=-1)
    plain = slots._forward

    def counting(token_N: Any, position_N: Any, of: Any, keep: Any) -> torch.Tensor:
        nonlocal prompts_run
        prompts_run += 0 if keep is None else len(keep)
        assert keep is not None or len(token_N) == 5 or not slots.waiting
        return plain(token_N, position_N, of, keep)

    slots._forward = counting  # type: ignore[method-assign]
    asked = [
        dataclasses.replace(one, sampling=Sampling(max_tokens=8 + 4 * i, seed=5))
        for i, one in enumerate(requests(6))
    ]
    for one in asked:
        slots.add(one)
    assert slots.waiting == 18
    finished = run(slots, [])
    assert prompts_run == 6
    reference = build(CONFIGS["qwen2"], "sdpa")
    for one in asked:
        alone = run(batch(model, end=-1), [one])[one.request_id]
        for mine, theirs in zip(finished[one.request_id], alone, strict=True):
            assert mine.output_ids.tolist() == theirs.output_ids.tolist()
            np.testing.assert_allclose(mine.logprobs, forward_logp(reference, mine), atol=2e-5)


def test_a_sample_that_joins_after_a_flip_has_nothing_of_the_old_weights_behind_it() -> None:
    model, other = build(CONFIGS["qwen2"]), build(CONFIGS["qwen2"], "sdpa", seed=9)
    targets = {name: parameter.data for name, parameter in model.named_parameters()}
    slots = batch(model, slots=4, end=-1)
    for one in requests(5)[3:]:
        slots.add(one)
    slots.step()
    assert (slots.running, slots.waiting) == (4, 2)
    slots.flip({name: p.data for name, p in other.named_parameters()}, targets, version=1)
    turns = run(slots, [])["r4"]
    assert [turn.versions[0] for turn in turns] == [0, 1, 1]
    for turn in turns[1:]:
        np.testing.assert_allclose(turn.logprobs, forward_logp(other, turn), atol=2e-5)


def test_a_sample_that_joins_after_a_flip_takes_no_prompt_from_a_sibling_of_before_it() -> None:
    """That sibling still runs, with the keys and values of the old weights."""
    other = build(CONFIGS["qwen2"], "sdpa", seed=9)
    slots = batch(build(CONFIGS["qwen2"]), slots=4, end=-1)
    short, asked = requests(5)[3:]
    slots.add(dataclasses.replace(short, sampling=Sampling(max_tokens=4, seed=5)))
    slots.add(asked)
    slots.step()
    flip_to(other, slots)
    sibling, *joined = run(slots, [])["r4"]
    assert sibling.versions.tolist() == [0] * 2 + [1] * 18
    for turn in joined:
        assert (turn.versions == 1).all()
        np.testing.assert_allclose(turn.logprobs, forward_logp(other, turn), atol=2e-5)


def test_the_oldest_task_is_begun_first_and_an_abort_takes_what_has_not_begun_too() -> None:
    slots = batch(build(CONFIGS["qwen2"]), slots=4, end=-1)
    for one in reversed(requests(4)):
        slots.add(one)
    slots.step()
    assert (slots.running, slots.waiting) == (4, 8)
    removed = slots.remove("r1")
    assert removed is not None
    assert [(len(turn.output_ids), turn.finish) for turn in removed] == [(2, "abort")] + [(0, "abort")] * 2
    assert (slots.running, slots.waiting) == (3, 6)
    waiting = slots.remove("r3")
    assert waiting is not None
    assert [len(turn.output_ids) for turn in waiting] == [0, 0, 0]
    assert sorted(run(slots, [])) == ["r0", "r2"]
