"""Questions about pictures of coloured shapes on a grid: how many are of one kind, where the only one is, what it is.

prompt   [picture] how many disks?       where is it?       what is it?
answer   three                           bottom right       triangle

`write_viewer` writes the folder of a model so small that a CPU trains it: its vision tower sees each cell of a picture
as one token. It has no weights.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal

from asyncrl.tasks.generated import GeneratedRow, GeneratedRows
from asyncrl.tasks.tiny_model import HEADS, save_tokenizer, text_shape

GRID = 2
"""Cells of a picture's side."""

IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
CELL, MERGED = 16, 2
"""Pixels of a cell's side; patches of a cell, in both directions, that are one token."""

PATCH = CELL // MERGED

SHAPES, COLOURS = ("square", "disk", "triangle", "ring"), ("red", "lime", "blue", "yellow")
NUMBERS = ("one", "two", "three", "four")
PLACES = tuple(" ".join(place) for place in product(("top", "bottom"), ("left", "right")))

Drawing = Mapping[str, tuple[str, str]]
"""Place → colour and shape."""


def tasks(guesses: float = 0.0, count: int = 100_000, seed: int = 0, held_out: bool = False) -> GeneratedRows:
    """Rows {prompt, images, answer, target}.

    Args:
        guesses: The share of demonstrations whose answer is drawn at random.
        count: rows of an epoch.
        seed: other numbers give other rows.
        held_out: pictures and questions that no training task has.
    """

    def row(draw: Random) -> GeneratedRow:
        question = draw.choice(("how many", "where", "what"))
        number = draw.randint(1, 4) if question == "how many" else 1
        kinds = [(draw.choice(COLOURS), draw.choice(SHAPES)) for _ in range(number)]
        shown = dict(zip(draw.sample(PLACES, number), kinds, strict=True))
        prompt, answer, answers = _asked(question, shown)
        target = draw.choice(answers) if draw.random() < guesses else answer
        return {"prompt": prompt, "images": [picture(shown)], "answer": answer, "target": target}

    return GeneratedRows(row, count, seed, held_out)


def _asked(question: str, shown: Drawing) -> tuple[str, str, tuple[str, ...]]:
    """The prompt of a question, its answer, and all answers to such questions."""
    place, (_, shape) = next(iter(shown.items()))
    if question == "how many":
        number = sum(shape == other for _, other in shown.values())
        return f"how many {shape}s?", NUMBERS[number - 1], NUMBERS
    return f"{question} is it?", *((place, PLACES) if question == "where" else (shape, SHAPES))


def picture(shown: Drawing) -> bytes:
    """A PNG of these shapes on black."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (GRID * CELL, GRID * CELL))
    brush = ImageDraw.Draw(image)
    for place, (colour, shape) in shown.items():
        row, column = divmod(PLACES.index(place), GRID)
        left, top = column * CELL + 1, row * CELL + 1
        right, bottom = left + CELL - 3, top + CELL - 3
        match shape:
            case "square":
                brush.rectangle((left, top, right, bottom), colour)
            case "disk":
                brush.ellipse((left, top, right, bottom), colour)
            case "ring":
                brush.ellipse((left, top, right, bottom), outline=colour, width=3)
            case "triangle":
                brush.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_model_folder(folder: str | Path, **shape: Any) -> None:
    """Write a model for these questions. shape: as of `write_viewer`"""
    rows = tasks(count=300)
    texts = [text for at in range(300) for text in (rows[at]["prompt"], rows[at]["answer"])]
    write_viewer(folder, texts, GRID, **shape)


def write_viewer(
    folder: str | Path,
    texts: Iterable[str],
    side: int,
    *,
    pieces: Sequence[str] = (),
    family: Literal["qwen2_5_vl", "qwen3_vl"] = "qwen3_vl",
    hidden_size: int = 64,
) -> None:
    """Write a Hugging Face folder: configuration, tokenizer and image processor.

    texts, pieces: as of `save_tokenizer` · side: cells of a picture's side · family: transformers' type
    """
    from transformers import AutoConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = save_tokenizer(folder, texts, [*IMAGE, *pieces])
    start, image, end = (tokenizer.convert_tokens_to_ids(name) for name in IMAGE)
    pairs = hidden_size // HEADS // 2
    spread = {"initializer_range": 0.1}  # with transformers' own, so narrow a tower hardly learns at first
    rotary = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
        **({"mrope_interleaved": True} if family == "qwen3_vl" else {}),
    }
    vision = {
        **spread,
        "depth": 2,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_heads": HEADS,
        "out_hidden_size": hidden_size,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "num_position_embeddings": (side * MERGED) ** 2,
        "deepstack_visual_indexes": [0],
        "window_size": MERGED * PATCH,
        "fullatt_block_indexes": [1],
    }
    AutoConfig.for_model(
        family,
        text_config={**text_shape(tokenizer, hidden_size, layers=2), **spread, "rope_parameters": rotary},
        vision_config=vision,
        vision_start_token_id=start,
        image_token_id=image,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGED,
        image_mean=[0, 0, 0],  # black is 0, so that an empty cell has the features of its position alone
        image_std=[1, 1, 1],
        size={"shortest_edge": CELL**2, "longest_edge": (side * CELL) ** 2},
    ).save_pretrained(folder)
