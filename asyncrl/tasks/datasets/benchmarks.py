"""Rows of public data sets whose prompt or answer is made of several columns, for which keys do not suffice.

    gsm8k             the number behind '####' of the solution is the answer
    gpqa              four columns of choices become one prompt; the letter of the right one is the answer
    live_code_bench   the statement and the code to begin with become one prompt; the tests stay as they are stored

    evaluation:
      source: asyncrl.tasks.datasets.benchmarks:gpqa
      options: {source: "hf:Idavidrein/gpqa", subset: gpqa_diamond}

`source` may also be a folder of files, a .parquet or a .jsonl file with the same columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.datasets.rows import JsonlRows, data_set

Columns = Mapping[str, Any]

ANSWER_MARK = "####"
"""The answer of a GSM8K solution follows it."""

LETTERS = "ABCD"
CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

STEPS = f'Think step by step, and write the final answer behind "{ANSWER_MARK}".'

FROM_STDIN = """\
Write a Python program that reads its input from stdin and prints the answer to stdout. Put the whole program into one \
block:
```python
# your program
```"""
FROM_CODE = """\
Complete this Python code. Put the whole program into one block:
```python
{code}
```"""


class MadeRows:
    """The rows of a data set, each made into another one on access.

    Access raises TaskError for a row without a column that `make` reads, or with a value that it cannot read.
    """

    def __init__(self, rows: Sequence[Columns], source: str, make: Callable[[int, Columns], Columns]) -> None:
        """make: (number of the row, row) → row"""
        self._rows, self._source, self._make = rows, source, make

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Columns:
        row = self._rows[index]
        try:
            return self._make(index, row)
        except KeyError as missing:
            raise TaskError(f"has no column {missing}, only {', '.join(row)}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise TaskError(f"{self._source}, row {index}: {error}") from None


def gsm8k(
    source: str = "hf:openai/gsm8k",
    subset: str | None = "main",
    split: str = "train",
    instruction: str = STEPS,
) -> MadeRows:
    """Rows {prompt, answer} of GSM8K (arXiv 2110.14168).

    instruction: follows the question in the prompt
    """

    def make(index: int, row: Columns) -> Columns:
        _, mark, answer = row["answer"].rpartition(ANSWER_MARK)
        if not mark:
            raise ValueError(f"its answer has no {ANSWER_MARK}")
        return {
            "prompt": f"{row['question']} {instruction}".strip(),
            "answer": answer.strip().replace(",", ""),
        }

    return MadeRows(_opened(source, subset, split), source, make)


def gpqa(
    source: str = "hf:Idavidrein/gpqa",
    subset: str | None = "gpqa_diamond",
    split: str = "train",
    seed: int = 0,
) -> MadeRows:
    """Rows {prompt, answer} of GPQA (arXiv 2311.12022): the answer is A, B, C or D.

    seed: draws the order of the choices, for each question once
    """

    def make(index: int, row: Columns) -> Columns:
        order = Random(f"{seed}/{index}").sample(CHOICES, len(CHOICES))
        shown = "\n".join(
            f"{letter}. {row[name].strip()}" for letter, name in zip(LETTERS, order, strict=True)
        )
        return {"prompt": f"{row['Question'].strip()}\n\n{shown}", "answer": LETTERS[order.index(CHOICES[0])]}

    return MadeRows(_opened(source, subset, split), source, make)


def live_code_bench(
    source: str = "hf:lighteval/code_generation_lite", subset: str | None = "v6", split: str = "test"
) -> MadeRows:
    """Rows {prompt, function, public_test_cases, private_test_cases} of LiveCodeBench (arXiv 2403.07974), for
    `asyncrl.rewards.contests:ContestTests`.

    function: the method of the class Solution that tests call; "" for programs that read stdin
    """

    def make(index: int, row: Columns) -> Columns:
        code = row["starter_code"].strip()
        form = FROM_CODE.format(code=code) if code else FROM_STDIN
        kept = {name: row[name] for name in ("public_test_cases", "private_test_cases")}
        called = json.loads(row["metadata"] or "{}").get("func_name", "")
        return {"prompt": f"{row['question_content'].strip()}\n\n{form}", "function": called, **kept}

    return MadeRows(_opened(source, subset, split), source, make)


def _opened(source: str, subset: str | None, split: str) -> Any:
    """Raises ConfigError for a source that is not there, or that has no such subset or split."""
    if source.endswith(".jsonl"):
        return JsonlRows(Path(source), "options")
    of_file = source.endswith(".parquet") or subset is None
    return data_set(source, {"split": split} if of_file else {"split": split, "subset": subset}, "options")
