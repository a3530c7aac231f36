"""Samples that are drafted ahead, against the same samples made token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import save_family
from transformers import PreTrainedModel

from asyncrl.config.load import load_config
from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.engine import Pieces, SampleRequest
from asyncrl.generator.engines.stop_texts import StopTexts
from asyncrl.generator.engines.transformers import drafts
from asyncrl.generator.engines.transformers.drafts import AcceptanceRates, Drafter
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.rows import BatchedRequest, BatchRows
from asyncrl.generator.engines.transformers.slots import SlotBatch
from asyncrl.generator.engines.transformers.transformers_engine import _recorder, load_transformers_engine
from asyncrl.models.loading import load_causal_lm
from asyncrl.types import UNROUTED, Sampling, Turn

END = 0
TASKS = ("tasks.source=asyncrl.tasks.addition:tasks", "reward.function=asyncrl.tasks.addition:reward")


def batch(model: PreTrainedModel, drafter: Drafter | None = None, **more: Any) -> SlotBatch:
    more = {"slots": 6, "max_length": 48, "end_ids": [END], **more}
    return SlotBatch(model, version=0, drafter=drafter, **more)


def asked(ordinal: int, n: int = 3, prompt: Sequence[int] = (3, 1, 4), **sampling: Any) -> SampleRequest:
    how = Sampling(**{"max_tokens": 30, "seed": 5, **sampling})
    return SampleRequest(f"r{ordinal}", np.array(prompt, np.int64), how, ordinal, n)


def run(
    slots: SlotBatch, requests: Sequence[SampleRequest], steps: int | None = None
) -> dict[str, list[Turn]]:
    for request in requests:
        slots.add(request)
    finished: dict[str, list[Turn]] = {}
    while not slots.idle and steps != 0:
        finished.update(slots.step())
        steps = None if steps is None else steps - 1
    return finished


def assert_same(turns: Sequence[Turn], others: Sequence[Turn]) -> None:
    for turn, other in zip(turns, others, strict=True):
        assert (turn.output_ids.tolist(), turn.finish) == (other.output_ids.tolist(), other.finish)
        np.testing.assert_allclose(turn.logprobs, other.logprobs, atol=2e-4)


def remember(drafter: Drafter, turns: Sequence[Turn]) -> None:
    """As if these samples had been made here, for the task of their prompt."""
    for turn in turns:
        request = SampleRequest("before", turn.prompt_ids, Sampling(), 10**6 + len(turn.prompt_ids))
        drafter.end(BatchedRequest(request), 0, np.concatenate([turn.prompt_ids, turn.output_ids]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return loaded("qwen2", tmp_path_factory.mktemp("model"))


def loaded(family: str, folder: Path) -> PreTrainedModel:
    save_family(family, folder)
    return load_causal_lm(ModelConfig(path=str(folder)), 0, ATTENTION)


# ---- the same samples


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}], ids=str)
def test_samples_are_those_without_drafts(model: PreTrainedModel, sampling: dict[str, Any]) -> None:
    requests = [asked(ordinal, prompt=[3, 1, 4 + ordinal // 2], **sampling) for ordinal in range(6)]
    drafter = Drafter(8, 32)
    plain, drafted = run(batch(model), requests), run(batch(model, drafter), requests)
    for name, turns in plain.items():
        assert_same(drafted[name], turns)
    assert drafter.drafted > 20


def test_a_sample_that_was_made_before_takes_few_steps(model: PreTrainedModel) -> None:
    """Nearly all its drafts are what the policy draws."""
    plain, drafter = batch(model, end_ids=()), Drafter(9, 32)
    (turns,) = run(plain, [asked(0, n=1)]).values()
    remember(drafter, turns)
    slots = batch(model, drafter, end_ids=())
    run(slots, [asked(0, n=1)], steps=8)
    assert slots.idle
    assert drafter.accepted >= 30 - 8 - 1
    assert drafter.drafted <= 30


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "deepseek-v3"])
def test_every_kind_of_attention_sees_what_it_does_without_drafts(name: str, tmp_path: Path) -> None:
    """Windows, caps, sinks and latent attention; right drafts for some samples and wrong ones for others."""
    model, drafter = loaded(name, tmp_path), Drafter(5, 32)
    requests = [asked(0), asked(1, prompt=(2, 7)), asked(2, n=2, prompt=(2, 7))]
    plain = run(batch(model, end_ids=()), requests)
    remember(drafter, plain["r0"] + plain["r1"][:1])
    drafted = run(batch(model, drafter, end_ids=()), requests)
    for turns, others in zip(plain.values(), (drafted[name] for name in plain), strict=True):
        assert_same(turns, others)
    assert 20 < drafter.accepted < drafter.drafted


def test_layers_with_experts_record_those_of_the_tokens_that_stay(tmp_path: Path) -> None:
    model, drafter = loaded("qwen3-moe", tmp_path), Drafter(5, 32)
    requests = [asked(0), asked(1)]
    plain = run(batch(model, recorder=_recorder(model), end_ids=()), requests)
    remember(drafter, plain["r0"][:2])
    drafted = run(batch(model, drafter, recorder=_recorder(model), end_ids=()), requests)
    for name, turns in plain.items():
        assert_same(drafted[name], turns)
        for turn, other in zip(turns, drafted[name], strict=True):
            assert turn.experts is not None
            assert other.experts is not None
            assert turn.experts.tolist() == other.experts.tolist()
    assert 10 < drafter.accepted < drafter.drafted


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_come_between_two_steps_with_drafts(model: PreTrainedModel, recompute: bool) -> None:
    """The same weights again: a flip changes the versions from its token on, and nothing else."""
    (plain,) = run(batch(model, end_ids=()), [asked(0)]).values()
    drafter = Drafter(3, 32)
    remember(drafter, plain)
    slots = batch(model, drafter, end_ids=())
    run(slots, [asked(0)], steps=4)
    live = {name: parameter.data for name, parameter in model.named_parameters()}
    made = slots.tokens_made
    slots.flip({name: tensor.clone() for name, tensor in live.items()}, live, 1, recompute)
    (turns,) = run(slots, []).values()
    assert_same(turns, plain)
    by_old = [int((turn.versions == 0).sum()) for turn in turns]
    assert sum(by_old) == made > 3 * 4
    for turn, old in zip(turns, by_old, strict=True):
        assert turn.versions.tolist() == [0] * old + [1] * (30 - old)


# ---- ends of samples among their drafts


def remembered_run(
    model: PreTrainedModel, request: SampleRequest, **more: Any
) -> tuple[list[Turn], list[Turn], Drafter]:
    """The turns of a request token by token, and with drafts that are right."""
    whole = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, max_tokens=40), stop=None, pieces=None
    )
    drafter = Drafter(12, 32)
    (turns,) = run(batch(model, end_ids=()), [whole]).values()
    remember(drafter, turns)
    (plain,) = run(batch(model, **more), [request]).values()
    (drafted,) = run(batch(model, drafter, **more), [request]).values()
    return plain, drafted, drafter


def test_an_end_token_among_drafts_ends_the_sample(model: PreTrainedModel) -> None:
    (turn,) = run(batch(model, end_ids=()), [asked(0, n=1)])["r0"]
    at = 11
    end = int(turn.output_ids[at])
    first = turn.output_ids.tolist().index(end)
    plain, drafted, drafter = remembered_run(model, asked(0, n=1), end_ids=[end])
    assert_same(drafted, plain)
    assert (len(drafted[0].output_ids), drafted[0].finish) == (first + 1, "stop")
    assert drafter.accepted > 0


def test_the_last_token_of_a_sample_is_never_drafted_beyond(model: PreTrainedModel) -> None:
    for longest in range(1, 8):
        plain, drafted, _ = remembered_run(model, asked(0, n=2, max_tokens=longest), end_ids=())
        assert_same(drafted, plain)
    plain, drafted, _ = remembered_run(model, asked(0, n=2, max_tokens=100), end_ids=(), max_length=20)
    assert_same(drafted, plain)
    assert [len(turn.output_ids) for turn in drafted] == [17, 17]


def test_a_stop_text_among_drafts_ends_the_sample(model: PreTrainedModel) -> None:
    (turn,) = run(batch(model, end_ids=()), [asked(0, n=1)])["r0"]
    text = "".join(map(chr, 1000 + turn.output_ids[8:10]))
    stop = StopTexts((text,), lambda ids: "".join(map(chr, 1000 + ids)))
    plain, drafted, _ = remembered_run(model, dataclasses.replace(asked(0, n=1), stop=stop), end_ids=())
    assert_same(drafted, plain)
    assert (len(drafted[0].output_ids), drafted[0].finish) == (10, "stop")


def test_drafts_end_with_an_end_token_and_those_behind_it_are_not_counted(model: PreTrainedModel) -> None:
    (turn,) = run(batch(model, end_ids=()), [asked(0, n=1)])["r0"]
    end = int(turn.output_ids[11])
    _, (drafted,), drafter = remembered_run(model, asked(0, n=1), end_ids=[end])
    assert 0 < drafter.accepted < len(drafted.output_ids)
    rows, drafter = rows_of([asked(0, n=1, prompt=[7, END, 8, 7])]), Drafter(4, 32)
    assert drafter.draft(rows, np.array([END])).tolist() == [1]


@pytest.mark.parametrize("drafted", [False, True])
def test_pieces_have_the_experts_of_all_their_tokens_but_the_last(drafted: bool, tmp_path: Path) -> None:
    model, drafter = loaded("qwen3-moe", tmp_path), Drafter(5, 32)
    (turns,) = run(batch(model, end_ids=()), [asked(0)]).values()
    remember(drafter, turns)
    slots = batch(model, drafter if drafted else None, recorder=_recorder(model), end_ids=())
    slots.add(dataclasses.replace(asked(0), pieces=Pieces(4, lambda i, turn: None)))
    pieces: list[Turn] = []
    while not slots.idle:
        slots.step()
        pieces += [turn for _, _, turn in slots.take_pieces()]
    assert len(pieces) >= 3 * 7
    for turn in pieces:
        assert turn.experts is not None
        assert (turn.experts == UNROUTED).any(1).tolist() == [False] * (len(turn.experts) - 1) + [True]


def test_pieces_come_at_the_same_tokens(model: PreTrainedModel) -> None:
    request = asked(0, n=2)
    cut: list[tuple[int, int]] = []
    pieces = Pieces(4, lambda i, turn: None)
    (turns,) = run(batch(model, end_ids=()), [request]).values()
    drafter = Drafter(12, 32)
    remember(drafter, turns)
    slots = batch(model, drafter, end_ids=())
    slots.add(dataclasses.replace(request, pieces=pieces))
    while not slots.idle:
        slots.step()
        pieces_now = slots.take_pieces()
        cut += [(sample, len(turn.output_ids)) for _, sample, turn in pieces_now if turn.finish == "abort"]
    assert sorted(cut) == [(sample, length) for sample in range(2) for length in range(4, 30, 4)]


def test_an_aborted_sample_has_what_was_drawn_and_no_draft(model: PreTrainedModel) -> None:
    (plain,) = run(batch(model, end_ids=()), [asked(0)]).values()
    drafter = Drafter(3, 32)
    remember(drafter, plain)
    slots = batch(model, drafter, end_ids=())
    run(slots, [asked(0), asked(1)], steps=4)
    turns = slots.remove("r0")
    assert turns is not None
    for turn, other in zip(turns, plain, strict=True):
        assert 4 < len(turn.output_ids) < 30
        assert turn.output_ids.tolist() == other.output_ids[: len(turn.output_ids)].tolist()
    assert run(slots, [])["r1"][0].finish == "length"


# ---- what is drafted


def drafted(drafter: Drafter, rows: BatchRows) -> np.ndarray:
    return drafter.draft(rows, np.array([END]))


def rows_of(requests: Sequence[SampleRequest]) -> BatchRows:
    rows = BatchRows(8, 48)
    for request in requests:
        at = np.arange(rows.used, rows.used + request.n)
        rows.assign(BatchedRequest(request), at, cached=len(request.prompt_ids) - 1)
    return rows


def test_with_more_rows_than_the_ridge_nothing_is_drafted() -> None:
    drafter = Drafter(4, ridge_tokens=4)
    for share in [0.3, 0.5] * 100:
        drafter._rates.observe(share, accepted=True)
    drafts = [
        drafted(drafter, rows_of([asked(used, n=used, prompt=[7, 8, 7, 8])])).sum() for used in range(1, 6)
    ]
    assert all(drafts[:4])
    assert drafts[4] == 0


def test_a_draft_must_make_the_steps_tokens_cheaper() -> None:
    """By hand, one row. Behind an 8 came 7 once of once, behind a 7 came 8 twice of twice: drafts have shares 1/3, 1/2,
    1/3, … and are accepted with 1/3, 1/6, 1/18, 1/36. F = 4: 1/3 (4 + 1) > 1 and not 1/6 (4 + 2) > 4/3. F = 30: so on
    up to 1/18 (30 + 3) > 1.5, and not 1/36 (30 + 4) > 1.56."""
    assert drafted(Drafter(8, ridge_tokens=4), rows_of([asked(0, n=1, prompt=[7, 8, 7, 8])])).tolist() == [1]
    more = Drafter(8, ridge_tokens=30)
    assert drafted(more, rows_of([asked(0, n=1, prompt=[7, 8, 7, 8])])).tolist() == [3]


def test_drafts_that_are_never_accepted_are_given_up_and_tried_again_later() -> None:
    drafter, counts = Drafter(4, ridge_tokens=8), list[int]()
    for _ in range(4000):
        rows = rows_of([asked(0, n=1, prompt=[7, 8, 7, 8])])
        count_A = drafted(drafter, rows)
        drafter.learn(count_A, np.zeros(1, np.int64))
        counts.append(int(count_A[0]))
    given_up = counts.index(0)
    assert given_up < 20
    assert any(counts[given_up:])
    assert sum(counts) < 200


def test_rates_are_apart_by_the_share_of_the_token() -> None:
    rates = AcceptanceRates()
    for _ in range(8):
        rates.observe(0.1, accepted=False)
        rates.observe(0.9, accepted=True)
    assert (rates.of(0.1), rates.of(0.5), rates.of(0.9)) == pytest.approx((0.02, 0.5, 0.98))
    for _ in range(20000):
        rates.forget()
    assert rates.of(0.1) == pytest.approx(0.1)


def test_other_turns_of_a_conversation_and_later_epochs_are_of_the_same_task() -> None:
    drafter = Drafter(4, 32)
    first = BatchedRequest(asked(0, n=1, prompt=[5, 6]))
    drafter.end(first, 0, np.array([5, 6, 9, 9, 3, 1, 2]))
    second = asked(0, n=1, prompt=[5, 6, 9, 9, 3, 8, 8, 3])  # the second turn, of the same ordinal
    assert drafted(drafter, rows_of([second]))[0] > 0
    rows = rows_of([asked(77, n=1, prompt=[5, 6])])  # the same prompt, in another epoch
    count = drafted(drafter, rows)[0]  # behind the 3 the second turn, which is under way, had an 8
    assert rows.token_RC[0, 2 : 2 + count].tolist() == [9, 9, 3, 8][:count] != []
    assert drafted(drafter, rows_of([asked(78, n=1, prompt=[5, 9])])).tolist() == [0]


def test_another_prompt_of_the_same_ordinal_is_another_task() -> None:
    """Evaluations count their tasks from 0 too."""
    drafter = Drafter(4, 32)
    drafter.end(BatchedRequest(asked(0, n=1, prompt=[5, 6])), 0, np.array([5, 6, 1, 2]))
    assert drafted(drafter, rows_of([asked(0, n=1, prompt=[6, 1])])).tolist() == [0]
    second_turn = asked(0, n=1, prompt=[5, 6, 1, 2, 9, 6])
    assert drafted(drafter, rows_of([dataclasses.replace(second_turn, request_id="r0/2")]))[0] > 0


def test_an_answer_goes_on_from_where_another_generator_left_it() -> None:
    """Its prompt ends with tokens of the answer, and is of the task nevertheless."""
    drafter = Drafter(4, 32)
    drafter.end(BatchedRequest(asked(0, n=1, prompt=[5, 6])), 0, np.array([5, 6, 1, 2, 3, 4]))
    begun = dataclasses.replace(asked(9, n=1, prompt=[5, 6, 1, 2]), made=2)
    rows = rows_of([begun])
    count = drafted(drafter, rows)[0]
    assert rows.token_RC[0, 4 : 4 + count].tolist() == [3, 4][:count] != []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "HISTORY_TOKENS", 100)
    monkeypatch.setattr(drafts, "ORDINALS", 10)
    monkeypatch.setattr(drafts, "STATES", 100)
    drafter = Drafter(4, 32)
    for ordinal in range(50):
        batched = BatchedRequest(asked(ordinal, n=1, prompt=[5, ordinal]))
        drafted(drafter, rows_of([batched.request]))
        for end in range(drafts.REMEMBERED + 3):
            drafter.end(batched, 0, np.array([5, ordinal, 1, 2, end]))
        assert drafter._states == sum(len(task.automaton) for task in drafter._tasks.values()) <= 120
    assert [len(kept) for kept in drafter._history.values()] == [drafts.REMEMBERED]
    assert drafter._remembered == 5 * drafts.REMEMBERED
    assert (len(drafter._names), drafter._samples) == (10, {})


def test_a_task_that_always_has_samples_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that always begins alike: all its samples are of one task."""
    monkeypatch.setattr(drafts, "STATES", 2000)
    drafter, rng, largest = Drafter(4, 32), np.random.default_rng(0), 0
    for ordinal in range(200):
        now, then = (asked(number, n=1, prompt=[5, 6]) for number in (ordinal, ordinal + 1))
        drafted(drafter, rows_of([now, then]))  # the next one begins before this one ends
        drafter.end(BatchedRequest(now), 0, np.append([5, 6], rng.integers(0, 99, 40)))
        largest = max(largest, drafter._states)
        assert len(drafter._tasks) <= 1
    assert largest <= 2000 + 2 * drafts.READ_TOKENS
    assert len(drafter._samples) <= 1


def test_turns_of_a_conversation_are_kept_once() -> None:
    drafter, sequence = Drafter(4, 32), np.array([5, 6])
    for turn in range(5):
        sequence = np.append(sequence, [7 + turn, 8 + turn])
        drafter.end(BatchedRequest(asked(0, n=1, prompt=sequence[:-1])), 0, sequence)
    (kept,) = drafter._history.values()
    assert [one.tolist() for one in kept] == [sequence.tolist()]
    assert drafter._remembered == len(sequence)


def test_a_long_history_is_read_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "READ_TOKENS", 10)
    drafter = Drafter(4, 32)
    for last in range(3):
        drafter.end(BatchedRequest(asked(0, n=1, prompt=[5, 6])), 0, np.array([5, 6, 1, 2, 3, last]))
    request = asked(1, n=1, prompt=[5, 6])
    rows = rows_of([request])
    counts = [int(drafted(drafter, rows)[0]) for _ in range(3)]
    assert counts[0] == 0
    assert counts[2] > 0


# ---- configuration


def test_speculation_is_of_the_embedded_engine_without_a_fixed_shape(tmp_path: Path) -> None:
    base = ["model.path=m", *TASKS, "generator.speculation.tokens=8"]
    file = tmp_path / "config.yaml"
    file.write_text("{}")
    for more, rule in (
        (["generator.engine=vllm"], "generator.vllm.extra.speculative_config"),
        (["generator.speculation.tokens=65"], "at most 64"),
        (["queue.max_staleness=0"], "fixed shape"),
        (["generator.fixed_shape=true"], "fixed shape"),
    ):
        with pytest.raises(ConfigError, match=rule):
            load_config(file, [*base, *more])


def test_a_batch_of_fixed_shape_has_no_drafts(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="no drafts at fixed shape"):
        batch(model, Drafter(4, 32), fixed_shape=True)


def test_a_recurrent_state_has_no_way_back_from_a_draft(tmp_path: Path) -> None:
    save_family("qwen3-next", tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text("{}")
    config = load_config(file, [f"model.path={tmp_path}", *TASKS, "generator.speculation.tokens=8"])
    tokenizer: Any = None
    with pytest.raises(ConfigError, match=r"generator.speculation.tokens = 8: .* recurrent state"):
        load_transformers_engine(config, tokenizer)
