"""Reads single boxes of the safetensors of a Hugging Face folder or a cached hub name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.sync.layout.layout import Box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Where there are both, the first is read, as transformers does."""


class Slices:
    """The tensors of one checkpoint. Files are opened when they are needed and stay open."""

    def __init__(self, files: Mapping[str, Path], key: str, path: str) -> None:
        """
        Args:
            files: the file of each tensor.
            key: the configuration key of `path`, for errors.
        """
        self._files, self._key, self.path = files, key, path
        self._open: dict[Path, Any] = {}

    @staticmethod
    def of(path: str, key: str) -> Slices | None:
        """The safetensors at `path`, or None if there are none. Raises ConfigError if they cannot be read."""
        single, index = _find(path, SINGLE), _find(path, INDEX)
        try:
            if single is not None:
                with safe_open(single, framework="pt") as file:
                    return Slices(dict.fromkeys(file.keys(), single), key, path)
            if index is not None:
                where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return Slices({name: index.parent / file for name, file in where.items()}, key, path)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise _unreadable(key, path, single or index, error) from error
        return None

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def read(self, name: str, shape: Sequence[int], box: Box) -> Tensor:
        """Read a box of the tensor, in the file's dtype; the result may be a view of the file.

        Args:
            shape: that of the whole tensor.

        Raises:
            ConfigError: The checkpoint lacks the tensor, has it in another shape, or cannot be read.
        """
        file = self._files.get(name)
        if file is None:
            raise ConfigError(
                self._key,
                self.path,
                f"its safetensors have no {name}, which a model of its config.json has",
                "fetch the weights again, or the config.json that they belong to",
            )
        try:
            whole = self._opened(file).get_slice(name)
            found = tuple(whole.get_shape())
            if found == tuple(shape):
                return whole[box.slices()] if shape else self._opened(file).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(self._key, self.path, file, error) from error
        raise ConfigError(
            self._key,
            self.path,
            f"in {file.name} {name} has the shape {list(found)}, in a model of its config.json {list(shape)}",
            "fetch the weights again, or the config.json that they belong to",
        )

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


def _find(path: str, name: str) -> Path | None:
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.exists() else None
    cached = try_to_load_from_cache(path, name)
    return Path(cached) if isinstance(cached, str) else None


def _unreadable(key: str, path: str, file: Path | None, error: Exception) -> ConfigError:
    name = file.name if file is not None else SINGLE
    return ConfigError(key, path, f"its {name} cannot be read ({error})", f"fetch {name} again")
