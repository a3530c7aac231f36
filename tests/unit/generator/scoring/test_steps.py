"""Steps in characters become values per token, whatever the tokenizer does to the characters."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.generator.scoring.steps import anchor_hash, check_steps, step_columns, token_ends
from asyncrl.types import Step

TEXT = "21,31,>132"
THREE = (Step(0, 3, 0.5, "a"), Step(3, 6, 0.25, "b"), Step(6, 10, 0.0, "a"))


def columns(steps: tuple[Step, ...], ends: list[int], text: str = TEXT) -> dict[str, list[float]]:
    """Of the output tokens, after a prompt of two."""
    made = step_columns(steps, text, np.array(ends, np.int64), len(ends) + 2)
    assert {name: str(column.dtype) for name, column in made.items()} == {
        "step": "int32",
        "anchor": "int64",
        "step_rewards": "float32",
    }
    assert [column[:2].tolist() for column in made.values()] == [[-1, -1], [0, 0], [0, 0]]
    return {name: column[2:].tolist() for name, column in made.items()}


def test_tokens_get_their_step_its_anchor_and_on_its_last_one_its_reward() -> None:
    made = columns(THREE, [2, 3, 5, 6, 7, 10, 10])
    assert made["step"] == [0, 0, 1, 1, 2, 2, 2]
    assert made["step_rewards"] == [0, 0.5, 0, 0.25, 0, 0, 0]
    a, b = (anchor_hash(Step(0, 1, anchor=anchor), "") for anchor in "ab")
    assert made["anchor"] == [a, a, b, b, a, a, a]


def test_the_end_token_belongs_to_a_last_step_that_reaches_the_end_and_carries_its_reward() -> None:
    assert columns((Step(6, 10, 1.0),), [6, 10, 10])["step_rewards"] == [0, 0, 1.0]
    made = columns((Step(6, 9, 1.0),), [6, 9, 10, 10])
    assert (made["step"], made["step_rewards"]) == ([-1, 0, -1, -1], [0, 1.0, 0, 0])


def test_a_token_over_two_steps_belongs_to_the_first() -> None:
    assert columns(THREE, [2, 5, 6, 10])["step"] == [0, 0, 1, 2]


def test_a_step_inside_a_token_of_another_leaves_its_reward_there_and_no_gap_in_the_numbers() -> None:
    made = columns(THREE, [2, 6, 10])
    assert (made["step"], made["step_rewards"]) == ([0, 0, 1], [0, 0.75, 0])


def test_text_before_between_and_after_steps_belongs_to_none() -> None:
    made = columns((Step(3, 4), Step(6, 7)), list(range(1, 11)))
    assert made["step"] == [-1, -1, -1, 0, -1, -1, 1, -1, -1, -1]
    assert [anchor == 0 for anchor in made["anchor"]] == [step == -1 for step in made["step"]]


def test_a_first_token_without_characters_goes_with_the_first_one() -> None:
    assert columns(THREE, [0, 3, 6, 10])["step"] == [0, 0, 1, 2]


def test_an_answer_without_tokens_or_steps() -> None:
    assert columns((), [], "") == {"step": [], "anchor": [], "step_rewards": []}
    assert columns((), [1, 2], "ab") == {"step": [-1, -1], "anchor": [0, 0], "step_rewards": [0, 0]}


cuts = st.lists(st.integers(0, 30), min_size=2, max_size=12, unique=True).map(sorted)
rewards = st.lists(st.integers(-8, 8), min_size=6, max_size=6)


@given(cuts, rewards, st.lists(st.integers(0, 30), max_size=20).map(sorted))
@settings(deadline=None)
def test_no_reward_is_lost_and_numbers_rise_from_0(
    cuts: list[int], rewards: list[int], ends: list[int]
) -> None:
    steps = [Step(a, b, r) for a, b, r in zip(cuts[::2], cuts[1::2], rewards, strict=False)]
    made = step_columns(steps, "x" * 30, np.array([*ends, 30]), len(ends) + 1)
    assert made["step_rewards"].sum() == sum(step.reward for step in steps)
    numbers = [step for step in made["step"].tolist() if step >= 0]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(len(set(numbers))))


def test_anchors_are_equal_where_states_are_and_the_same_in_every_process() -> None:
    hashes = [anchor_hash(Step(2, 3, anchor=anchor), "abc") for anchor in ("1", b"1", 1, "ab", None)]
    assert len(set(hashes)) == 4
    assert hashes[3] == hashes[4]  # none: the text before the step
    assert hashes[0] == 1501628925071248429
    assert all(-(1 << 63) <= hashed < 1 << 63 for hashed in hashes)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([Step(0, 11)], r"step 0 is \[0, 11\), which must be a character or more of \[0, 10\)"),
        ([Step(-1, 2)], r"step 0 is \[-1, 2\)"),
        ([Step(3, 3)], r"step 0 is \[3, 3\)"),
        ([Step(0.0, 2)], r"step 0 is \[0.0, 2\)"),
        ([Step(0, 4), Step(3, 5)], r"step 1 is \[3, 5\), which must be a character or more of \[4, 10\)"),
        ([Step(0, 1, float("nan"))], "the reward of step 0 is nan"),
        ([Step(0, 1, 1e39)], "the reward of step 0 is"),
        ([Step(0, 1, 0.0, ("a", 1))], "the anchor of step 0 is"),
        ([(0, 1, 0.5)], "not an asyncrl.Step"),
    ],
)
def test_what_is_no_step_is_refused(steps: list[Step], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_steps(steps, TEXT)


CORPUS = ["the cat sat on the mat, the end. naïve é\n\n"] * 5


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's and Qwen's: a character may lie in several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2's: the space before the first word of a text is not shown."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@pytest.mark.parametrize("make", [byte_level, metaspace])
@given(text=st.text(st.sampled_from("the cat, é日😀\n."), max_size=25), end=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ends_are_those_of_decoding_every_prefix(make: object, text: str, end: bool) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * end
    prefixes = [tokenizer.decode(ids[:t], skip_special_tokens=True) for t in range(len(ids) + 1)]
    whole = prefixes[-1]
    ends = token_ends(lambda some: tokenizer.decode(some, skip_special_tokens=True), np.array(ids), whole)
    shared = [next((i for i, c in enumerate(p) if c != whole[i]), len(p)) for p in prefixes[1:]]
    assert ends.tolist() == shared


@given(st.lists(st.integers(0, 299), max_size=12))
@settings(max_examples=100, deadline=None)
def test_any_tokens_have_rising_ends_that_reach_the_text(ids: list[int]) -> None:
    tokenizer = byte_level()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = token_ends(lambda some: tokenizer.decode(some, skip_special_tokens=True), np.array(ids, int), text)
    assert (np.diff(ends, prepend=0) >= 0).all()
    assert not ids or ends[-1] == len(text)
