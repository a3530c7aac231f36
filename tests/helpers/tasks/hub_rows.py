"""Data sets of the Hugging Face hub as small local folders: the columns of their cards, with rows made up by hand."""

from __future__ import annotations

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import datasets
from PIL import Image

BOXED = r"So the value is $\boxed{%s}$."


def packed(text: str) -> str:
    """As LiveCodeBench stores private tests: base64(zlib(pickle of protocol 4)), the pickle written by hand."""
    raw = text.encode()
    pickled = b"\x80\x04X" + len(raw).to_bytes(4, "little") + raw + b"\x94."
    return base64.b64encode(zlib.compress(pickled)).decode()


def _messages(text: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": text}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": text},
    }


def _question(number: int) -> dict[str, Any]:
    return {
        "id": f"train_{number}",
        "question": f"which river has the number {number}?",
        "golden_answers": ["The Tessin", f"river {number}"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "as theirs"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": ["The Tessin"]}, "style": "rule"},
    }


def _figure() -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


STDIN = {"input": "2\n", "output": "4\n", "testtype": "stdin"}
CALL = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}


def _contest(title: str, code: str, test: dict[str, str], metadata: dict[str, str]) -> dict[str, Any]:
    return {
        "question_title": title,
        "question_content": "Double the number." if not code else "Add all numbers.",
        "platform": "leetcode" if code else "atcoder",
        "question_id": title,
        "contest_id": "c1",
        "contest_date": "2025-01-04T00:00:00",
        "starter_code": code,
        "difficulty": "easy",
        "public_test_cases": json.dumps([test]),
        "private_test_cases": packed(json.dumps([test, test])),
        "metadata": json.dumps(metadata),
    }


START = "class Solution:\n    def total(self, some: List[int], one: int) -> int:\n        "
CHOICES = {"Correct Answer": "a proton\n", **{f"Incorrect Answer {n}": f"particle {n}" for n in (1, 2, 3)}}

ROWS: dict[tuple[str, str, str], list[dict[str, Any]]] = {
    ("openai/gsm8k", "main", split): [
        {"question": f"{n} thousand and one?", "answer": f"Count: <<{n}*1000+1={n}001>>\n#### {n},001"}
        for n in range(1, 5)
    ]
    for split in ("train", "test")
}
ROWS |= {
    ("BytedTsinghua-SIA/DAPO-Math-17k", "default", "train"): [
        _messages(f'Solve: {n}+1. The last line is "Answer: $Answer".', str(n + 1)) for n in range(4)
    ],
    ("HuggingFaceH4/aime_2024", "default", "train"): [
        {"id": 60, "problem": "What is $2^3$?", "solution": "$8$", "answer": "008", "url": "", "year": "2024"}
    ],
    ("math-ai/aime25", "default", "test"): [{"problem": "What is $7 \\cdot 10$?", "answer": "70", "id": "0"}],
    ("HuggingFaceH4/MATH-500", "default", "test"): [
        {
            "problem": "Halve one.",
            "solution": BOXED % r"\frac{1}{2}",
            "answer": r"\frac{1}{2}",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        }
    ],
    ("DigitalLearningGmbH/MATH-lighteval", "default", "train"): [
        {"problem": f"Double {n}.", "level": "Level 1", "type": "Algebra", "solution": BOXED % (2 * n)}
        for n in range(4)
    ],
    ("POLARIS-Project/Polaris-Dataset-53K", "default", "train"): [
        {"problem": f"Add one to {n}.", "answer": str(n + 1), "difficulty": "3/8"} for n in range(4)
    ],
    ("Idavidrein/gpqa", "gpqa_diamond", "train"): [
        {"Question": f"Which is the heaviest of experiment {n}?\n", **CHOICES, "Record ID": f"rec{n}"}
        for n in range(8)
    ],
    ("lighteval/code_generation_lite", "v6", "test"): [
        _contest("Twice", "", STDIN, {}),
        _contest("Total", START, CALL, {"func_name": "total"}),
    ],
    ("agentica-org/DeepCoder-Preview-Dataset", "primeintellect", "train"): [
        {
            "problem": f"Double {n}.",
            "solutions": ["pass"],
            "tests": json.dumps([{**STDIN, "type": "stdin_stdout"}]),
        }
        for n in range(4)
    ],
    **{
        ("PeterJinGo/nq_hotpotqa_train", "default", split): [_question(n) for n in range(4)]
        for split in ("train", "test")
    },
    **{
        ("hiyouga/geometry3k", "default", split): [
            {"images": [_figure()], "problem": f"<image>Find x{n}.", "answer": str(n)} for n in range(4)
        ]
        for split in ("train", "test")
    },
}
"""(name, subset, split) → rows."""


def write_hub(folder: Path) -> None:
    """Write folder/NAME for each data set, as `hf download` leaves it: a README with its subsets, and Parquet files."""
    cards: dict[str, dict[str, list[str]]] = {}
    for (name, subset, split), rows in ROWS.items():
        table = datasets.Dataset.from_list(rows)
        if "images" in table.column_names:
            table = table.cast_column("images", datasets.List(datasets.Image()))
        table.to_parquet(folder / name / subset / f"{split}.parquet")
        cards.setdefault(name, {}).setdefault(subset, []).append(split)
    for name, subsets in cards.items():
        lines = ["---", "configs:"]
        for subset, splits in subsets.items():
            lines += [f"- config_name: {subset}", "  data_files:"]
            lines += [f"  - {{split: {split}, path: {subset}/{split}.parquet}}" for split in splits]
        (folder / name / "README.md").write_text("\n".join([*lines, "---", ""]))
