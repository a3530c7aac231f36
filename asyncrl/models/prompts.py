"""From tasks to the prompts that engines read: the policy's tokenizer with its chat template, and images.

messages ─▸ chat template ─▸ ids with one token for each image ─▸ as many as the image has features
    └────▸ images ─▸ the model's image processor ─▸ `MediaItem` ──┘
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import xxhash
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from asyncrl.config.rules import require
from asyncrl.config.schema import Config, ModelConfig
from asyncrl.config.sections.tasks import keys_of_messages
from asyncrl.errors import ConfigError, TaskError
from asyncrl.models.loading import load_model_config, load_tokenizer, read_model
from asyncrl.types import Array, MediaItem, Prompt, Shown, Task

WITHOUT_IMAGES = ("vllm", "vllm_server", "sglang")
"""Values of `generator.engine` for engines that are given tokens alone."""

MAX_IMAGE_BYTES = 1 << 25
MAX_PIXELS = 1 << 26
"""Limits on one image: its encoded bytes, and its pixels before it is scaled down."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Formats of images that are read. Pillow knows others too, and starts Ghostscript for one of them."""


def policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The policy's tokenizer, with `tasks.chat_template` if that is set. Raises ConfigError if there is none, or the
    configuration needs a chat template and has none, a broken one, or one without a variable that is to be set."""
    tokenizer = load_tokenizer(config.model)
    if config.tasks.chat_template is not None:
        tokenizer.chat_template = _template(config.tasks.chat_template, tokenizer)
    for name, value in config.tasks.chat_template_kwargs.items():
        require(
            name in str(tokenizer.chat_template),
            f"tasks.chat_template_kwargs.{name}",
            value,
            "is no variable of the chat template",
            "leave it out, or look into the template for the variable's name",
        )
    for key, value in keys_of_messages(config.tasks, config.evaluation):
        if not tokenizer.chat_template:
            raise _without_template(key, value, tokenizer)
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, task: Task, variables: Mapping[str, Any] | None = None
) -> Array:
    """[P] int64. Text is encoded as it is, messages by the chat template with these variables: a token for each image.

    Raises ConfigError for messages without a template, TaskError for messages that the template does not take.
    """
    if isinstance(task.prompt, str):
        return np.array(tokenizer.encode(task.prompt, add_special_tokens=False), np.int64)
    if not tokenizer.chat_template:
        raise _without_template("tasks.chat_template", None, tokenizer)
    try:
        ids = tokenizer.apply_chat_template(
            task.prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **(variables or {})
        )
    except Exception as error:  # a template is a program
        why = f"{type(error).__name__}: {error}"
        raise TaskError(
            f"task {task.ordinal}: its messages do not go through the chat template ({why})"
        ) from error
    return np.array(ids, np.int64)


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images of messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


class ImageReader:
    """Images as the model's processor gives them. Nothing is loaded before the first image.

    engine: `generator.engine`, which reads the prompts; None: none does
    """

    def __init__(self, model: ModelConfig, engine: str | None = None) -> None:
        self._model, self._engine = model, engine

    def check(self) -> None:
        """Raises ConfigError for a model or an engine that reads no images, and without the packages for it."""
        require(
            self._engine not in WITHOUT_IMAGES,
            "generator.engine",
            self._engine,
            "is not given the images that tasks or environments have",
            "set generator.engine=transformers, or use tasks without images",
        )
        _ = self._processor

    def prompt(self, task: Task, ids: Array) -> Prompt:
        """The prompt of a task whose messages are `ids`. Raises ConfigError as `shown_in`, TaskError for an image that
        cannot be read."""
        if isinstance(task.prompt, str):
            return Prompt(ids)
        try:
            return self.shown_in(ids, task.prompt)
        except (OSError, ValueError) as error:
            raise TaskError(f"task {task.ordinal}: {error}") from error

    def shown_in(self, ids: Array, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """The prompt of `ids`, which have one token for each image of the messages.

        An image is encoded bytes, a path, or an Image of Pillow. Raises ConfigError as `check` does; ValueError or
        OSError for an image that is too large or cannot be read.
        """
        images = images_in(messages)
        if not images:
            return Prompt(ids)
        self.check()
        items = [self._item(image) for image in images]
        (at,) = np.nonzero(ids == self._token)
        if len(at) != len(items):
            raise ValueError(
                f"it has {len(items)} images, and the chat template leaves {len(at)} places for them"
            )
        if (np.diff(at, prepend=-1, append=len(ids)) == 1).any():
            raise ValueError(
                "an image must stand between tokens of text, which its chat template does not have there"
            )
        counts = np.ones(len(ids), np.int64)
        counts[at] = [item.tokens for item in items]
        starts = (np.cumsum(counts) - counts)[at].tolist()
        return Prompt(np.repeat(ids, counts), tuple(map(Shown, starts, items)))

    def _item(self, image: Any) -> MediaItem:
        made = self._processor(images=[_opened(image)], return_tensors="np")
        arrays = {name: np.ascontiguousarray(made[name]) for name in self._processor.model_input_names}
        digest = xxhash.xxh3_128()
        for array in arrays.values():
            digest.update(array.tobytes())
        tokens = int(arrays["image_grid_thw"].prod()) // self._processor.merge_size**2
        return MediaItem("image", tokens, arrays, digest.digest())

    @cached_property
    def _token(self) -> int:
        config, path = load_model_config(self._model), self._model.path
        token = getattr(config, "image_token_id", None)
        remedy = "use a model for images of docs/models.md, or tasks without images"
        if token is None:
            raise ConfigError("model.path", path, "reads no images, and a task has some", remedy)
        return int(token)

    @cached_property
    def _processor(self) -> Any:
        _ = self._token
        if find_spec("PIL") is None:
            rule = "reads images by the package pillow, which is missing"
            raise ConfigError("model.path", self._model.path, rule, "pip install pillow")
        more = {"max_pixels": self._model.image_pixels} if self._model.image_pixels else {}
        return read_model(
            self._model,
            lambda: AutoImageProcessor.from_pretrained(self._model.path, local_files_only=True, **more),
        )


def _opened(image: Any) -> Any:
    """An Image of Pillow in RGB. Raises OSError or ValueError."""
    from PIL import Image

    if isinstance(image, str | bytes):
        size = len(image) if isinstance(image, bytes) else Path(image).stat().st_size
        if size > MAX_IMAGE_BYTES:
            raise ValueError(f"an image of {size} bytes; {MAX_IMAGE_BYTES} are allowed")
    try:
        if isinstance(image, str | bytes):
            image = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"it has {image.width} × {image.height} pixels; {MAX_PIXELS} are allowed")
        return image.convert("RGB")
    except Exception as error:  # Pillow has its own for a large image, and many for a broken one
        raise ValueError(f"an image cannot be read: {error}") from error


def _template(path: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Read a chat template, and try to render it."""
    try:
        template = Path(path).read_text(encoding="utf-8")
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "0"}],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        rule = f"is no chat template: {getattr(error, 'strerror', None) or error}"
        remedy = "give the path of a Jinja file, such as the chat_template.jinja of another model"
        raise ConfigError("tasks.chat_template", path, rule, remedy) from None
    return template


def _without_template(key: str, value: object, tokenizer: PreTrainedTokenizerBase) -> ConfigError:
    return ConfigError(
        key,
        value,
        f"prompts that are messages need a chat template, and the tokenizer of {tokenizer.name_or_path} has none",
        "set tasks.chat_template=FILE, or use an instruction-tuned model",
    )
