"""Images of rows, as parts of chat messages that can be sent: encoded bytes, or a path that generators read.

    {"prompt": "<image>How many?", "images": […]}
        ─▸ [{"role": "user", "content": [{"type": "image", "image": …}, {"type": "text", "text": "How many?"}]}]

An image is a path, encoded bytes, 'data:image/…;base64,…', an Image of Pillow, or a mapping of the package datasets.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import TaskError

MARK = "<image>"
"""In a text: the place of the next image."""

MAX_TASK_BYTES = 1 << 25
"""The images of one task that travel with it."""


def with_images(prompt: Any, images: Sequence[Any] | None, folder: Path) -> Any:
    """The prompt with these images at the marks of its texts, or before it if it has none. Images that stand in its
    messages already take the form in which they can be sent.

    folder: that of relative paths. Raises TaskError for an image that is none, and for marks without an image.
    """
    if images is None and isinstance(prompt, str):
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    left = iter([{"type": "image", "image": image} for image in images or ()])
    if images and not any(MARK in text for message in messages for text in _texts(message)):
        first, *others = messages
        messages = [{**first, "content": [*left, *_parts(first.get("content"))]}, *others]
    elif images is not None:
        messages = [{**message, "content": _marked(message.get("content"), left)} for message in messages]
        if next(left, None) is not None:
            raise TaskError(f"has more images than {MARK} in its prompt")
    sent = [{**message, "content": _sendable(message.get("content"), folder)} for message in messages]
    total = sum(len(image) for image in _images(sent) if isinstance(image, bytes))
    if total > MAX_TASK_BYTES:
        raise TaskError(f"has images of {total} bytes, {MAX_TASK_BYTES} are allowed; give their paths")
    return sent


def _parts(content: Any) -> list[Mapping[str, Any]]:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(part, Mapping) for part in parts):
        raise TaskError("has a message whose content is neither a text nor a list of parts with a type")
    return parts


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    return (part["text"] for part in _parts(message.get("content")) if isinstance(part.get("text"), str))


def _images(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    return (part["image"] for message in messages for part in _parts(message["content"]) if "image" in part)


def _marked(content: Any, images: Iterator[dict[str, Any]]) -> Any:
    """A content with an image at each mark."""
    if isinstance(content, str) and MARK not in content:
        return content
    parts: list[Any] = []
    for part in _parts(content):
        pieces = part["text"].split(MARK) if isinstance(part.get("text"), str) else [None]
        for number, piece in enumerate(pieces):
            if number:
                image = next(images, None)
                if image is None:
                    raise TaskError(f"has fewer images than {MARK} in its prompt")
                parts.append(image)
            if piece is None:
                parts.append(part)
            elif piece:
                parts.append({"type": "text", "text": piece})
    return parts


def _sendable(content: Any, folder: Path) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in _parts(content):
        # In a table all parts have all fields.
        given = {name: value for name, value in part.items() if value is not None}
        if given.get("type") == "image_url":
            given = {"type": "image", "image": given["image_url"]["url"]}
        if given.get("type") == "image":
            given["image"] = _image(given.get("image"), folder)
        parts.append(given)
    return parts


def _image(image: Any, folder: Path) -> bytes | str:
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()
    if not isinstance(image, str):
        raise TaskError(
            f"has an image that is a {type(image).__name__}: give a path, encoded bytes or base64"
        )
    if image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise TaskError(f"has an image in base64 that is none: {error}") from None
    if image.startswith(("http://", "https://")):
        raise TaskError(f"has the image {image}: nothing is downloaded; fetch it and give its path")
    path = folder / image.removeprefix("file://")
    if not path.is_file():
        raise TaskError(f"has the image {path}, which is no file")
    return str(path.absolute())
