"""The demo task: addition with a scratchpad, small enough that a model learns it from scratch on a CPU core.

    prompt   47+85=
    target   21,31,>132      a digit and the carry for each place, lowest first, then the answer after '>'

The model ends its answer with the end token '$'. `write_model_folder` writes a folder without weights: the
configuration of a Qwen2 with 0.79M parameters, and a tokenizer with one token per character.

    python -m asyncrl.tasks.addition runs/addition-model
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.types import Rollout, Scored, Step, Task

END = "$"
CHARACTERS = END + "0123456789+-*=,;|>"
VOCABULARY_SIZE = 32
HELD_OUT_SEED = 1

STEP = re.compile(r"[^,]*,|[^,]+")
"""One place of a scratchpad, or the answer."""
PLACE_REWARD = 0.1


class Problems(Sequence[dict[str, Any]]):
    """Rows that are made on access. `codes` [P]: a problem x + y is the number x * 10**digits + y.

    row: makes the row of x, y and digits"""

    def __init__(
        self, codes: np.ndarray, digits: int, row: Callable[[int, int, int], dict[str, Any]]
    ) -> None:
        self._codes, self._digits, self._row = codes, digits, row

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Problems: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Problems:
        if isinstance(index, slice):
            return Problems(self._codes[index], self._digits, self._row)
        x, y = divmod(int(self._codes[index]), 10**self._digits)
        return self._row(x, y, self._digits)


def train(digits: int = 2, held_out: int = 500) -> Problems:
    """All problems of `digits` digits except the `held_out` ones of `heldout`."""
    return Problems(_training_codes(digits, held_out), digits, problem)


def heldout(digits: int = 2, size: int = 500) -> Problems:
    """`size` problems that `train` leaves out, the same on every machine."""
    return Problems(_held_out_codes(digits, size), digits, problem)


def train_pairs(digits: int = 2, held_out: int = 500) -> Problems:
    """The problems of `train`, each with a right and a wrong answer: preferences for a reward model or DPO."""
    return Problems(_training_codes(digits, held_out), digits, preference)


def heldout_pairs(digits: int = 2, size: int = 500) -> Problems:
    """The problems of `heldout` in the same form."""
    return Problems(_held_out_codes(digits, size), digits, preference)


def problem(x: int, y: int, digits: int) -> dict[str, Any]:
    """
    >>> problem(47, 85, 2)
    {'prompt': '47+85=', 'answer': '132', 'target': '21,31,>132'}
    """
    carry, scratchpad = 0, ""
    for place in range(digits):
        column = (x // 10**place) % 10 + (y // 10**place) % 10 + carry
        carry = column // 10
        scratchpad += f"{column % 10}{carry},"
    return {
        "prompt": f"{x:0{digits}d}+{y:0{digits}d}=",
        "answer": str(x + y),
        "target": f"{scratchpad}>{x + y}",
    }


def preference(x: int, y: int, digits: int) -> dict[str, Any]:
    """The wrong answer has the right scratchpad, and ends in another digit, a function of the problem.

    >>> preference(47, 85, 2)
    {'prompt': '47+85=', 'chosen': '21,31,>132', 'rejected': '21,31,>130'}
    """
    right = problem(x, y, digits)
    head, last = right["target"][:-1], int(right["target"][-1])
    wrong = (last + 1 + (3 * x + 7 * y) % 9) % 10
    return {"prompt": right["prompt"], "chosen": right["target"], "rejected": f"{head}{wrong}"}


def reward(task: Task, text: str, rollout: Rollout | None = None) -> float:
    """1 if the text behind the last '>' is the answer and the model ended there by itself, else 0."""
    ended = rollout is None or rollout.finish == "stop"
    return float(ended and ">" in text and text.rpartition(">")[2] == task.data["answer"])


def stepwise(task: Task, text: str, rollout: Rollout | None = None) -> Scored:
    """`reward`, and `PLACE_REWARD` for each correct place of the scratchpad; for algorithms that credit steps.

    A step is one place with its comma, or the answer. The state of a place is its number and the carry that the model
    wrote before it, so that many rollouts share it; the state of the answer is the whole scratchpad.

        21,31,>132    steps '21,' '31,' '>132'    states '0 ', '1 1,' and the text before '>'
    """
    *places, _ = STEP.findall(task.data["target"])
    steps = []
    for place, found in enumerate(STEP.finditer(text)):
        before = text[: found.start()]
        right = place < len(places) and found[0] == places[place]
        state = f"{place} {before[-2:]}" if place < len(places) else before
        steps.append(Step(found.start(), found.end(), PLACE_REWARD * right, state))
    return Scored(reward(task, text, rollout), steps)


def with_cost(task: Task, text: str, rollout: Rollout | None = None) -> dict[str, float]:
    """`reward` as the part 'answer', and the part 'cost': 1 for an answer longer than the target, else 0.

    For `safe_rlhf`. With `reward.weights.cost=0` the cost is logged but not part of the reward.
    """
    return {"answer": reward(task, text, rollout), "cost": float(len(text) > len(task.data["target"]))}


def write_model_folder(path: str | Path, hidden_size: int = 128, layers: int = 4) -> None:
    """Write the demo model's configuration and tokenizer as a Hugging Face folder without weights."""
    from transformers import GenerationConfig, Qwen2Config

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    end = 1 + CHARACTERS.index(END)
    config = Qwen2Config(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY_SIZE,
        intermediate_size=3 * hidden_size,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=0,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=end, pad_token_id=0).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    """A tokenizer with one token per character: '<pad>' is 0, then CHARACTERS; the other ids are unused."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", *CHARACTERS]
    # The names have no '>', with which an unused token could start an answer.
    tokens += [f"[{i}]" for i in range(len(tokens), VOCABULARY_SIZE)]
    unknown = tokens[-1]
    model = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=unknown))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        eos_token=END,
        unk_token=unknown,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _training_codes(digits: int, held_out: int) -> np.ndarray:
    return np.setdiff1d(np.arange(10 ** (2 * digits)), _held_out_codes(digits, held_out))


def _held_out_codes(digits: int, size: int) -> np.ndarray:
    """[size] int64, sorted."""
    numbers = 10**digits
    if not 0 < size <= numbers * numbers // 5:
        limit = numbers * numbers // 5
        raise ConfigError("evaluation.options.size", size, f"1 to {limit} of {digits} digits", "set size=500")
    draw, chosen = random.Random(HELD_OUT_SEED), set[int]()
    while len(chosen) < size:
        chosen.add(draw.randrange(numbers) * numbers + draw.randrange(numbers))
    return np.array(sorted(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the demo model's folder: configuration and tokenizer."
    )
    parser.add_argument("folder")
    folder = parser.parse_args().folder
    write_model_folder(folder)
    print(f"{folder}: the configuration and the tokenizer of the demo model, no weights")


if __name__ == "__main__":
    main()
