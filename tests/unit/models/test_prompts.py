"""Images of tasks: rows become messages, messages become tokens and what the model's processor makes of an image."""

from __future__ import annotations

import base64
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import FAMILIES, IMAGE
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError, TaskError
from asyncrl.models.prompts import ImageReader
from asyncrl.tasks.datasets.images import with_images
from asyncrl.types import Task


def encoded(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


PNG = encoded(56, 112)
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"
HEAD = PNG[12:16] + (60_000).to_bytes(4) * 2 + PNG[24:29]
LARGE = (
    PNG[:12] + HEAD + zlib.crc32(HEAD).to_bytes(4) + PNG[33:]
)  # of which Pillow warns by an error of its own


@pytest.mark.parametrize("form", ["bytes", "base64", "path", "mapping", "Image"])
def test_an_image_of_a_row_stands_at_its_mark(form: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    image: Any = {
        "bytes": PNG,
        "base64": "data:image/png;base64," + base64.b64encode(PNG).decode(),
        "path": "a.png",
        "mapping": {"bytes": PNG, "path": None},
        "Image": Image.open(io.BytesIO(PNG)),
    }[form]
    (message,) = with_images("Look: <image>How many?", [image], tmp_path)
    before, shown, behind = message["content"]
    assert (before["text"], behind["text"]) == ("Look: ", "How many?")
    sent = shown["image"]
    assert sent == str(tmp_path / "a.png") if form == "path" else isinstance(sent, bytes)


@pytest.mark.parametrize(
    ("prompt", "image", "says"),
    [
        ("<image><image>", PNG, "fewer images"),
        ("<image>", "https://host/a.png", "nothing is downloaded"),
        ("<image>", "b.png", "which is no file"),
        ("<image>", 3, "is a int"),
    ],
)
def test_what_is_no_image_is_refused(prompt: str, image: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=says):
        with_images(prompt, [image], tmp_path)


def asked(*images: bytes) -> Task:
    return Task(0, [{"role": "user", "content": [{"type": "image", "image": image} for image in images]}])


def test_an_image_takes_as_many_tokens_as_it_has_features(tmp_path: Path) -> None:
    FAMILIES["qwen2.5-vl"].save_config(tmp_path)
    sizes = {"shortest_edge": 56 * 56, "longest_edge": 56 * 112}
    Qwen2VLImageProcessorPil(size=sizes).save_pretrained(tmp_path)
    reader = ImageReader(ModelConfig(path=str(tmp_path)))
    prompt = reader.prompt(asked(PNG, PNG, encoded(56, 56)), np.array([5, IMAGE, 6, IMAGE, 7, IMAGE, 8]))
    assert prompt.ids.tolist() == [5, *[IMAGE] * 8, 6, *[IMAGE] * 8, 7, *[IMAGE] * 4, 8]
    assert [shown.start for shown in prompt.media] == [1, 10, 19]
    first, same, other = (shown.item for shown in prompt.media)
    assert first == same != other
    assert first.arrays["image_grid_thw"].tolist() == [[1, 8, 4]]
    with pytest.raises(TaskError, match="task 0: it has 1 images, and the chat template leaves 0 places"):
        reader.prompt(asked(PNG), np.array([5, 6]))
    for broken, why in ((b"text", "cannot identify"), (EPS, "cannot identify"), (LARGE, "Image size")):
        with pytest.raises(TaskError, match=f"task 0: an image cannot be read: {why}"):
            reader.prompt(asked(broken), np.array([5, IMAGE, 6]))
    small = ImageReader(ModelConfig(path=str(tmp_path), image_pixels=56 * 56))
    assert len(small.prompt(asked(PNG), np.array([5, IMAGE, 6])).ids) < 2 + 8


def test_a_model_for_text_is_named(tmp_path: Path) -> None:
    FAMILIES["qwen3"].save_config(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path = .*reads no images"):
        ImageReader(ModelConfig(path=str(tmp_path))).prompt(asked(PNG), np.array([5, IMAGE, 6]))
